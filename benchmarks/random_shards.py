"""A Qwen3 of random bfloat16 weights, made on the device: a shard for each layer, 16 GB of them in a minute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

import torch
from safetensors.torch import save_file
from torch import Tensor

from delta_cli.assets import model_path


@dataclass(frozen=True)
class Size:
    """The model, and how much of each thing is measured."""

    hidden: int = 4096
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocabulary: int = 151936
    contexts: tuple[tuple[int, int], ...] = ((12, 5000), (12, 16000), (32, 5000), (96, 5000))  # rows, tokens of each
    decoded: int = 64  # tokens
    packed: int = 20000  # tokens of a micro-batch
    chunks: tuple[int, ...] = (512, 4096)
    recipe: tuple[str, ...] = ("rollout.prompts=8", "rollout.responses=16", "rollout.max_tokens=1024")

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def matrices(self) -> int:
        """Weights that a token is multiplied with in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


TINY = Size(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=192,
    vocabulary=512,
    contexts=((2, 40),),
    decoded=8,
    packed=60,
    chunks=(16, 32),
    recipe=("rollout.prompts=2", "rollout.responses=2", "rollout.max_tokens=8"),
)


def write_random(folder: Path, size: Size, device: str) -> None:
    """Write random shards of the model, and the tokenizer of the tiny base."""
    base = Path(model_path("tiny-base"))
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            copyfile(file, folder / file.name)
    config = json.loads((base / "config.json").read_text())
    config |= {"hidden_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    config |= {"num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "torch_dtype": "bfloat16"}
    config |= {"intermediate_size": size.intermediate, "vocab_size": size.vocabulary, "tie_word_embeddings": False}
    config |= {"max_position_embeddings": 40960, "rope_theta": 1e6, "layer_types": ["full_attention"] * size.layers}
    (folder / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    for number, shard in enumerate(_shards(size, device)):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _shards(size: Size, device: str) -> Iterator[dict[str, Tensor]]:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return (0.02 * torch.randn(rows, columns, device=device, dtype=torch.bfloat16)).cpu()

    def ones(count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    yield {
        "model.embed_tokens.weight": matrix(size.vocabulary, size.hidden),
        "lm_head.weight": matrix(size.vocabulary, size.hidden),
        "model.norm.weight": ones(size.hidden),
    }
    for layer in range(size.layers):
        weights = {
            "input_layernorm": ones(size.hidden),
            "post_attention_layernorm": ones(size.hidden),
            "self_attn.q_proj": matrix(queries, size.hidden),
            "self_attn.k_proj": matrix(keys, size.hidden),
            "self_attn.v_proj": matrix(keys, size.hidden),
            "self_attn.o_proj": matrix(size.hidden, queries),
            "self_attn.q_norm": ones(size.head_dim),
            "self_attn.k_norm": ones(size.head_dim),
            "mlp.gate_proj": matrix(size.intermediate, size.hidden),
            "mlp.up_proj": matrix(size.intermediate, size.hidden),
            "mlp.down_proj": matrix(size.hidden, size.intermediate),
        }
        yield {f"model.layers.{layer}.{name}.weight": weight for name, weight in weights.items()}
