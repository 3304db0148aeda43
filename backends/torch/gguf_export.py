"""An exported model as a GGUF file for llama.cpp: weights in float16, and a byte-level tokenizer.

The names are those of the package ``gguf``, which llama.cpp's own converter uses. Llama's queries and keys are stored
with the two halves of each head interleaved, because llama.cpp rotates pairs of neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from backends.interface import BackendError

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
}
OTHERWISE = "export without --gguf and run llama.cpp's convert_hf_to_gguf.py on the folder"


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model in ``folder`` as a GGUF file. Raises BackendError for models and tokenizers it cannot write."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise BackendError(
            f"GGUF export supports {', '.join(ARCHITECTURES)}, but this model is a '{kind}'; {OTHERWISE}"
        )
    splitter = _splitter(tokenizer, kind)
    theta = _rope_theta(config)
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config, theta)
    _write_tokenizer(writer, folder, config, tokenizer, splitter)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(folder, config):
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise BackendError(f"GGUF has no name for the weight {name}; {OTHERWISE}")
        writer.add_tensor(known, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _splitter(tokenizer: dict[str, Any], kind: str) -> str:
    """llama.cpp's name for how the text is split before its pieces are merged."""
    model, before = tokenizer.get("model", {}), json.dumps(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("byte_fallback") or "ByteLevel" not in before:
        raise BackendError(
            f"GGUF is written with byte-level BPE tokenizers only, and this model has another; {OTHERWISE}"
        )
    if kind in ("qwen2", "qwen3"):
        return "qwen2"
    if '"Digits"' in before:
        return "smollm"
    if "{1,3}" in before:
        return "llama-bpe"
    raise BackendError(f"llama.cpp has no known name for this tokenizer's way to split text; {OTHERWISE}")


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise BackendError(f"GGUF export does not support scaled positions; {OTHERWISE}")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], theta: float) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _write_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], splitter: str
) -> None:
    model = tokenizer["model"]
    tokens = [f"[PAD{number}]" for number in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for name, number in _special(folder, config).items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)
    template = _chat_template(folder)
    if template:
        writer.add_chat_template(template)


def _special(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """The ids of the special tokens; of several end-of-sequence tokens the first."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = {}
    for name in ("bos", "eos", "pad"):
        value = generation.get(f"{name}_token_id", config.get(f"{name}_token_id"))
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int):
            found[name] = value
    return found


def _chat_template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    return found if isinstance(found, str) else ""


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every weight under its name: matrices in float16, vectors in float32."""
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                tensor = opened.get_tensor(name).to(torch.float32).numpy()
                if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                    tensor = _interleaved(tensor, heads if "q_proj" in name else groups)
                yield name, tensor.astype(np.float16) if tensor.ndim > 1 else tensor


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head [2 halves, n] as pairs [n, 2]."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
