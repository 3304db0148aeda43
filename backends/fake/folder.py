"""Read and write Qwen3 model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from backends.fake.qwen3 import EMBEDDING, FINAL_NORM, HEAD, NumpyWeights, Qwen3Config
from backends.interface import BackendError
from backends.weights import refuse_nonfinite, refuse_too_many_layers, refuse_unexpected

# Assumptions of the forward pass: keys of config.json with their allowed values (None: absent).
ASSUMED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_type": ("default", None),
    "quantization": (None,),
}


def read(model: str) -> tuple[Qwen3Config, NumpyWeights]:
    """Config and float64 weights of a model folder; raises BackendError if it is not a Qwen3 one."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise BackendError(
            f"{model}: is not a model folder (it has no config.json), and the fake backend cannot download models; "
            "give the path of a model folder"
        )
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    raw["rope_type"] = rope.get("rope_type", rope.get("type"))
    for key, allowed in ASSUMED.items():
        if raw.get(key) not in allowed:
            raise BackendError(
                f"{folder / 'config.json'}: {key} is {raw.get(key)!r}, but the fake backend computes a plain Qwen3 "
                f"({key} {allowed[0]!r}); choose --backend cpu or mlx"
            )
    try:
        config = Qwen3Config(
            hidden=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=int(raw["num_attention_heads"]),
            kv_heads=int(raw["num_key_value_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            norm_epsilon=float(raw["rms_norm_eps"]),
            rope_theta=float(rope["rope_theta"]),
            tied=bool(raw["tie_word_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"{folder / 'config.json'}: lacks or misstates {error}; download the model again") from None
    weights = _weights(folder, config.tied)
    if raw.get("vocab_size") not in (None, len(weights.get(EMBEDDING, ()))):
        raise BackendError(
            f"{folder}: config.json has a vocabulary of {raw['vocab_size']}, but {EMBEDDING} has "
            f"{len(weights.get(EMBEDDING, ()))} rows; get the model's files again"
        )
    refuse_too_many_layers(folder, raw)
    _check_shapes(config, weights, folder)
    refuse_nonfinite(folder, (name for name, weight in weights.items() if not np.isfinite(weight).all()))
    return config, weights


def _check_shapes(config: Qwen3Config, weights: NumpyWeights, folder: Path) -> None:
    """Raise BackendError if a weight of the configuration is missing or has another shape."""
    hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    vocabulary, wide = (len(weights.get(name, ())) for name in (EMBEDDING, "model.layers.0.mlp.up_proj.weight"))
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden), FINAL_NORM: (hidden,)}
    if not config.tied:
        expected[HEAD] = (vocabulary, hidden)
    for layer in range(config.layers):
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    refuse_unexpected(folder, weights.keys() - expected.keys())
    for name, shape in expected.items():
        if name not in weights or weights[name].shape != shape:
            found = weights[name].shape if name in weights else "missing"
            raise BackendError(
                f"{folder}: {name} is {found}, but config.json asks for {shape}; download the model again"
            )


def _weights(folder: Path, tied: bool) -> NumpyWeights:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise BackendError(f"{folder}: has no *.safetensors file; convert the weights to safetensors")
    weights: NumpyWeights = {}
    for path in paths:
        try:
            weights |= {name: weight.astype(np.float64) for name, weight in load_file(path).items()}
        except (SafetensorError, TypeError, KeyError) as error:  # numpy has no bfloat16
            raise BackendError(
                f"{path}: cannot be read ({error}); the fake backend takes float32 or float16, convert it "
                "or choose --backend cpu or mlx"
            ) from None
    if tied:
        weights.pop(HEAD, None)
    return weights


def write(source: str, folder: Path, weights: NumpyWeights) -> None:
    """Write weights in float32, with config and tokenizer files of the folder they came from."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(source).iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and ".safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((Path(source) / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    single = {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in weights.items()}
    save_file(single, folder / "model.safetensors", metadata={"format": "pt"})
