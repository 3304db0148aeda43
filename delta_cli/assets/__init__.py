"""What ships with the package, the tiny base model and how it is made, and where models lie."""

from pathlib import Path

TINY_BASE = "tiny-base"


def model_path(name: str) -> str:
    """A model's folder or hub name; "tiny-base" is the model that ships with the package."""
    return str(Path(__file__).parent / TINY_BASE) if name == TINY_BASE else name


def config_file(name: str) -> Path | None:
    """The config.json of a model folder, or of a hub model that was downloaded before; None where it is not here."""
    folder = Path(model_path(name)).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a hub name
        return None
    return Path(found) if isinstance(found, str) else None
