"""For any malformed model folder the command line prints one line and exits with code 2; it runs no code from it."""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_cli.recipe import to_toml
from tests.harness import make_recipe
from tests.training.malformed import Delta, Evil, assert_refused, cut, edit, put


def pickled_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "trace")))


def pickle_in_disguise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil(folder / "trace")))


def own_code(folder: Path) -> None:
    edit(
        "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    )(folder)
    (folder / "mine.py").write_text(f"open({str(folder / 'trace')!r}, 'w')\n")


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def first_number(value: float) -> Callable[[Path], None]:
    return weights(lambda stored: stored["model.norm.weight"].__setitem__(0, value))


MODELS: dict[str, Callable[[Path], object]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "truncated config": cut("config.json", 40),
    "config of another type": put("config.json", b"[1, 2]"),
    "config not UTF-8": put("config.json", b'{"a": "\xff"}'),
    "deep config": put("config.json", b"[" * 100_000),
    "config without sizes": put("config.json", b'{"model_type": "qwen3", "eos_token_id": 0}'),
    "sizes as text": edit("config.json", hidden_size="many"),
    "other sizes": edit("config.json", hidden_size=32),
    "more layers": edit("config.json", num_hidden_layers=3),
    "NaN in the weights": first_number(float("nan")),
    "infinity in the weights": first_number(float("inf")),
    "a weight of no layer": weights(
        lambda stored: stored.update({"model.layers.7.x.weight": stored["model.norm.weight"]})
    ),
    "another architecture": edit("config.json", model_type="llama", architectures=["LlamaForCausalLM"]),
    "another vocabulary": edit("config.json", vocab_size=300),
    "an end outside the vocabulary": put("generation_config.json", b'{"eos_token_id": [0, 9999]}'),
    "unknown type": edit("config.json", model_type="abacus", architectures=["Abacus"]),
    "own code": own_code,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "truncated tokenizer": cut("tokenizer.json", 100),
    "tokenizer of another type": put("tokenizer.json", b"{}"),
    "tokenizer not UTF-8": put("tokenizer.json", b"\xff\xfe"),
    "tokenizer config of another type": put("tokenizer_config.json", b"3"),
    "deep tokenizer config": put("tokenizer_config.json", b"[" * 100_000),
    "no template": put("tokenizer_config.json", b'{"eos_token": "<|endoftext|>"}'),
    "template of another type": edit("tokenizer_config.json", chat_template=[{"name": "default"}]),
    "broken template": edit("tokenizer_config.json", chat_template="{% for %}"),
    "a template of nothing": edit("tokenizer_config.json", chat_template="{# nothing #}"),
    "a template without an end": edit(
        "tokenizer_config.json", chat_template="{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
    ),
    "a template of all memory": edit("tokenizer_config.json", chat_template="{{ 'a' * 20000000000 }}"),
    "hostile template": edit("tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty weights": cut("model.safetensors", 0),
    "truncated weights": cut("model.safetensors", 5000),
    "a header of an exabyte": put("model.safetensors", struct.pack("<Q", 10**18) + b"{}"),
    "pickled weights alone": pickled_only,
    "a pickle in place of safetensors": pickle_in_disguise,
}


# The tokenizer and its template are read by code that all backends share, before the weights.
READ_BY_ALL = [kind for kind in MODELS if "tokenizer" in kind or "template" in kind]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, name) for kind in MODELS for name in (("fake",) if kind in READ_BY_ALL else ("fake", "cpu", "mlx"))],
)
def test_models(kind: str, backend: str, delta: Delta, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    MODELS[kind](folder)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(make_recipe(folder, run__steps=1)))
    run = ["train", recipe, "--backend", backend, "--run-dir", tmp_path / "run", "--quiet"]
    assert_refused(delta(*run), *(["code of its own"] if kind == "own code" and backend == "cpu" else []))
    assert not (folder / "trace").exists(), "code in the model's folder was run"
