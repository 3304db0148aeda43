"""Further steps of an export: quantising, writing a GGUF file, uploading to the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from backends import registry
from backends.errors import BackendError
from delta_cli.errors import UserError
from delta_cli.publishing.card import write_card

BITS = (2, 3, 4, 6, 8)  # of mlx-lm; bitsandbytes has 4 and 8
Target = Literal["transformers", "mlx"]  # what opens quantised weights
TOOLS: dict[Target, str] = {"transformers": "bitsandbytes", "mlx": "mlx-lm"}
HUB = "pip install 'delta-rlvr[hub]'"


def check(quantise: int | None, push: str | None, public: bool) -> None:
    """Raise UserError for impossible options, before anything is computed."""
    if quantise is not None and quantise not in BITS:
        raise UserError(f"--quantise {quantise}: choose one of {', '.join(map(str, BITS))} bits")
    if push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", push):
        raise UserError(f"--push {push}: give a name on the hub like owner/name")
    if public and push is None:
        raise UserError("--public says who may see what --push uploads; give --push owner/name, or leave it out")


def finisher(
    run: Path, step: int | None, name: str, quantise: int | None, gguf: bool, target: Target | None = None
) -> Callable[[Path], Path]:
    """A function that adds the model card and converts the weights of an exported folder.

    ``target`` is what opens quantised weights; by default mlx-lm if it is installed. Raises BackendError at once if a
    conversion needs a package that is not installed.
    """
    target = target or registry.default_converter()
    converter = registry.converter(target) if quantise else None

    def finish(folder: Path) -> Path:
        found = folder
        if gguf:
            write_gguf(folder, folder / "model.gguf")
        if converter is not None:
            found = folder.with_name(f"{folder.name}.quantised")
            converter.quantise(folder, found, quantise)
            if gguf:
                (folder / "model.gguf").rename(found / "model.gguf")
        write_card(run, found, step, name, TOOLS[target] if quantise else None)
        return found

    return finish


def write_gguf(folder: Path, file: Path) -> None:
    """Write a GGUF file with the first converter that can; raises the last one's BackendError if none can."""
    refusal: BackendError | None = None
    for name in get_args(Target):
        try:
            registry.converter(name).gguf(folder, file)
        except BackendError as error:
            refusal = error
            file.unlink(missing_ok=True)
        else:
            return
    assert refusal is not None
    raise refusal


def check_hub(name: str) -> None:
    """Raise UserError unless the hub can be reached and the login may write to ``owner/name``."""
    owner = name.partition("/")[0]
    try:
        who = _hub().whoami()
    except Exception as error:
        raise UserError(
            f"--push {name}: {_refused(error)}; log in with `hf auth login`, connect to a network, or leave out --push"
        ) from error
    own = [who.get("name"), *(each.get("name") for each in who.get("orgs", ()))]
    if owner not in own:
        raise UserError(f"--push {name}: the login is {own[0]}, which cannot write to {owner}; choose {own[0]}/NAME")


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"--push needs huggingface_hub; run: {HUB}") from error
    return HfApi()


def _refused(error: Exception) -> str:
    """The hub's reason in one line; raises the error again if it is not the hub's."""
    if isinstance(error, UserError) or not (
        isinstance(error, OSError | ValueError) or type(error).__module__.startswith("httpx")
    ):
        raise error  # the hub's own errors are OSError or ValueError; without a network its HTTP client raises
    return f"the hub does not take it ({str(error).strip().partition(chr(10))[0] or type(error).__name__})"


def upload(folder: Path, name: str, public: bool) -> str:
    """Upload a model folder to a repository on the hub, which is created if needed. Returns its address.

    Raises UserError if the hub refuses it.
    """
    api = _hub()
    try:
        address = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with delta")
    except Exception as error:
        raise UserError(
            f"--push {name}: {_refused(error)}; the model is in {folder}: log in with "
            f"`hf auth login` and run `hf upload {name} {folder}`"
        ) from error
    return str(address)
