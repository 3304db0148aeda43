"""The shape of a model, from its config.json or, for the models of the recipes, from a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_cli.assets import config_file
from delta_cli.doctor.parameter_count import ParameterCount, count_parameters, language_config, working_width
from delta_cli.doctor.recurrent_state import recurrent_state
from delta_cli.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward part."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    attention_layers: int | None = None  # those with keys and values; None: all
    states: int = 0  # float32 numbers in the recurrent states of one response, in all layers
    tails: int = 0  # numbers in the last inputs of its short convolutions, which have the model's dtype
    counted: ParameterCount | None = None  # from a config; None: by the sizes above, without norms

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer, or of the mean one."""
        if self.counted:
            return self.counted.layers // self.layers
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def active_matrices(self) -> int:
        """Parameters of a layer that one token is multiplied with: of experts, those that it is sent to."""
        return self.counted.active // self.layers if self.counted else self.layer_matrices

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        if self.counted:
            return self.counted.layers + self.counted.outside
        return self.layers * self.layer_matrices + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def outputs(self, targets: tuple[str, ...]) -> int:
        """Numbers that the named projections of one layer produce per token."""
        return sum(self._sides[target][1] for target in targets if target in self._sides)

    def adapters(self, rank: int, targets: tuple[str, ...], layers: int | None, dora: bool = False) -> int:
        """Parameters of low-rank adapters on the named projections, including DoRA's row lengths.

        Of the last ``layers`` of a hybrid, as many attend as of all.
        """
        found = 0
        for target in (target for target in targets if target in self._sides):
            share = self.attending / self.layers if target in ("q_proj", "k_proj", "v_proj", "o_proj") else 1
            inputs, outputs = self._sides[target]
            found += round((layers or self.layers) * share) * (rank * (inputs + outputs) + dora * outputs)
        return found

    @property
    def _sides(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's projections."""
        hidden, inner, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (hidden, q),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (q, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }


# Models of the recipes and of docs/scale.md, so that they can be judged before they are downloaded.
KNOWN = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelShape(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "Qwen/Qwen3-0.6B": ModelShape(1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    "Qwen/Qwen3-1.7B": ModelShape(2048, 28, 16, 8, 128, 6144, 151936, tied=True),
    "Qwen/Qwen3-4B": ModelShape(2560, 36, 32, 8, 128, 9728, 151936, tied=True),
    "Qwen/Qwen3-8B-Base": ModelShape(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen/Qwen3-14B-Base": ModelShape(5120, 40, 40, 8, 128, 17408, 151936),
    "Qwen/Qwen3-32B": ModelShape(5120, 64, 64, 8, 128, 25600, 151936),
    "meta-llama/Llama-3.3-70B-Instruct": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
    "allenai/Olmo-3-1025-7B": ModelShape(4096, 32, 32, 32, 128, 11008, 100278),
    "mlx-community/Qwen3-1.7B-4bit": ModelShape(2048, 28, 16, 8, 128, 6144, 151936, tied=True),
}


def shape_of(model: str) -> tuple[ModelShape, dict[str, Any]]:
    """The shape of a model and its config (empty for a known model that is not downloaded).

    Raises UserError if neither the folder nor the table has it.
    """
    if (file := config_file(model)) is not None:
        return _from_config(file)
    if model in KNOWN:
        return KNOWN[model], {}
    raise UserError(
        f"model.path: {model}: no such folder, not downloaded, and its shape is not known; download it first"
    )


def _from_config(file: Path) -> tuple[ModelShape, dict[str, Any]]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = language_config(config)
        heads = config["num_attention_heads"]
        shape = ModelShape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=working_width(config),
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            counted=count_parameters(config),
            **recurrent_state(config),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not the config of a language model ({type(error).__name__}: {error})") from None
    return shape, config
