"""Further steps of an export: quantising, writing a GGUF file, uploading to the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from backends import registry
from delta_cli.errors import UserError
from delta_cli.publishing.card import write_card

BITS = (2, 3, 4, 6, 8)  # supported by mlx-lm
HUB = "pip install 'delta-rlvr[hub]'"


def check(quantise: int | None, push: str | None, public: bool) -> None:
    """Raise UserError for impossible options, before anything is computed."""
    if quantise is not None and quantise not in BITS:
        raise UserError(f"--quantise {quantise}: choose one of {', '.join(map(str, BITS))} bits")
    if push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", push):
        raise UserError(f"--push {push}: give a name on the hub like owner/name")
    if public and push is None:
        raise UserError("--public says who may see what --push uploads; give --push owner/name, or leave it out")


def finisher(run: Path, step: int | None, name: str, quantise: int | None, gguf: bool) -> Callable[[Path], Path]:
    """A function that adds the model card and converts the weights of an exported folder.

    Raises BackendError at once if a conversion needs mlx-lm and it is not installed.
    """
    converter = registry.converter() if quantise or gguf else None

    def finish(folder: Path) -> Path:
        found = folder
        if gguf:
            assert converter is not None
            converter.gguf(folder, folder / "model.gguf")
        if quantise:
            assert converter is not None
            found = folder.with_name(f"{folder.name}.quantised")
            converter.quantise(folder, found, quantise)
            if gguf:
                (folder / "model.gguf").rename(found / "model.gguf")
        write_card(run, found, step, name, quantise is not None)
        return found

    return finish


def upload(folder: Path, name: str, public: bool) -> str:
    """Upload a model folder to a repository on the hub, which is created if needed. Returns its address.

    Raises UserError if the hub refuses it.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"--push needs huggingface_hub; run: {HUB}") from error
    api = HfApi()
    try:
        address = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with delta")
    except Exception as error:
        if not (isinstance(error, OSError | ValueError) or type(error).__module__.startswith("httpx")):
            raise  # the hub's own errors are OSError or ValueError; without a network its HTTP client raises
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"--push {name}: the hub does not take it ({reason}); the model is in {folder}: log in with "
            f"`hf auth login` and run `hf upload {name} {folder}`"
        ) from error
    return str(address)
