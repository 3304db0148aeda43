"""How much memory a recipe needs, item by item, and what to change where it does not fit.

The arithmetic of the torch backend; MLX differs in that a quantised base keeps its bits. Phases do
not overlap: what is needed is what stays, and the larger of what the rollout and the update add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delta_cli.doctor.shapes import Shape
from delta_cli.recipe import Recipe

FLOAT = 4  # bytes

# Activations of one layer for a token, in hidden sizes, as stored for the backward pass: inputs of the
# norms and projections, q, k, v, the attention's output, and three times the feed-forward's width.
_ACTIVATIONS = 8


@dataclass(frozen=True)
class Item:
    """One use of memory."""

    name: str
    bytes: int
    phase: str  # "stays", "rollout" or "update"
    how: str  # the arithmetic
    remedy: str = ""  # what makes it smaller


def estimate(recipe: Recipe, shape: Shape, config: Mapping[str, Any]) -> list[Item]:
    """Every use of memory of a run, to within what frameworks keep for themselves."""
    return [*_weights(recipe, shape, config), *_rollout(recipe, shape), *_update(recipe, shape)]


def needed(items: list[Item]) -> int:
    """Bytes at the worst moment."""
    phases = {
        phase: sum(item.bytes for item in items if item.phase == phase) for phase in ("stays", "rollout", "update")
    }
    return phases["stays"] + max(phases["rollout"], phases["update"])


def _weights(recipe: Recipe, shape: Shape, config: Mapping[str, Any]) -> list[Item]:
    half = recipe.model.dtype == "bfloat16"
    lora, count = recipe.model.lora, shape.parameters
    stored = FLOAT if lora is None or not half else 2
    bits = (config.get("quantization") or {}).get("bits")
    width = f"{bits} bits" if bits else f"{stored} bytes"
    base = count * bits // 8 + count // 16 if bits else count * stored
    items = [Item("weights", base, "stays", f"{count / 1e9:.2f} billion × {width}", "a smaller model")]
    trained = shape.adapters(lora.rank, lora.targets, lora.layers) if lora else count
    if lora:
        items.append(
            Item("adapters", trained * FLOAT, "stays", f"{trained / 1e6:.1f} million × 4 bytes", "model.lora.rank")
        )
    remedy = "" if lora else "train adapters: add [model.lora]"
    items.append(
        Item("optimizer", 2 * trained * FLOAT, "stays", f"two moments × {trained / 1e6:.0f} million × 4 bytes", remedy)
    )
    items.append(Item("gradient", trained * FLOAT, "update", f"{trained / 1e6:.0f} million × 4 bytes", remedy))
    if half and lora is None:
        items.append(Item("compute copy", 2 * count, "stays", "weights cast to bfloat16", remedy))
    if recipe.update.kl_coefficient and lora is None:
        items.append(
            Item(
                "reference policy",
                count * (2 if half else FLOAT),
                "stays",
                "a frozen copy",
                "update.kl_coefficient = 0",
            )
        )
    return items


def _rollout(recipe: Recipe, shape: Shape) -> list[Item]:
    width = 2 if recipe.model.dtype == "bfloat16" else FLOAT
    rows = min(recipe.rollout.batch, recipe.rollout.prompts * recipe.rollout.responses)
    length = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    how = f"{rows} responses × {length} tokens × {per_token / 1024:.0f} KiB, if all grow to the limit"
    logits = Item(
        "rollout logits",
        3 * rows * shape.vocabulary * FLOAT,
        "rollout",
        f"{rows} × {shape.vocabulary} × 3 float32",
        "rollout.batch",
    )
    return [Item("KV cache", rows * length * per_token, "rollout", how, "rollout.batch or rollout.max_tokens"), logits]


def _update(recipe: Recipe, shape: Shape) -> list[Item]:
    half = recipe.model.dtype == "bfloat16"
    width = 2 if half else FLOAT
    update, rollout = recipe.update, recipe.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    tokens = max(update.micro_batch_tokens, longest)
    layer = width * (_ACTIVATIONS * shape.hidden + 3 * shape.intermediate)
    if recipe.model.gradient_checkpointing:
        size, how = (
            tokens * (shape.layers * shape.hidden * width + layer),
            "inputs of all layers and one layer's inside",
        )
    else:
        size, how = tokens * shape.layers * layer, "the inside of all layers"
    head = 3 * update.head_chunk_tokens * shape.vocabulary * FLOAT
    total = rollout.prompts * rollout.responses * rollout.max_tokens
    features = min(total * shape.hidden * width, update.feature_bytes)
    items = [
        Item(
            "activations",
            size,
            "update",
            f"{tokens} tokens: {how}",
            "update.micro_batch_tokens, model.gradient_checkpointing",
        ),
        Item(
            "logits",
            head,
            "update",
            f"{update.head_chunk_tokens} × {shape.vocabulary} × 3 float32",
            "update.head_chunk_tokens",
        ),
    ]
    if recipe.method.resolve().credit == "delta":
        items.append(
            Item(
                "features",
                features,
                "update",
                f"{total} tokens × {shape.hidden} × {width} bytes, at most update.feature_bytes",
                "update.feature_bytes",
            )
        )
    return items
