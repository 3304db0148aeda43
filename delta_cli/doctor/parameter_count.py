"""How many parameters a model has, from its config.json, so that it can be judged before its weights are downloaded.

Exact for the families of docs/models.md: a test compares published configs with transformers' own models. For other
families it is what a decoder with gated feed-forward parts or experts has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from delta_cli.doctor.recurrent_state import ATTENTION, layer_types

# What published configs leave out because it is the family's default.
_GEMMA = {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _GEMMA | {"vocab_size": 262208},
    "gemma3n_text": _GEMMA | {"num_key_value_heads": 2},
    "gemma4_text": _GEMMA,
    "lfm2": {"tie_word_embeddings": True},
    "lfm2_moe": {"tie_word_embeddings": True},
}
_HEAD_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "exaone4", "lfm2", "lfm2_moe"}
_HEAD_NORMS |= {"gemma3_text", "gemma3n_text", "gemma4_text"}  # queries and keys are normalised by head
_WIDE_NORMS = {"olmo2", "olmo3", "olmoe", "minimax_m2"}  # all queries together, all keys together
_NORMS = {"gemma2": 4, "gemma3_text": 4, "gemma3n_text": 4, "gemma4_text": 4, "nemotron_h": 1, "phi": 2}  # of a layer
_UNGATED = {"nemotron_h", "phi", "starcoder2"}  # two matrices in a feed-forward part instead of three


class ParameterCount(NamedTuple):
    """Parameters inside layers and outside, and those of layers that one token is multiplied with."""

    layers: int
    active: int
    outside: int


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A language model's config with its family's defaults; it may be inside that of an image-text model."""
    text = dict(config["text_config"] if "text_config" in config else config)  # noqa: SIM401 (it may be a list)
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return outer | {"model_type": ""} | DEFAULTS.get(text.get("model_type", ""), {}) | text


def count_parameters(c: Mapping[str, Any]) -> ParameterCount:
    """The parameters of the model of a :func:`language_config`. Raises KeyError if it lacks a size."""
    kinds = layer_types(c) or ["full_attention"] * c["num_hidden_layers"]
    layers = active = 0
    for layer, kind in enumerate(kinds):
        mixer, (all_of_it, used) = _mixer(c, layer, kind, len(kinds)), _feed_forward(c, layer, kind)
        fixed = mixer + _NORMS.get(c["model_type"], 2) * c["hidden_size"] + _beside(c)
        layers, active = layers + fixed + all_of_it, active + fixed + used
    return ParameterCount(layers, active, _outside(c, len(kinds)))


def _mixer(c: Mapping[str, Any], layer: int, kind: str, layers: int) -> int:
    """Attention, a recurrence, or both beside each other."""
    found = 0
    if kind in ATTENTION:
        found += _latent_attention(c) if "kv_lora_rank" in c else _attention(c, layer, kind, layers)
    if kind == "conv":
        found += c["hidden_size"] * (4 * c["hidden_size"] + c["conv_L_cache"])
    elif kind in ("linear_attention", "hybrid"):
        delta = "linear_num_value_heads" in c
        found += _delta_rule(c) if delta else _mamba_1(c) if "mamba_dt_rank" in c else _mamba_2(c)
    return found


def _attention(c: Mapping[str, Any], layer: int, kind: str, layers: int) -> int:
    kind_of, hidden, heads = c["model_type"], c["hidden_size"], c["num_attention_heads"]
    keys, size = c.get("num_key_value_heads") or heads, c.get("head_dim") or c.get("attention_head_dim")
    size, values = size or hidden // heads, 1
    if kind == "full_attention" and c.get("global_head_dim"):
        size, keys = c["global_head_dim"], c.get("num_global_key_value_heads") or keys
        values = not c.get("attention_k_eq_v")
    shared = kind_of == "gemma3n_text" and layer >= layers - c.get("num_kv_shared_layers", 0)
    gated = 2 if kind_of in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else 1
    query, key = heads * size, 0 if shared else keys * size
    found = hidden * (query * (1 + gated) + key * (1 + values))
    if c.get("attention_bias") or kind_of in ("qwen2", "qwen2_moe", "phi"):
        found += query + 2 * key + (hidden if kind_of in ("gpt_oss", "phi", "llama") else 0)
    if kind_of in _HEAD_NORMS or (c.get("use_qk_norm") and kind_of == "glm4_moe"):
        found += size * (1 if shared else 2)
    return int(found + (query + key) * (kind_of in _WIDE_NORMS) + heads * (kind_of == "gpt_oss"))


def _latent_attention(c: Mapping[str, Any]) -> int:
    """Keys and values from a compressed vector, as in DeepSeek V3."""
    hidden, heads, low, keys = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    rotary, plain, values = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    queries = low * (hidden + 1 + heads * (plain + rotary))
    return int(queries + hidden * (keys + rotary) + keys * (1 + heads * (plain + values)) + heads * values * hidden)


def _delta_rule(c: Mapping[str, Any]) -> int:
    heads, keys = c["linear_num_value_heads"], c["linear_num_key_heads"] * c["linear_key_head_dim"]
    size, hidden, kernel = c["linear_value_head_dim"], c["hidden_size"], c.get("linear_conv_kernel_dim", 4)
    values = heads * size
    inputs = hidden * (2 * keys + 2 * values + 2 * heads)
    return int(inputs + (2 * keys + values) * kernel + 2 * heads + size + values * hidden)


def _mamba_1(c: Mapping[str, Any]) -> int:
    hidden, size, rank, inner = c["hidden_size"], c["mamba_d_state"], c["mamba_dt_rank"], 0
    inner = c["mamba_expand"] * hidden
    steps = inner * (rank + 2 * size) + (rank + 1) * inner + rank + 2 * size  # with norms
    return int(3 * inner * hidden + steps + inner * (size + 1) + inner * (c["mamba_d_conv"] + 1))


def _mamba_2(c: Mapping[str, Any]) -> int:
    heads, hidden = c.get("mamba_n_heads") or c["mamba_num_heads"], c["hidden_size"]
    inner = heads * (c.get("mamba_d_head") or c["mamba_head_dim"])
    size = c.get("mamba_d_state") or c["ssm_state_size"]
    conv = inner + 2 * size * (c.get("mamba_n_groups") or c["n_groups"])
    kernel = (c.get("mamba_d_conv") or c["conv_kernel"]) + 1  # with its bias
    norm = inner if c.get("mamba_rms_norm", True) else 0
    return int(hidden * (2 * inner + conv + heads) + conv * kernel + 3 * heads + norm)


def _feed_forward(c: Mapping[str, Any], layer: int, kind: str) -> tuple[int, int]:
    """All parameters, and those that a token uses."""
    hidden, kind_of = c["hidden_size"], c["model_type"]
    if kind_of == "nemotron_h" and kind not in ("moe", "mlp"):
        return 0, 0
    matrices = 2 if kind_of in _UNGATED else 3
    experts = _experts(c)
    dense = matrices * hidden * dense_width(c) + (dense_width(c) + hidden) * (kind_of == "phi")
    if kind_of == "granitemoehybrid":
        dense = 3 * hidden * c["shared_intermediate_size"]
    if not experts or not _routed(c, layer, kind):
        return dense, dense
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    router, each = hidden * experts, matrices * hidden * width
    if kind_of == "gpt_oss":  # with biases
        router, each = router + experts, each + 2 * width + hidden
    shared = matrices * hidden * c.get("n_shared_experts", 0) * width
    if beside := c.get("moe_shared_expert_intermediate_size"):
        shared = matrices * hidden * beside
    if beside := c.get("shared_expert_intermediate_size"):
        shared = hidden * (matrices * beside + 1)  # with its gate
    if kind_of in ("gemma4_text", "granitemoehybrid"):  # experts beside a dense part, in Gemma with norms of their own
        shared = dense + (4 * hidden + experts if kind_of == "gemma4_text" else 0)
    used = c.get("num_experts_per_tok") or c.get("top_k_experts") or 1
    return router + shared + experts * each, router + shared + used * each


def dense_width(c: Mapping[str, Any]) -> int:
    """The width of dense layers. LFM2 writes another number, of which it takes two thirds, rounded up."""
    width = c.get("block_ff_dim") or c.get("intermediate_size") or c["moe_intermediate_size"]
    width = width[0] if isinstance(width, list) else width
    if c.get("block_auto_adjust_ff_dim"):
        unit = c["block_multiple_of"]
        width = -(-int(c["block_ffn_dim_multiplier"] * (2 * width // 3)) // unit) * unit
    return int(width)


def working_width(c: Mapping[str, Any]) -> int:
    """The width in which a token is computed inside a feed-forward part; of experts, all that it is sent to."""
    used = c.get("num_experts_per_tok") or c.get("top_k_experts") or 0
    width = c.get("moe_intermediate_size") or (dense_width(c) if _experts(c) else 0)
    beside = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = c.get("n_shared_experts", 0) * width or sum(c.get(name) or 0 for name in beside)
    return max(used * width + shared, 0 if _experts(c) and width == dense_width(c) else dense_width(c))


def _experts(c: Mapping[str, Any]) -> int:
    return int(c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts") or 0)


def _routed(c: Mapping[str, Any], layer: int, kind: str) -> bool:
    """Whether the layer has experts, by any of the ways in which configs say it."""
    if c["model_type"] == "nemotron_h":
        return kind == "moe"
    if period := c.get("expert_layer_period"):
        return bool(layer % period == c["expert_layer_offset"])
    first = c.get("first_k_dense_replace") or c.get("num_dense_layers") or 0
    sparse = (layer + 1) % (c.get("decoder_sparse_step") or 1) == 0
    return layer >= first and layer not in (c.get("mlp_only_layers") or ()) and sparse


def _beside(c: Mapping[str, Any]) -> int:
    """What Gemma's layers have beside attention and feed-forward: inputs per layer, and Gemma 3n's other residuals."""
    hidden, inputs = c["hidden_size"], c.get("hidden_size_per_layer_input") or 0
    found = 2 * hidden * inputs + hidden if inputs else 0
    if streams := c.get("altup_num_inputs"):
        found += 2 * hidden + streams * (hidden + streams + streams**2) + hidden * (2 * c["laurel_rank"] + 1)
    return found


def _outside(c: Mapping[str, Any], layers: int) -> int:
    """Embeddings, head and last norm."""
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    found = vocabulary * hidden * (1 if c.get("tie_word_embeddings", False) else 2) + hidden
    if inputs := c.get("hidden_size_per_layer_input"):
        found += layers * inputs * (c["vocab_size_per_layer_input"] + hidden) + inputs
    if streams := c.get("altup_num_inputs"):
        found += 2 * (streams - 1) * hidden**2
    return int(found + (hidden + vocabulary) * (c["model_type"] == "phi"))
