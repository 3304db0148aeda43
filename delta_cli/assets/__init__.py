"""What ships with the package, the tiny base model and how it is made, and where models lie."""

import json
from pathlib import Path
from typing import Any

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


def context_of(model: str) -> int | None:
    """The number of tokens that a model reads, from its config.json; None if the file is not here or does not say."""
    file = config_file(model)
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):  # the backend reports it when it reads the file
        return None
    configs = [config, config.get("text_config")] if isinstance(config, dict) else []
    found = [each.get("max_position_embeddings") for each in configs if isinstance(each, dict)]
    return next((limit for limit in found if isinstance(limit, int) and limit > 1), None)
