"""What ships with the package: the tiny base model and how it is made."""

from pathlib import Path

TINY_BASE = "tiny-base"


def model_path(name: str) -> str:
    """A model's folder or hub name; "tiny-base" is the model that ships with the package."""
    return str(Path(__file__).parent / TINY_BASE) if name == TINY_BASE else name
