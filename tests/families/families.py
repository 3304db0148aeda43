"""Tiny random models of every family, made by transformers, in folders like those on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,  # its root is a bfloat16 number, which mlx-lm's Gemma needs to agree in float32
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
CAPPED = {"final_logit_softcapping": 3.0}  # the logits of these weights reach it
SCALED = {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}


@dataclass(frozen=True)
class Family:
    """The name of a family, and how to make a model of it."""

    name: str  # its usual name, with an example model
    kind: str  # model_type of its config.json
    config: dict[str, Any] = field(default_factory=dict)  # added to SIZES
    published: dict[str, Any] = field(default_factory=dict)  # keys that published configs have and SIZES has not
    targets: tuple[str, ...] = ("q_proj", "v_proj")  # of adapters
    inside: str | None = None  # model_type of the outer config, if the text model is nested in another
    vision: dict[str, Any] | None = None  # sizes of the vision part; the text model is then of ``kind``_text
    apart: float = 2e-4  # nats between mlx-lm and transformers in float32
    remark: str = ""
    mlx: bool = True  # whether the mlx backend can train mlx-lm's version
    mlx_opens: bool = True  # whether mlx-lm opens a folder that transformers wrote; a published one may differ


FAMILIES = [
    Family("Llama (Llama-3.2-1B)", "llama"),
    Family("Mistral (Mistral-7B-v0.3)", "mistral", {"sliding_window": None}),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen2 MoE", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}, {"num_experts": 4}),
    Family("Qwen3 (Qwen3-8B)", "qwen3"),
    Family("Qwen3 MoE (Qwen3-30B-A3B)", "qwen3_moe", EXPERTS, {"num_experts": 4, "mlp_only_layers": []}),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        EXPERTS | RECURRENT | {"shared_expert_intermediate_size": 32},
        {"num_experts": 4, "mlp_only_layers": [], "full_attention_interval": 2, "decoder_sparse_step": 1},
    ),
    Family("Qwen3.5", "qwen3_5_text", RECURRENT, inside="qwen3_5"),
    Family(
        "Qwen3.5 MoE (Qwen3.5-35B-A3B)",
        "qwen3_5_moe_text",
        EXPERTS | RECURRENT | {"shared_expert_intermediate_size": 32},
        inside="qwen3_5_moe",
        mlx_opens=False,
    ),
    Family("Gemma", "gemma", apart=5e-3, remark="mlx-lm takes the exact GELU, transformers its tanh form"),
    Family(
        "Gemma 2",
        "gemma2",
        CAPPED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 32},
        remark="mlx-lm has no sliding window here: longer sequences (4,096 tokens) are refused on mlx",
    ),
    Family("Gemma 3 (text)", "gemma3_text", SLIDING | {"query_pre_attn_scalar": 16}, {"sliding_window_pattern": 2}),
    Family(
        "Gemma 4 (text)",
        "gemma4_text",
        SLIDING | CAPPED | {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_kv_shared_layers": 0},
        {"global_head_dim": 16},
    ),
    Family(
        "Gemma 3 (4B and larger)",
        "gemma3",
        SLIDING | {"query_pre_attn_scalar": 16},
        {"vocab_size": VOCAB, "sliding_window_pattern": 2},
        vision={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    Family("Phi (phi-2)", "phi", {"num_key_value_heads": 4}, mlx=False),
    Family("Phi-3, Phi-4", "phi3", targets=("qkv_proj", "o_proj")),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", SLIDING),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("GLM-4 (GLM-4-9B-0414)", "glm4", {"attention_bias": False}),
    Family(
        "GLM-4.5 MoE",
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1},
    ),
    Family(
        "LFM2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {"block_dim": 64, "block_ff_dim": 96},
    ),
    Family(
        "LFM2 MoE",
        "lfm2_moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "use_expert_bias": False},
        {"num_experts": 4},
    ),
    Family("LFM3", "lfm3", SLIDING | {"layer_types": ["conv", "sliding_attention"]}, mlx_opens=False),
    Family(
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        SCALED
        | MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 96}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
        mlx_opens=False,
    ),
    Family("Falcon-H1", "falcon_h1", MAMBA | {"mamba_d_ssm": 128}),
    Family(
        "Jamba",
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
        mlx=False,
    ),
    Family("Granite", "granite", SCALED),
    Family("Granite MoE", "granitemoe", SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Cohere (Command R)", "cohere", {"logit_scale": 0.25}),
    Family("Cohere 2 (Command A)", "cohere2", SLIDING | {"logit_scale": 0.25}, {"sliding_window_pattern": 2}),
    Family("EXAONE 4", "exaone4", SLIDING | {"sliding_window_pattern": 2}, {"sliding_window_pattern": "LG"}),
    Family(
        "gpt-oss (unquantised)",
        "gpt_oss",
        SLIDING
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        remark="mlx-lm rounds the bounds of YaRN's ramp, which transformers does not: the two differ a little",
    ),
    Family("Seed-OSS", "seed_oss"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Hunyuan (dense)", "hunyuan_v1_dense"),
    Family("Helium", "helium"),
    Family("StarCoder2", "starcoder2", {"hidden_act": "gelu", "sliding_window": None}),
]


def build(family: Family, folder: Path) -> Any:
    """Write and return a model of the family; norms and biases are random too, so that a missing one shows."""
    torch.manual_seed(0)
    sizes = SIZES | family.config
    if family.vision:
        text = sizes | {"model_type": f"{family.kind}_text"}
        config = transformers.AutoConfig.for_model(family.kind, text_config=text, vision_config=family.vision)
    else:
        config = transformers.AutoConfig.for_model(family.kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | family.published
    if family.vision:
        written["text_config"] |= family.published
    if family.inside:
        written = {"model_type": family.inside, "text_config": written}
    (folder / "config.json").write_text(json.dumps(written))
    return model


def for_mlx(family: Family, folder: Path) -> None:
    """Rename the experts of gpt-oss, which are published for MLX in another form than transformers writes."""
    if family.kind != "gpt_oss":
        return
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "gate_up_proj" in name:
            end = ".bias" if name.endswith("_bias") else ".weight"
            matrix = weight if name.endswith("_bias") else weight.transpose(1, 2)
            base = name.removesuffix("_bias").removesuffix("gate_up_proj")
            for part, rows in (("gate_proj", matrix[:, 0::2]), ("up_proj", matrix[:, 1::2])):
                weights[base + part + end] = rows.contiguous()
        elif name.endswith("experts.down_proj"):
            weights[name + ".weight"] = weight.transpose(1, 2).contiguous()
        elif name.endswith("experts.down_proj_bias"):
            weights[name.removesuffix("_bias") + ".bias"] = weight
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
