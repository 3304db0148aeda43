"""Exported models in other forms, by mlx-lm's own converters: quantised for mlx-lm, GGUF for llama.cpp."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.gguf import convert_to_gguf
from mlx_lm.utils import load_model

from backends.interface import BackendError

GROUP = 64  # numbers that share a scale
GGUF = ("llama", "mistral", "mixtral")  # what mlx-lm converts


def quantise(folder: Path, out: Path, bits: int) -> None:
    """Write the model in ``folder`` with weights of ``bits`` bits to ``out``, a new folder, for mlx-lm.

    Raises BackendError where mlx-lm cannot.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            convert(str(folder), str(out), quantize=True, q_bits=bits, q_group_size=GROUP)
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError(f"mlx-lm cannot quantise this model ({_line(error)}); export it without") from error


def gguf(folder: Path, file: Path) -> None:
    """Write the model in ``folder`` as a GGUF file for llama.cpp.

    Raises BackendError for models other than :data:`GGUF`, which mlx-lm does not convert, and for tokenizers other
    than SentencePiece's, which it would write as one of SentencePiece's.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind, sentencepiece = config.get("model_type"), tokenizer.get("model", {}).get("byte_fallback")
    if kind not in GGUF or not sentencepiece:
        what = "with a byte-level tokenizer" if kind in GGUF else f"of type '{kind}'"
        raise BackendError(
            f"mlx-lm writes GGUF of {', '.join(GGUF)} with SentencePiece tokenizers, and not of models {what}; export "
            "without --gguf and run llama.cpp's convert_hf_to_gguf.py on the folder"
        )
    model, config = load_model(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        convert_to_gguf(folder, dict(tree_flatten(model.parameters())), config, str(file))


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
