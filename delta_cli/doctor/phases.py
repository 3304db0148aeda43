"""Seconds of each phase of a step, on the process that takes longest; and the memory of vLLM beside training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from delta_cli.doctor import assumptions, timing
from delta_cli.doctor.estimate import FLOAT, Item, estimate, key_value_bytes, totals, trained
from delta_cli.doctor.plan_request import Question
from delta_cli.doctor.workload import (
    Work,
    decode_flops,
    decode_steps,
    prefill_flops,
    reached,
    score_flops,
    update_flops,
)

NAMES = ("drawing", "scoring", "credit", "updating", "collectives", "weight sync")
SPLITS = (1, 2, 4, 8)  # GPUs that one vLLM engine's weights may be split over


@dataclass(frozen=True)
class Phase:
    """One part of a step, on the process that takes longest."""

    name: str
    seconds: float
    how: str  # what it is spent on


def memory(question: Question) -> list[Item]:
    """Every use of memory of one process."""
    items = estimate(question.recipe, question.shape, question.config, question.layout)
    if question.engine == "vllm":
        items = [item for item in items if item.phase != "rollout"]
        items += _engine_items(question, _split(question, items), items)
    return items


def _split(question: Question, items: list[Item]) -> int:
    """GPUs that one engine's weights are split over: as few as leave a fifth of the memory for keys and values."""
    allowed = [count for count in SPLITS if count <= min(question.processes, question.gpu.node)]
    spare = question.room - totals(items)["stays"]
    enough = (count for count in allowed if spare - question.weight_bytes / count >= 0.2 * question.gpu.memory)
    return next(enough, allowed[-1])


def _engine_items(question: Question, split: int, items: list[Item]) -> list[Item]:
    """vLLM's weights, and its cache as large as it can be used or fit, but for one response at least."""
    weights = question.weight_bytes // split
    each = key_value_bytes(question.recipe, question.shape)
    work, longest = question.drawn, question.recipe.rollout.max_prompt_tokens + question.recipe.rollout.max_tokens
    spare = question.room - totals(items)["stays"] - weights
    wanted = min(work.responses, assumptions.ENGINE_SEQUENCES // split) * work.context
    cache = max(each * longest // split, min(spare, int(each * max(wanted, longest / split))))
    how = f"{cache / each:,.0f} tokens × {each / 1024:.0f} KiB, paged"
    share = "" if split == 1 else f" / {split} GPUs"
    return [
        Item("engine's weights", weights, "rollout", f"a copy of its own{share}", "more processes"),
        Item("KV cache", cache, "rollout", how, "rollout.max_tokens"),
    ]


def phases(question: Question, items: list[Item]) -> tuple[Phase, ...]:
    """The phases of a step, in the order of ``NAMES``; ``items`` are those of ``memory``."""
    score, update = _score(question), _update(question)
    return (
        _draw_vllm(question, items) if question.engine == "vllm" else _draw_local(question),
        score,
        _credit(question),
        update,
        _collectives(question, score.seconds, update.seconds),
        _sync(question),
    )


def _draw_local(question: Question) -> Phase:
    work, shape, gpu = question.drawn, question.shape, question.gpu
    slots = min(question.recipe.rollout.batch, work.responses)
    steps = decode_steps(work, slots)
    keys = key_value_bytes(question.recipe, shape) * work.drawn * reached(work, slots)
    limits = {
        "reading memory": timing.reading(steps * question.read_bytes + keys, gpu),
        "products": timing.products(decode_flops(shape, work), gpu),
    }
    bound = max(limits, key=lambda name: limits[name])
    how = f"{steps:,.0f} steps of {slots} responses, bound by {bound}"
    prefill = timing.products(prefill_flops(shape, work), gpu)
    return Phase("drawing", limits[bound] + steps * assumptions.LOCAL_STEP + prefill, how)


def _draw_vllm(question: Question, items: list[Item]) -> Phase:
    work, shape, gpu = question.drawn, question.shape, question.gpu
    split = _split(question, [item for item in items if item.phase != "rollout"])
    each = key_value_bytes(question.recipe, shape)
    cache = next(item.bytes for item in items if item.name == "KV cache")
    together = replace(work, groups=work.groups * split)  # drawn by one engine
    slots = max(1, min(assumptions.ENGINE_SEQUENCES, together.responses, int(cache * split / (each * work.context))))
    steps = decode_steps(together, slots)
    sums = 2 * shape.layers * assumptions.LATENCY * (split.bit_length() - 1)  # two a layer, over the engine's GPUs
    limits = {
        "reading memory": timing.reading(steps * question.read_bytes / split + each * work.drawn * work.context, gpu),
        "products": timing.products(decode_flops(shape, work), gpu),
    }
    bound = max(limits, key=lambda name: limits[name])
    on = "" if split == 1 else f" on {split} GPUs"
    how = f"{steps:,.0f} steps of {slots} responses{on}, bound by {bound}"
    prefill = timing.products(prefill_flops(shape, work), gpu)
    return Phase("drawing", limits[bound] + steps * (assumptions.ENGINE_STEP + sums) + prefill, how)


def _score(question: Question) -> Phase:
    """One forward, unless its numbers are those of drawing, and one where there is a reference policy."""
    recipe, gpu = question.recipe, question.gpu
    exact = recipe.method.resolve().credit == "delta" and recipe.delta.proxy == "hidden_exact"
    flops, how, forwards = 0.0, [], 0
    if recipe.scores_as_drawn:
        how.append("numbers as drawn")
    else:
        flops += score_flops(question.shape, question.drawn, 2 if exact else 1)
        how.append(f"one forward of {question.drawn.packed:,.0f} tokens")
        forwards = 1
    if recipe.update.kl_coefficient:
        flops += score_flops(question.shape, question.drawn)
        how.append("one of the reference policy")
        forwards = 1
    seconds = max(timing.products(flops, gpu), _launches(question, question.drawn, forwards))
    return Phase("scoring", seconds, ", ".join(how))


def _launches(question: Question, work: Work, forwards: int) -> float:
    """Seconds to launch the kernels of so many forwards over each micro-batch."""
    return question.micro_batches(work) * forwards * question.shape.layers * assumptions.EAGER_LAYER


def _credit(question: Question) -> Phase:
    """Two reductions over the features for each pair of centroids: a weighted sum and a projection."""
    recipe, gpu, hidden = question.recipe, question.gpu, question.shape.hidden
    if recipe.method.resolve().credit != "delta":
        return Phase("credit", 0.0, "this method has no features")
    passes = 2 * (recipe.delta.refinements + 1)
    row, tokens = question.width * hidden, question.drawn.drawn
    here = min(tokens, recipe.update.feature_bytes // row)
    beside = min(tokens - here, recipe.update.feature_host_bytes // row)
    anew = (tokens - here - beside) / tokens
    numbers = tokens * hidden * 8  # each is also written and read again in float64
    each = timing.reading(row * here + 2 * numbers, gpu) + timing.crossing(row * beside, gpu)
    forward = timing.products(anew * score_flops(question.shape, question.drawn, 0), gpu)
    how = f"{passes} reductions; features {here / tokens:.0%} on the GPU, {beside / tokens:.0%} on the host"
    return Phase("credit", passes * (each + forward), how + (f", {anew:.0%} computed again each time" if anew else ""))


def _update(question: Question) -> Phase:
    recipe, gpu = question.recipe, question.gpu
    frozen, recompute = recipe.model.lora is not None, recipe.model.gradient_checkpointing
    flops = update_flops(question.shape, question.mini_batch, recompute=recompute, frozen=frozen)
    launches = _launches(question, question.mini_batch, 4 if recompute else 3)
    own = question.layout.share(trained(recipe, question.shape))
    optimizer = timing.reading(assumptions.ADAMW_BYTES * own, gpu)
    moments = 2 * own if recipe.update.moments == "int8" else 2 * FLOAT * own
    crossing = timing.crossing(2 * moments, gpu) if recipe.update.offload else 0.0
    seconds = question.updates * (max(timing.products(flops, gpu), launches) + optimizer + crossing)
    how = f"{question.updates} updates on {question.mini_batch.packed:,.0f} tokens"
    return Phase("updating", seconds, f"{how}, AdamW {question.updates * (optimizer + crossing):.1f} s of it")


def _collectives(question: Question, scoring: float, updating: float) -> Phase:
    """Of scoring and of the updates, beside so many seconds of computing; drawing's are the weights' sync.

    Besides, one response is scored before and after the updates, to see the policy move.
    """
    spread, layers, updates = question.layout, question.shape.layers, question.updates
    if spread.processes == 1:
        return Phase("collectives", 0.0, "one process")
    gradient = timing.gathering(question.trained_bytes, layers, spread.processes, question.gpu)
    gather = timing.gathering(question.gathered_bytes, layers, spread.processes, question.gpu)
    micro = question.micro_batches(question.mini_batch)
    if spread.sharding == "none":
        transfers = updates * 2 * gradient
        seconds, how = timing.exposed(transfers, updating), "gradients summed once an update"
    elif spread.sharding == "optimizer":
        transfers = updates * (gather + micro * gradient)
        seconds, how = timing.exposed(transfers, updating) + gather, f"a gather an update, {micro} scatters"
    else:
        scored = question.micro_batches(question.drawn) * gather
        transfers = scored + updates * micro * (2 * gather + gradient)
        seconds = timing.exposed(scored, scoring) + timing.exposed(transfers - scored, updating) + 2 * gather
        how = f"{micro} micro-batches an update, each 2 gathers and a scatter"
    return Phase("collectives", seconds, f"{how}, {transfers:.1f} s before overlap")


def _sync(question: Question) -> Phase:
    """New weights for whoever draws."""
    spread, recipe = question.layout, question.recipe
    if recipe.model.published_adapters and question.engine == "vllm":
        files = 2 * FLOAT * trained(recipe, question.shape) / assumptions.DISK
        return Phase("weight sync", files, "adapters written and read")
    gather = 0.0
    if spread.parts > 1:
        gather = timing.gathering(question.gathered_bytes, question.shape.layers, spread.processes, question.gpu)
    if question.engine == "vllm":
        return Phase(
            "weight sync",
            gather + 2 * question.weight_bytes / assumptions.DISK,
            "written to a file and read by the engines",
        )
    return Phase("weight sync", gather, "weights gathered to draw" if gather else "drawn from the weights themselves")
