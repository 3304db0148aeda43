"""What differs on a Mac: attention in blocks, two chunks while scoring, macOS's watchdog. Computed, not measured."""

from __future__ import annotations

from backends.mlx import ATTENTION_BLOCK
from delta_cli.doctor.memory import FLOAT, MemoryItem
from delta_cli.doctor.model_shape import ModelShape
from delta_cli.recipe import Recipe

M1 = 2.6e12  # float32 operations a second of an M1's eight GPU cores, by its data sheet: the slowest there is
WATCHDOG_SECONDS = 0.25  # seconds of one operation from which on a warning is due; macOS does not publish its own


def attention_scores(recipe: Recipe, shape: ModelShape) -> MemoryItem:
    """Scores of one block of queries against all keys, in the layer whose gradient is computed.

    MLX's fused kernel, where its gradient works, needs less. Four arrays of this size exist at a time: the products,
    their softmax, and the gradients of both.
    """
    longest = longest_sequence(recipe)
    tokens = max(recipe.update.micro_batch_tokens, longest)
    width = FLOAT if recipe.model.dtype == "float32" else 2
    rows, block = tokens // longest, min(longest, ATTENTION_BLOCK)
    return MemoryItem(
        "attention scores",
        4 * rows * block * longest * shape.heads * width,
        "update",
        f"4 × {rows} × {block} × {longest} × {shape.heads} heads × {width} bytes",
        "update.micro_batch_tokens, rollout.max_tokens",
    )


def second_chunk(recipe: Recipe, shape: ModelShape) -> MemoryItem:
    """Logits of the chunk being computed while the previous one is read."""
    tokens, size = max(recipe.update.micro_batch_tokens, longest_sequence(recipe)), recipe.update.head_chunk_tokens
    second = min(size, max(0, tokens - size))
    how = f"{second} × {shape.vocabulary} × 3 float32"
    return MemoryItem(
        "logits, one ahead", 3 * second * shape.vocabulary * FLOAT, "score", how, "update.head_chunk_tokens"
    )


def longest_sequence(recipe: Recipe) -> int:
    """Tokens of the longest prompt with the longest response."""
    return recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens


def longest_operation(recipe: Recipe, shape: ModelShape) -> tuple[str, float]:
    """The largest product of an update, by name, and its seconds on an M1's GPU at full speed."""
    tokens = max(recipe.update.micro_batch_tokens, longest_sequence(recipe))
    products = {
        "update.micro_batch_tokens": 2 * tokens * shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim),
        "update.head_chunk_tokens": 2 * recipe.update.head_chunk_tokens * shape.hidden * shape.vocabulary,
    }
    key = max(products, key=lambda name: products[name])
    return key, products[key] / M1
