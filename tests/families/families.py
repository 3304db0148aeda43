"""Tiny random models of every family, made by transformers, in folders like those on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.families.published import tiny

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
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = (  # keys and values from a compressed vector, in hybrids with experts
    HYBRID
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
    | {"mlp_layer_types": ["dense", "sparse"]}
)
CAPPED = {"final_logit_softcapping": 3.0}  # the logits of these weights reach it
SCALED = {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}


@dataclass(frozen=True)
class Family:
    """The name of a family, and how to make a model of it: from a published config, or from defaults with SIZES."""

    name: str  # its usual name, with an example model
    kind: str  # model_type of its config.json
    hub: str | None = None  # the model of published.json whose config is made tiny
    config: dict[str, Any] = field(default_factory=dict)  # added to SIZES
    published: dict[str, Any] = field(default_factory=dict)  # keys that published configs have and SIZES has not
    targets: tuple[str, ...] = ("q_proj", "v_proj")  # of adapters
    inside: str | None = None  # model_type of the outer config, if the text model is nested in another
    gain: float = 0.1  # nats that two steps on adapters raise the response by; less if logits are divided
    apart: float = 2e-4  # nats between mlx-lm and transformers in float32
    remark: str = ""
    mlx: bool = True  # whether the mlx backend can train mlx-lm's version
    mlx_opens: bool = True  # whether mlx-lm opens a folder that transformers wrote; a published one may differ

    @property
    def key(self) -> str:
        """What tells it from the others."""
        return self.hub or self.kind


FAMILIES = [
    Family("Llama 3.1", "llama", "meta-llama/Llama-3.1-8B"),
    Family("Llama 3.2", "llama", "meta-llama/Llama-3.2-1B-Instruct"),
    Family("Mistral", "mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
    Family("Ministral 3", "ministral3"),
    Family("Mistral 3 (image-text)", "mistral3", "mistralai/Devstral-Small-2-24B-Instruct"),
    Family("Mixtral", "mixtral", "mistralai/Mixtral-8x7B-v0.1"),
    Family("Qwen2.5", "qwen2", "Qwen/Qwen2.5-7B-Instruct"),
    Family("Qwen2 MoE", "qwen2_moe", None, EXPERTS | {"shared_expert_intermediate_size": 32}, {"num_experts": 4}),
    Family("Qwen3", "qwen3", "Qwen/Qwen3-8B"),
    Family("Qwen3 MoE", "qwen3_moe", "Qwen/Qwen3-30B-A3B"),
    Family("Qwen3-Next", "qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    Family("Qwen3.5 (text)", "qwen3_5_text", None, RECURRENT, inside="qwen3_5"),
    Family("Qwen3.5 (image-text)", "qwen3_5", "Qwen/Qwen3.5-27B"),
    Family("Qwen3.5 MoE (image-text)", "qwen3_5_moe", "Qwen/Qwen3.5-35B-A3B"),
    Family("Gemma", "gemma", apart=5e-3, remark="mlx-lm takes the exact GELU, transformers its tanh form"),
    Family(
        "Gemma 2",
        "gemma2",
        None,
        CAPPED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 32},
        remark="mlx-lm has no sliding window here: longer sequences (4,096 tokens) are refused on mlx",
    ),
    Family(
        "Gemma 3 (text)", "gemma3_text", None, SLIDING | {"query_pre_attn_scalar": 16}, {"sliding_window_pattern": 2}
    ),
    Family("Gemma 3 4B (image-text)", "gemma3", "google/gemma-3-4b-it"),
    Family("Gemma 3 27B (image-text)", "gemma3", "google/gemma-3-27b-it"),
    Family("Gemma 3n (text)", "gemma3n_text", "google/gemma-3n-E4B-it", mlx=False),
    Family(
        "Gemma 4 (text)",
        "gemma4_text",
        None,
        CAPPED
        | {"sliding_window": 5, "layer_types": 2 * SLIDING["layer_types"], "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
        | {"global_head_dim": 16},
        {"global_head_dim": 16},
    ),
    Family("Gemma 4 MoE (image-text)", "gemma4", "google/gemma-4-26B-A4B"),
    Family("Phi", "phi", "microsoft/phi-1", targets=("q_proj", "v_proj"), mlx=False),
    Family("Phi-4", "phi3", "microsoft/phi-4", targets=("qkv_proj", "o_proj")),
    Family("Phi-4-mini", "phi3", "microsoft/Phi-4-mini-instruct", targets=("qkv_proj", "o_proj")),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", "allenai/Olmo-3.1-32B-Instruct"),
    Family("OLMoE", "olmoe", None, {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3", "HuggingFaceTB/SmolLM3-3B"),
    Family("GLM-4 (GLM-4-9B-0414)", "glm4", None, {"attention_bias": False}),
    Family("GLM-4.6", "glm4_moe", "zai-org/GLM-4.6"),
    Family("GLM-4.7-Flash", "glm4_moe_lite", "zai-org/GLM-4.7-Flash", targets=("q_a_proj", "o_proj")),
    Family("MiniMax M2", "minimax_m2", "MiniMaxAI/MiniMax-M2.5"),
    Family("LFM2", "lfm2", "LiquidAI/LFM2-1.2B"),
    Family("LFM2 MoE", "lfm2_moe", "LiquidAI/LFM2.5-8B-A1B"),
    Family("LFM3", "lfm3", None, SLIDING | {"layer_types": ["conv", "sliding_attention"]}, mlx_opens=False),
    Family("Granite 4 hybrid", "granitemoehybrid", "ibm-granite/granite-4.0-h-350m", gain=0.01),
    Family("Granite 4 hybrid MoE", "granitemoehybrid", "ibm-granite/granite-4.0-h-tiny", gain=0.01),
    Family("Falcon-H1", "falcon_h1", "tiiuae/Falcon-H1-0.5B-Instruct", mlx=False),
    Family("Nemotron-H", "nemotron_h", "nvidia/Nemotron-H-56B-Base-8K", mlx=False),
    Family("Nemotron 3 Nano", "nemotron_h", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", mlx=False),
    Family("Jamba 1.5", "jamba", "ai21labs/AI21-Jamba-1.5-Mini", mlx=False),
    Family("Bamba", "bamba", None, MAMBA | {"attn_layer_indices": [1]}, mlx=False),
    Family("OLMo hybrid", "olmo_hybrid", None, RECURRENT, mlx=False),
    Family(
        "Kimi Linear",
        "kimi_linear",
        None,
        LATENT | {"linear_head_dim": 16, "linear_num_heads": 4},
        targets=("q_proj", "o_proj"),
        mlx_opens=False,
    ),
    Family(
        "Ling (hybrid)",
        "bailing_hybrid",
        None,
        LATENT | {"num_mtp_layers": 0, "q_lora_rank": 16},
        targets=("o_proj",),
        mlx_opens=False,
    ),
    Family("MiniMax-Text-01", "minimax", None, HYBRID | {"num_local_experts": 4, "block_size": 8}, mlx=False),
    Family(
        "Zamba2",
        "zamba2",
        None,
        {"layers_block_type": ["linear_attention", "hybrid"], "layer_types": ["linear_attention", "hybrid"]}
        | {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8}
        | {"attention_head_dim": 32, "attention_hidden_size": 128, "num_mem_blocks": 1},
        mlx=False,
    ),
    Family("Granite 3.3", "granite", "ibm-granite/granite-3.3-8b-instruct", gain=0.01),
    Family("Granite MoE", "granitemoe", None, SCALED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Cohere (Command R)", "cohere", None, {"logit_scale": 0.25}),
    Family("Cohere 2 (Command A)", "cohere2", None, SLIDING | {"logit_scale": 0.25}, {"sliding_window_pattern": 2}),
    Family("EXAONE 4", "exaone4", "LGAI-EXAONE/EXAONE-4.0-32B"),
    Family(
        "gpt-oss (unquantised)",
        "gpt_oss",
        "openai/gpt-oss-20b",
        apart=1e-2,
        remark="mlx-lm rounds the bounds of YaRN's ramp, which transformers does not: the two differ a little",
    ),
    Family("Seed-OSS", "seed_oss"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Hunyuan (dense)", "hunyuan_v1_dense"),
    Family("Helium", "helium"),
    Family("StarCoder2", "starcoder2", None, {"hidden_act": "gelu", "sliding_window": None}),
]


def build(family: Family, folder: Path) -> Any:
    """Write and return a model of the family; norms and biases are random too, so that a missing one shows."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    written: dict[str, Any] = {}
    if family.hub:
        written = tiny(family.hub)
        (folder / "config.json").write_text(json.dumps(written))
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = getattr(transformers, written["architectures"][0])(config).eval()
    else:
        config = transformers.AutoConfig.for_model(family.kind, **SIZES | family.config)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    written = written or json.loads((folder / "config.json").read_text()) | family.published
    if family.inside:
        written = {"model_type": family.inside, "text_config": written}
    (folder / "config.json").write_text(json.dumps(written))
    return model


def for_mlx(family: Family, folder: Path) -> None:
    """Rename the experts of gpt-oss and Qwen3.5, which are published in another form than transformers writes."""
    if family.kind not in ("gpt_oss", "qwen3_5_moe"):
        return
    weights = load_file(folder / "model.safetensors")
    weights = _fused(weights) if family.kind == "qwen3_5_moe" else _split(weights)
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})


def _fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts [E, out, in] in one tensor, gate above up, as in Qwen3.5's files."""
    single = {name: weight for name, weight in weights.items() if ".experts." in name}
    fused = {name: weight for name, weight in weights.items() if name not in single}
    for base in sorted({name.split(".experts.")[0] for name in single}):
        count = len([name for name in single if name.startswith(base)]) // 3
        gate, up, down = (
            torch.stack([single[f"{base}.experts.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{base}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{base}.experts.down_proj": down}
    return fused


def _split(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts as mlx-lm has them."""
    weights = {}
    for name, weight in stored.items():
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
    return weights
