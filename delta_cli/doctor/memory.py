"""How much memory a recipe needs, item by item, and what to change if it does not fit.

The arithmetic is that of the torch backend; on MLX a quantised base keeps its bits. Phases do not overlap, so the peak
is what stays plus the largest of rollout, scoring, update and export.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from delta_cli.doctor.model_shape import ModelShape
from delta_cli.doctor.sharding import ONE, ShardingLayout
from delta_cli.recipe import Recipe
from delta_cli.recipe.models import UpdateSection

FLOAT = 4  # bytes

MemoryPhase = Literal["stays", "rollout", "score", "update", "export", "host"]

# Numbers that the inside of one layer keeps for the backward pass, for a token: so many times the hidden
# size, the width of all queries, that of all keys, and the feed-forward's width. Counted as autograd saves
# them (a test repeats it). Norms compute in float32, which is two numbers of 16 bits.
_INSIDE = {"float32": (6, 5, 6, 4), "bfloat16": (8, 6, 7, 4), "16 bits with adapters": (9, 6, 7, 4)}
_HEAD_ROWS = 4  # hidden states of a micro-batch: as they come, chosen, their derivative, and that in place


@dataclass(frozen=True)
class MemoryItem:
    """One use of memory."""

    name: str
    bytes: int
    phase: MemoryPhase  # "host" is memory of the host beside that of the device; the others are the device's
    how: str  # the arithmetic
    remedy: str = ""  # what makes it smaller


def estimate_memory(
    recipe: Recipe, shape: ModelShape, config: Mapping[str, Any], layout: ShardingLayout = ONE
) -> list[MemoryItem]:
    """Every use of memory of a process, except what frameworks keep for themselves."""
    return [
        *_weights(recipe, shape, config, layout),
        *_rollout(recipe, shape, layout),
        *_activations(recipe, shape),
        *_features(recipe, shape, layout),
    ]


def trained(recipe: Recipe, shape: ModelShape) -> int:
    """Parameters that the run trains."""
    lora = recipe.model.lora
    return shape.adapters(lora.rank, lora.targets, lora.layers, lora.dora) if lora else shape.parameters


def peak_bytes(items: Iterable[MemoryItem]) -> int:
    """Bytes of the device at the peak."""
    phases = bytes_by_phase(items)
    return phases["stays"] + max(phases[name] for name in ("rollout", "score", "update", "export"))


def bytes_by_phase(items: Iterable[MemoryItem]) -> dict[MemoryPhase, int]:
    """Bytes of each phase."""
    phases: dict[MemoryPhase, int] = dict.fromkeys(get_args(MemoryPhase), 0)
    for item in items:
        phases[item.phase] += item.bytes
    return phases


def _weights(recipe: Recipe, shape: ModelShape, config: Mapping[str, Any], layout: ShardingLayout) -> list[MemoryItem]:
    half = recipe.model.dtype != "float32"
    lora, count = recipe.model.lora, shape.parameters
    stored = _width(recipe) if lora or layout.parts == 1 else FLOAT  # shards of trained weights are the masters
    bits = (config.get("quantization") or {}).get("bits")
    width = f"{bits} bits" if bits else f"{stored} bytes"
    base = count * bits // 8 + count // 16 if bits else count * stored
    if recipe.model.load_in_4bit and not bits:  # matrices of layers alone: embeddings and head stay what they are
        packed = shape.layers * shape.layer_matrices
        base = packed // 2 + packed // 64 + packed // 4096 + (count - packed) * stored
        width = f"4.13 bits in {many(packed)}, {stored} bytes in the rest"
    split = "" if layout.parts == 1 else f" / {layout.parts} processes"
    items = [MemoryItem("weights", layout.share(base), "stays", f"{many(count)} × {width}{split}", "a smaller model")]
    own, some = layout.share(trained(recipe, shape)), f"{many(trained(recipe, shape))}{{}}{split}"
    if lora:
        items.append(MemoryItem("adapters", own * FLOAT, "stays", some.format(" × 4 bytes"), "model.lora.rank"))
    smaller = "" if lora else "train adapters: add [model.lora]"
    if half and lora is None and layout.parts == 1:
        items.append(_masters(recipe.update, own, some, smaller))
    items.append(_moments(recipe.update, own, some, smaller))
    items.append(MemoryItem("gradient", own * FLOAT, "update", some.format(" × 4 bytes"), smaller))
    items += _compute_copy(recipe, shape, layout, smaller)
    if recipe.checkpoint.async_save:
        items.append(
            MemoryItem(
                "checkpoint, copied",
                own * FLOAT + _moments(recipe.update, own, some, smaller).bytes,
                "host",
                "trained weights and moments, while they are written",
                "checkpoint.async_save = false",
            )
        )
    if recipe.update.kl_coefficient and lora is None:
        reference = layout.share(count * (2 if half else FLOAT))
        items.append(
            MemoryItem("reference policy", reference, "stays", f"a frozen copy{split}", "update.kl_coefficient = 0")
        )
    return items


def _compute_copy(recipe: Recipe, shape: ModelShape, layout: ShardingLayout, smaller: str) -> list[MemoryItem]:
    """The weights that layers compute with, beside those that are stored: casts of adapters, gathered weights.

    A rollout gathers all of them, the export one matrix at a time, in the type of the shards. Scoring and a fully
    sharded update hold two layers (one in use, the next on its way), the embeddings and the head.
    """
    half, lora = recipe.model.dtype != "float32", recipe.model.lora
    if layout.parts == 1:
        how = f"{many(trained(recipe, shape))} cast to bfloat16, 2 bytes"
        return [MemoryItem("compute copy", 2 * trained(recipe, shape), "stays", how, smaller)] if half and lora else []
    width, count = _width(recipe), shape.parameters
    ends = count - shape.layers * shape.layer_matrices
    working = 2 * shape.layer_matrices + ends if layout.sharding == "full" else count
    every, several = f"{many(count)} × {width} bytes", f"two layers, embeddings and head × {width} bytes"
    sizes: dict[MemoryPhase, int] = {"rollout": count, "score": working, "update": working}
    items = [
        MemoryItem("weights, gathered", width * size, phase, every if size == count else several, "a smaller model")
        for phase, size in sizes.items()
    ]
    largest = shape.vocabulary * shape.hidden
    items.append(
        MemoryItem(
            "weights, gathered",
            (width if lora else FLOAT) * largest,
            "export",
            "one matrix after the other",
            "a smaller model",
        )
    )
    if lora is None:
        size, how = FLOAT * (shape.layer_matrices + ends), "of a layer, embeddings and head, before they are scattered"
        items.append(MemoryItem("gradient, whole", size, "update", how))
    return items


def _width(recipe: Recipe) -> int:
    """Bytes of a number of the weights and activations."""
    return FLOAT if recipe.model.dtype == "float32" else 2


def _masters(update: UpdateSection, own: int, some: str, smaller: str) -> MemoryItem:
    remedies = ["" if update.offload else "update.offload = true", smaller]
    phase: MemoryPhase = "host" if update.offload else "stays"
    return MemoryItem("masters", FLOAT * own, phase, some.format(" × 4 bytes"), "; ".join(filter(None, remedies)))


def _moments(update: UpdateSection, own: int, some: str, smaller: str) -> MemoryItem:
    size, how = 2 * FLOAT * own, " × 2 × 4 bytes"
    if update.moments == "int8":
        size, how = 2 * (own + FLOAT * own // 256), " × 2 × (1 byte + 4 for each 256)"
    remedies = [
        "" if update.offload else "update.offload = true",
        "" if update.moments == "int8" else 'update.moments = "int8"',
        smaller,
    ]
    phase: MemoryPhase = "host" if update.offload else "stays"
    return MemoryItem("moments", size, phase, some.format(how), "; ".join(filter(None, remedies)))


def key_value_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * shape.attending * shape.kv_heads * shape.head_dim * _width(recipe)


def state_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of the recurrent states and convolutions' last inputs of a response."""
    return FLOAT * shape.states + _width(recipe) * shape.tails


def pooled(recipe: Recipe, shape: ModelShape, items: list[MemoryItem], room: int) -> list[MemoryItem]:
    """The items with the keys and values of a GPU's local engine: a pool of pages in what is free of ``room``.

    It holds one response at least, and what all could grow to at most.
    """
    if recipe.engine.kind != "local":
        return items
    [cache] = [item for item in items if item.name == "KV cache"]
    beside = sum(item.bytes for item in items if item is not cache and item.phase in ("stays", "rollout"))
    each = key_value_bytes(recipe, shape)
    longest = max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0) + recipe.rollout.max_prompt_tokens
    size = max(each * longest, min(cache.bytes, room - beside))
    how = f"{size / each:,.0f} tokens × {each / 1024:.0f} KiB in pages, what is free; one response at least"
    pool = MemoryItem("KV cache", size, "rollout", how, "rollout.max_tokens")
    return [pool if item is cache else item for item in items]


def _vllm(recipe: Recipe, shape: ModelShape) -> list[MemoryItem]:
    """The least memory of a server on the trainer's GPU during a rollout; while it sleeps, its weights are on the
    host.
    """
    if not recipe.engine.colocated:
        return []
    width = _width(recipe)
    per_token, length = key_value_bytes(recipe, shape), recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
    weights, how = shape.parameters * width, f"{many(shape.parameters)} × {width} bytes"
    least = f"one response of {length} tokens × {per_token / 1024:.0f} KiB; what engine.memory leaves holds more"
    return [
        MemoryItem("vLLM's weights", weights, "rollout", how, "engine.colocated = false"),
        MemoryItem("vLLM's KV cache", length * per_token, "rollout", least, "rollout.max_tokens"),
        MemoryItem("vLLM's weights, asleep", weights, "host", how, "engine.colocated = false"),
    ]


def _rollout(recipe: Recipe, shape: ModelShape, layout: ShardingLayout) -> list[MemoryItem]:
    if recipe.engine.kind == "vllm":
        return _vllm(recipe, shape)
    rollout, evaluation = recipe.rollout, recipe.evaluation
    uses = [
        ("", rollout.prompts, rollout.responses, rollout.max_tokens),
        (" of an evaluation", evaluation.problems, evaluation.samples, evaluation.max_tokens or rollout.max_tokens),
    ]
    per_token = key_value_bytes(recipe, shape)
    inside = _inside(recipe, shape)

    def items(what: str, prompts: int, samples: int, longest: int) -> list[MemoryItem]:
        rows, length = min(rollout.batch, layout.most(prompts) * samples), rollout.max_prompt_tokens + longest
        how = f"{rows} responses{what} × {length} tokens × {per_token / 1024:.0f} KiB, if all grow to the limit"
        logits = 3 * rows * shape.vocabulary * FLOAT
        entering = -(-rows // samples) * rollout.max_prompt_tokens  # each prompt once
        together = min(entering, max(recipe.update.micro_batch_tokens, rollout.max_prompt_tokens))
        prefill = together * inside + entering * per_token
        prefill_how = (
            f"{together} tokens × {inside / 1024:.0f} KiB inside one layer, "
            f"keys and values of {entering} × {per_token / 1024:.0f} KiB"
        )
        found = [
            MemoryItem("KV cache", rows * length * per_token, "rollout", how, "rollout.batch or rollout.max_tokens"),
            MemoryItem("prefill", prefill, "rollout", prefill_how, "rollout.max_prompt_tokens"),
            MemoryItem(
                "rollout logits", logits, "rollout", f"{rows} × {shape.vocabulary} × 3 float32", "rollout.batch"
            ),
        ]
        return [*found, *_states(recipe, shape, rows)]

    return max((items(*use) for use in uses), key=lambda found: sum(item.bytes for item in found))


def _states(recipe: Recipe, shape: ModelShape, rows: int) -> list[MemoryItem]:
    """Recurrent states, which a response keeps at any length; twice while an environment may be at work."""
    each, copies = state_bytes(recipe, shape), 2 if recipe.environment.kind else 1
    how = f"{rows} responses × {each / 1024:,.0f} KiB" + (" × 2 for parked episodes" if copies == 2 else "")
    return [MemoryItem("recurrent states", rows * copies * each, "rollout", how, "rollout.batch")] if each else []


def inside_bytes(shape: ModelShape, kind: str, width: int) -> int:
    """Bytes per token inside one layer, of numbers of ``width`` bytes; ``kind`` is the type of the compute."""
    widths = (shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate)
    return width * sum(a * b for a, b in zip(_INSIDE[kind], widths, strict=True))


def _inside(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes per token inside one layer of the policy."""
    lora = recipe.model.lora
    kind = "16 bits with adapters" if lora and recipe.model.dtype != "float32" else recipe.model.dtype
    scaled = shape.outputs(lora.targets) if lora and lora.dora else 0  # what DoRA multiplies by m/‖·‖
    return inside_bytes(shape, kind, _width(recipe)) + scaled * _width(recipe)


def _activations(recipe: Recipe, shape: ModelShape) -> list[MemoryItem]:
    """Activations of scoring and of the update. The head's rows are float32."""
    half, lora = recipe.model.dtype != "float32", recipe.model.lora
    update, rollout = recipe.update, recipe.rollout
    tokens = max(update.micro_batch_tokens, rollout.max_prompt_tokens + rollout.max_tokens)
    inside = _inside(recipe, shape)
    head = _HEAD_ROWS * shape.hidden * FLOAT
    if recipe.model.gradient_checkpointing:
        kept = shape.layers * shape.hidden * _width(recipe) + inside
        how = "the inputs of all layers and the inside of one"
    else:
        kept, how = shape.layers * inside, "the inside of all layers"
    chunk = 3 * update.head_chunk_tokens * shape.vocabulary * FLOAT
    chunk_how = f"{update.head_chunk_tokens} × {shape.vocabulary} × 3 float32"
    kib = f"{tokens} tokens × {{:.0f}} KiB: "
    remedy = "update.micro_batch_tokens, model.gradient_checkpointing"
    items = [
        MemoryItem("activations", tokens * (kept + head), "update", kib.format((kept + head) / 1024) + how, remedy),
        MemoryItem("logits", chunk, "update", chunk_how, "update.head_chunk_tokens"),
        MemoryItem(
            "activations",
            tokens * (inside + head),
            "score",
            kib.format((inside + head) / 1024) + "the inside of one layer",
            "update.micro_batch_tokens",
        ),
        MemoryItem("logits", chunk, "score", chunk_how, "update.head_chunk_tokens"),
    ]
    if half and lora is None:
        size, how = shape.vocabulary * shape.hidden * FLOAT, f"{shape.vocabulary} × {shape.hidden} float32"
        items.append(MemoryItem("head's gradient", size, "update", f"{how}, of one chunk of tokens"))
    return items


def _features(recipe: Recipe, shape: ModelShape, layout: ShardingLayout) -> list[MemoryItem]:
    if recipe.method.resolve().credit != "delta":
        return []
    update, rollout = recipe.update, recipe.rollout
    width = _width(recipe)
    tokens = layout.most(rollout.prompts) * rollout.responses * rollout.max_tokens
    everything = tokens * shape.hidden * width
    here = min(everything, update.feature_bytes)
    beside = min(everything - here, update.feature_host_bytes)
    how = f"{tokens} tokens × {shape.hidden} × {width} bytes, if all grow to the limit"
    return [
        MemoryItem("features", here, "score", f"{how}, at most update.feature_bytes", "update.feature_bytes"),
        MemoryItem(
            "features", beside, "host", "of the rest, at most update.feature_host_bytes", "update.feature_host_bytes"
        ),
    ]


def many(count: int) -> str:
    """A number of parameters in words."""
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
