"""Seconds of each phase of a step, on the process that takes longest; and the memory of vLLM beside training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from delta_cli.doctor import assumptions, gpu_time
from delta_cli.doctor.memory import FLOAT, MemoryItem, bytes_by_phase, estimate_memory, key_value_bytes, pooled, trained
from delta_cli.doctor.plan_request import PlanRequest
from delta_cli.doctor.reward_model_memory import reward_model_items
from delta_cli.doctor.workload import (
    Workload,
    decode_flops,
    decode_steps,
    prefill_flops,
    score_flops,
    update_flops,
)

NAMES = ("drawing", "scoring", "credit", "updating", "collectives", "weight sync")
SPLITS = (1, 2, 4, 8)  # GPUs that one vLLM engine's weights may be split over


@dataclass(frozen=True)
class StepPhase:
    """One part of a step, on the process that takes longest."""

    name: str
    seconds: float
    how: str  # what it is spent on


def memory(request: PlanRequest) -> list[MemoryItem]:
    """Every use of memory of one process."""
    items = estimate_memory(request.recipe, request.shape, request.config, request.layout)
    items += reward_model_items(request.recipe, gpu=True)
    if request.engine == "vllm":
        items = [item for item in items if item.phase != "rollout"]
        return items + _engine_items(request, _split(request, items), items)
    return pooled(request.recipe, request.shape, items, request.room)


def _split(request: PlanRequest, items: list[MemoryItem]) -> int:
    """GPUs that one engine's weights are split over: as few as leave a fifth of the memory for keys and values."""
    allowed = [count for count in SPLITS if count <= min(request.processes, request.gpu.node)]
    spare = request.room - bytes_by_phase(items)["stays"]
    enough = (count for count in allowed if spare - request.weight_bytes / count >= 0.2 * request.gpu.memory)
    return next(enough, allowed[-1])


def _engine_items(request: PlanRequest, split: int, items: list[MemoryItem]) -> list[MemoryItem]:
    """vLLM's weights, and its cache as large as it can be used or fit, but for one response at least."""
    weights = request.weight_bytes // split
    each = key_value_bytes(request.recipe, request.shape)
    work, longest = request.drawn, request.recipe.rollout.max_prompt_tokens + request.recipe.rollout.max_tokens
    spare = request.room - bytes_by_phase(items)["stays"] - weights
    wanted = min(work.responses, assumptions.ENGINE_SEQUENCES // split) * work.context
    cache = max(each * longest // split, min(spare, int(each * max(wanted, longest / split))))
    how = f"{cache / each:,.0f} tokens × {each / 1024:.0f} KiB, paged"
    share = "" if split == 1 else f" / {split} GPUs"
    return [
        MemoryItem("engine's weights", weights, "rollout", f"a copy of its own{share}", "more processes"),
        MemoryItem("KV cache", cache, "rollout", how, "rollout.max_tokens"),
    ]


def phases(request: PlanRequest, items: list[MemoryItem]) -> tuple[StepPhase, ...]:
    """The phases of a step, in the order of ``NAMES``; ``items`` are those of ``memory``."""
    score, update = _score(request), _update(request)
    return (
        _draw_vllm(request, items) if request.engine == "vllm" else _draw_local(request, items),
        score,
        _credit(request),
        update,
        _collectives(request, score.seconds, update.seconds),
        _sync(request),
    )


def _draw_local(request: PlanRequest, items: list[MemoryItem]) -> StepPhase:
    cache = next(item.bytes for item in items if item.name == "KV cache")
    layer, beside = assumptions.DECODE_KERNELS
    step = (request.shape.layers * layer + beside) * assumptions.GRAPH_KERNEL
    return _draw(request, request.drawn, cache, request.recipe.rollout.batch, step)


def _draw_vllm(request: PlanRequest, items: list[MemoryItem]) -> StepPhase:
    work = request.drawn
    split = _split(request, [item for item in items if item.phase != "rollout"])
    cache = next(item.bytes for item in items if item.name == "KV cache")
    together = replace(work, groups=work.groups * split)  # drawn by one engine
    sums = 2 * request.shape.layers * assumptions.LATENCY * (split.bit_length() - 1)  # two a layer, over its GPUs
    return _draw(request, together, cache * split, assumptions.ENGINE_SEQUENCES, assumptions.ENGINE_STEP + sums, split)


def _draw(request: PlanRequest, together: Workload, cache: float, most: int, step: float, split: int = 1) -> StepPhase:
    """Responses drawn ``together`` from weights that are split over GPUs.

    At most ``most`` at a time, or as many as the cache (bytes) holds at their mean length; ``step`` is the seconds of
    a step beside the GPU's work.
    """
    work, shape, gpu = request.drawn, request.shape, request.gpu
    each = key_value_bytes(request.recipe, shape)
    slots = max(1, min(most, together.responses, int(cache / (each * work.context))))
    steps = decode_steps(together, slots)
    limits = {
        "reading memory": gpu_time.reading(steps * request.read_bytes / split + each * work.drawn * work.context, gpu),
        "products": gpu_time.products(decode_flops(shape, work), gpu),
    }
    bound = max(limits, key=lambda name: limits[name])
    on = "" if split == 1 else f" on {split} GPUs"
    how = f"{steps:,.0f} steps of {slots} responses{on}, bound by {bound}"
    prefill = gpu_time.products(prefill_flops(shape, work), gpu)
    return StepPhase("drawing", limits[bound] + steps * step + prefill, how)


def _score(request: PlanRequest) -> StepPhase:
    """One forward, unless its numbers are those of drawing, and one where there is a reference policy."""
    recipe, gpu = request.recipe, request.gpu
    exact = recipe.method.resolve().credit == "delta" and recipe.delta.proxy == "hidden_exact"
    flops, how, forwards = 0.0, [], 0
    if recipe.scores_as_drawn:
        how.append("numbers as drawn")
    else:
        flops += score_flops(request.shape, request.drawn, 2 if exact else 1)
        how.append(f"one forward of {request.drawn.packed:,.0f} tokens")
        forwards = 1
    if recipe.update.kl_coefficient:
        flops += score_flops(request.shape, request.drawn)
        how.append("one of the reference policy")
        forwards = 1
    seconds = max(gpu_time.products(flops, gpu), _launches(request, request.drawn, forwards))
    return StepPhase("scoring", seconds, ", ".join(how))


def _launches(request: PlanRequest, work: Workload, forwards: int) -> float:
    """Seconds to launch the kernels of so many forwards over each micro-batch."""
    return request.micro_batches(work) * forwards * request.shape.layers * assumptions.EAGER_LAYER


def _credit(request: PlanRequest) -> StepPhase:
    """Two reductions over the features for each pair of centroids: a weighted sum and a projection."""
    recipe, gpu, hidden = request.recipe, request.gpu, request.shape.hidden
    if recipe.method.resolve().credit != "delta":
        return StepPhase("credit", 0.0, "this method has no features")
    passes = 2 * (recipe.delta.refinements + 1)
    row, tokens = request.width * hidden, request.drawn.drawn
    here = min(tokens, recipe.update.feature_bytes // row)
    beside = min(tokens - here, recipe.update.feature_host_bytes // row)
    anew = (tokens - here - beside) / tokens
    numbers = tokens * hidden * 8  # each is also written and read again in float64
    each = gpu_time.reading(row * here + 2 * numbers, gpu) + gpu_time.crossing(row * beside, gpu)
    forward = gpu_time.products(anew * score_flops(request.shape, request.drawn, 0), gpu)
    how = f"{passes} reductions; features {here / tokens:.0%} on the GPU, {beside / tokens:.0%} on the host"
    return StepPhase(
        "credit", passes * (each + forward), how + (f", {anew:.0%} computed again each time" if anew else "")
    )


def _update(request: PlanRequest) -> StepPhase:
    recipe, gpu = request.recipe, request.gpu
    frozen, recompute = recipe.model.lora is not None, recipe.model.gradient_checkpointing
    flops = update_flops(request.shape, request.mini_batch, recompute=recompute, frozen=frozen)
    launches = _launches(request, request.mini_batch, 4 if recompute else 3)
    own = request.layout.share(trained(recipe, request.shape))
    optimizer = gpu_time.reading(assumptions.ADAMW_BYTES * own, gpu)
    moments = 2 * own if recipe.update.moments == "int8" else 2 * FLOAT * own
    masters = FLOAT * own if request.width < FLOAT and not frozen and request.layout.parts == 1 else 0
    crossing = gpu_time.crossing(2 * (moments + masters), gpu) if recipe.update.offload else 0.0
    seconds = request.updates * (max(gpu_time.products(flops, gpu), launches) + optimizer + crossing)
    how = f"{request.updates} updates on {request.mini_batch.packed:,.0f} tokens"
    return StepPhase("updating", seconds, f"{how}, AdamW {request.updates * (optimizer + crossing):.1f} s of it")


def _collectives(request: PlanRequest, scoring: float, updating: float) -> StepPhase:
    """Of scoring and of the updates, beside so many seconds of computing; drawing's are the weights' sync.

    Besides, one response is scored before and after the updates, to see the policy move.
    """
    spread, layers, updates = request.layout, request.shape.layers, request.updates
    if spread.processes == 1:
        return StepPhase("collectives", 0.0, "one process")
    gradient = gpu_time.gathering(request.trained_bytes, layers, spread.parts, request.gpu)
    gather = gpu_time.gathering(request.weight_bytes, layers, spread.parts, request.gpu)
    micro = request.micro_batches(request.mini_batch)
    if spread.sharding == "none":
        transfers = updates * 2 * gpu_time.gathering(request.trained_bytes, layers, spread.processes, request.gpu)
        seconds, how = gpu_time.exposed(transfers, updating), "gradients summed once an update"
    elif spread.sharding == "optimizer":
        transfers = updates * (gather + micro * gradient)
        seconds, how = gpu_time.exposed(transfers, updating) + gather, f"a gather an update, {micro} scatters"
    else:
        scored = request.micro_batches(request.drawn) * gather
        transfers = scored + updates * micro * (2 * gather + gradient)
        seconds = gpu_time.exposed(scored, scoring) + gpu_time.exposed(transfers - scored, updating) + 2 * gather
        how = f"{micro} micro-batches an update, each 2 gathers and a scatter"
    if spread.sharding != "none" and spread.copies > 1:  # each on a machine of its own
        apart = replace(request.gpu, node=1)
        summing = updates * 2 * gpu_time.gathering(request.trained_bytes, layers, spread.copies, apart)
        transfers, seconds = transfers + summing, seconds + summing
        how += f", sums over {spread.copies} copies an update"
    return StepPhase("collectives", seconds, f"{how}, {transfers:.1f} s before overlap")


def _sync(request: PlanRequest) -> StepPhase:
    """New weights for whoever draws."""
    spread, recipe = request.layout, request.recipe
    if recipe.model.published_adapters and request.engine == "vllm" and recipe.engine.takes_adapters:
        files = 2 * FLOAT * trained(recipe, request.shape) / assumptions.DISK
        return StepPhase("weight sync", files, "adapters written and read")
    gather = 0.0
    if spread.parts > 1:
        gather = gpu_time.gathering(request.weight_bytes, request.shape.layers, spread.parts, request.gpu)
    if request.engine == "vllm":
        return StepPhase(
            "weight sync",
            gather + 2 * request.weight_bytes / assumptions.DISK,
            "written to a file and read by the engines",
        )
    return StepPhase(
        "weight sync", gather, "weights gathered to draw" if gather else "drawn from the weights themselves"
    )
