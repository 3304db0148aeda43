"""The checks of ``delta doctor``, from what costs nothing to what runs the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from backends import registry
from backends.interface import BackendError, Bools, Engine, Floats, Ids, RolloutRequest, Sampling, Sequences
from delta_cli.assets import model_path
from delta_cli.data.loading import LoadedData
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.doctor.deadline import TooSlow, Watch
from delta_cli.doctor.estimate import Item, estimate, needed, totals, trained
from delta_cli.doctor.mac import PATIENCE, attention_scores, longest_operation, second_chunk
from delta_cli.doctor.machine import Machine, look
from delta_cli.doctor.placement import layout
from delta_cli.doctor.shapes import Shape, shape_of
from delta_cli.errors import NotFetchedError, UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.training.setup import (
    GOLD_SAMPLE,
    gold_notices,
    load_benchmarks,
    load_data,
    load_tokenizer,
    make_grader,
    template_of,
)
from delta_cli.training.update import Updater

Level = Literal["ok", "note", "wrong"]

SECONDS = 120.0  # that looking at the model may take, one forward and backward of the longest batch aside

VLLM_SHARE = 0.9  # of a GPU's memory that a server takes by default
PROMPT_SAMPLE = 16  # prompts whose outcomes are looked at
FIRST_SAMPLE = 4  # of them, which tell how long the others will take
RESPONSE_SAMPLE = 8  # responses for each


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do where it is wrong."""

    level: Level
    subject: str
    text: str


def examine(
    recipe: Recipe,
    backend: str,
    run_model: bool,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Finding]:
    """Every finding, as it is made. ``run_model`` says whether to load the model and time it.

    What takes long is said before it begins, and is not begun when ``seconds`` with the model have passed.

    What a check cannot be done without (weights, data) is a note when it is only not downloaded yet.
    """
    name = registry.default() if backend == "auto" else backend
    machine = look(name)
    yield from _machine(machine, name)
    yield from _memory(recipe, machine, name)
    try:
        tokenizer = load_tokenizer(recipe)
    except UserError as error:
        yield _not_looked_at("tokenizer", error)
        return
    yield from _tokenizer(recipe, tokenizer)
    try:
        data = load_data(recipe, tokenizer)
        load_benchmarks(recipe, data)
    except UserError as error:
        yield _not_looked_at("data", error)
        return
    with make_grader(recipe) as grader:
        yield from _data(data, grader)
        if run_model:
            yield from _model(recipe, name, tokenizer, data, grader.verifying, Watch(seconds, say))


def _not_looked_at(subject: str, error: UserError) -> Finding:
    return Finding("note" if isinstance(error, NotFetchedError) else "wrong", subject, f"not looked at: {error}")


def _machine(machine: Machine, backend: str) -> Iterator[Finding]:
    yield Finding("ok", "system", f"{machine.system}, {machine.cores} cores, {_gib(machine.memory)} of memory")
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    try:
        registry.resolve(backend)
    except BackendError as error:
        yield Finding("wrong", "backend", str(error))
        return
    if machine.device_memory:
        yield Finding("ok", "backend", f"{backend} on {machine.device}, {_gib(machine.device_memory)}")
    else:
        yield Finding("wrong", "backend", f"{backend}: {machine.device}; choose --backend cpu")


def _memory(recipe: Recipe, machine: Machine, backend: str) -> Iterator[Finding]:
    try:
        shape, config = shape_of(recipe.model.path)
    except UserError as error:
        yield Finding("note", "memory", f"not estimated: {error}")
        return
    spread = layout(recipe.parallel.processes, recipe.parallel.sharding, trained(recipe, shape))
    found = estimate(recipe, shape, config, spread)
    if backend == "mlx":
        found += [attention_scores(recipe, shape), second_chunk(recipe, shape)]
    items = sorted(found, key=lambda item: -item.bytes)
    for item in items:
        if item.bytes:
            yield Finding("ok", f"memory, {item.phase}", f"{_gib(item.bytes):>10}  {item.name}: {item.how}")
    if backend == "mlx" and machine.system.startswith("Darwin"):
        yield _watchdog(recipe, shape)
    total, host = needed(items), totals(items)["host"] * spread.processes
    if backend != "cuda":  # what is beside the device lies in the same memory, and so do the other processes
        yield _fits("memory", items, total * spread.processes + host, machine.device_memory)
        return
    yield _fits("memory", [item for item in items if item.phase != "host"], total, machine.device_memory)
    if recipe.engine.colocated and machine.device_memory:
        yield _shared(recipe, totals(items)["stays"], machine.device_memory)
    if host:
        yield _fits("memory, host", [item for item in items if item.phase == "host"], host, machine.memory)


def _watchdog(recipe: Recipe, shape: Shape) -> Finding:
    """Whether one operation may hold the GPU for longer than macOS likes while a display is on."""
    key, seconds = longest_operation(recipe, shape)
    text = f"the longest operation of an update takes an M1 {seconds:.2f} s, a faster chip less"
    if seconds < PATIENCE:
        return Finding("ok", "watchdog", text)
    return Finding(
        "note",
        "watchdog",
        f"{text}; macOS may end it while a display is on: lower {key}, or run under caffeinate -i and let the display "
        "sleep (docs/mac.md)",
    )


def _shared(recipe: Recipe, stays: int, available: int) -> Finding:
    """Whether what a vLLM server takes of the GPU fits beside what the trainer leaves there while it draws."""
    share = recipe.engine.memory or VLLM_SHARE
    both = f"engine.memory = {share:g} is {_gib(int(share * available))}, and {_gib(stays)} of the trainer's stay"
    if share * available + stays <= available:
        return Finding("ok", "memory, shared", f"{both}, of {_gib(available)}")
    fitting = max(0.0, (available - stays) / available - 0.05)
    return Finding(
        "wrong", "memory, shared", f"{both}: too much for {_gib(available)}; set engine.memory = {fitting:.2f}"
    )


def _fits(subject: str, items: Sequence[Item], total: int, available: int) -> Finding:
    """Whether ``total`` bytes are there, and the largest items that can be made smaller where they are not."""
    if not available:
        return Finding("note", subject, f"about {_gib(total)} at the worst moment")
    if total <= available:
        return Finding("ok", subject, f"about {_gib(total)} at the worst moment, of {_gib(available)}")
    advice = "; ".join(f"{item.name}: {item.remedy}" for item in [item for item in items if item.remedy][:3])
    return Finding(
        "wrong", subject, f"about {_gib(total)} at the worst moment, but {_gib(available)} is there. {advice}"
    )


def _tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Finding]:
    ends = ", ".join(
        f"{piece!r} ({i})"
        for piece, i in zip(tokenizer.pieces(list(tokenizer.eos_ids)), tokenizer.eos_ids, strict=True)
    )
    yield Finding(
        "ok", "tokenizer", f"{tokenizer.vocab_size} tokens; a response ends with {ends}; padding is {tokenizer.pad_id}"
    )
    problem = Problem("example", "1+1=?", "2")
    prompt = encode_prompt(problem, template_of(recipe), tokenizer)
    yield Finding("ok", "prompt", f"{tokenizer.decode(prompt, skip_special=False)!r}, {len(prompt)} tokens")
    shape, _ = shape_of(recipe.model.path)
    if shape.vocabulary < tokenizer.vocab_size:
        yield Finding(
            "wrong",
            "vocabulary",
            f"the model has {shape.vocabulary} rows for {tokenizer.vocab_size} tokens; it is another model's tokenizer",
        )
    elif shape.vocabulary > tokenizer.vocab_size:
        yield Finding(
            "ok", "vocabulary", f"padded to {shape.vocabulary} rows; ids beyond the tokenizer decode to \\ufffd"
        )


def _data(data: LoadedData, grader: WeightedReward) -> Iterator[Finding]:
    yield Finding("ok", "data", f"{data.report}; {len(data.problems)} to train on, {len(data.held_out)} held out")
    if all(term.grader.reward.kind != "math" for term in grader.terms):
        return
    refused = gold_notices(data, grader)
    for line in refused:
        yield Finding("wrong", "verifier", line)
    if not refused:
        count = min(GOLD_SAMPLE, len(data.problems))
        yield Finding("ok", "verifier", f"{count} gold answers accepted as answers to themselves")


def _model(
    recipe: Recipe, name: str, tokenizer: Tokenizer, data: LoadedData, grader: WeightedReward, watch: Watch
) -> Iterator[Finding]:
    if not Path(model_path(recipe.model.path)).is_dir():
        yield Finding("note", "model", "not run: its weights are not here")
        return
    try:
        engine = registry.create(name, backend_settings(recipe))
    except BackendError as error:
        yield Finding("wrong", "model", str(error))
        return
    try:
        yield Finding("ok", "model", f"{engine.parameters:,} parameters, {engine.trainable:,} trained")
        try:
            sample = _draw(recipe, engine, tokenizer, data, watch)
        except TooSlow:
            yield _slow(recipe, watch)
            return
        yield from _outcomes(recipe, sample, tokenizer, grader)
        for subject, what, look in (
            ("longest batch", "a forward and backward of the longest batch", partial(_longest, recipe, engine)),
            ("time", "a forward and backward of what was drawn", partial(_times, recipe, engine, sample)),
        ):
            if watch.left <= 0:
                text = f"not looked at: {watch.seconds:g} s are over; give it more with --seconds"
                yield Finding("note", subject, text)
            else:
                watch.say(what)
                yield from look()
    finally:
        engine.close()


@dataclass(frozen=True)
class Sample:
    """A few responses to the first problems, prompt-major."""

    problems: Sequence[Problem]
    sequences: Sequences
    truncated: Bools
    seconds: float  # to draw them


def _slow(recipe: Recipe, watch: Watch) -> Finding:
    count, limit = FIRST_SAMPLE * RESPONSE_SAMPLE, recipe.rollout.max_tokens
    return Finding(
        "note",
        "outcomes",
        f"{count} responses of at most {limit} tokens were not complete after {watch.seconds:g} s; give it more with "
        "--seconds, or try a smaller rollout.max_tokens",
    )


def _draw(recipe: Recipe, engine: Engine, tokenizer: Tokenizer, data: LoadedData, watch: Watch) -> Sample:
    """Responses to the first few problems and, where these leave time for it, to more. Raises TooSlow."""
    first = _draw_some(recipe, engine, tokenizer, data.problems[:FIRST_SAMPLE], watch)
    if len(data.problems) <= FIRST_SAMPLE or first.seconds * PROMPT_SAMPLE / FIRST_SAMPLE > watch.left / 2:
        return first
    try:
        return _draw_some(recipe, engine, tokenizer, data.problems[:PROMPT_SAMPLE], watch)
    except TooSlow:
        return first


def _draw_some(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer, problems: Sequence[Problem], watch: Watch
) -> Sample:
    count, limit = len(problems) * RESPONSE_SAMPLE, recipe.rollout.max_tokens
    watch.say(f"drawing {count} responses of at most {limit} tokens")
    prompts = tuple(encode_prompt(problem, template_of(recipe), tokenizer) for problem in problems)
    temperature = recipe.rollout.temperature
    start = time.perf_counter()
    stop = tokenizer.stop_text(recipe.rollout.stop)
    sampling = Sampling(limit, tokenizer.eos_ids, temperature, samples=RESPONSE_SAMPLE, stop=stop)
    drawn = engine.rollout(RolloutRequest(prompts, sampling, interrupt=watch.check))
    seconds = time.perf_counter() - start
    repeated = tuple(prompt for prompt in prompts for _ in range(RESPONSE_SAMPLE))
    return Sample(problems, Sequences(repeated, drawn.tokens, drawn.starts, temperature), drawn.truncated, seconds)


def _outcomes(recipe: Recipe, sample: Sample, tokenizer: Tokenizer, grader: WeightedReward) -> Iterator[Finding]:
    """Whether there is something to learn from."""
    lengths = sample.sequences.lengths
    verdicts = [
        grader.submit(
            tokenizer.decode(sample.sequences.response(row)),
            sample.problems[row // RESPONSE_SAMPLE],
            int(lengths[row]),
            bool(sample.truncated[row]),
        )
        for row in range(len(lengths))
    ]
    correct = np.array([verdict.result().correct for verdict in verdicts]).reshape(len(sample.problems), -1)
    mixed = float(np.mean(correct.any(axis=1) & ~correct.all(axis=1)))
    text = f"{correct.mean():.0%} right; {mixed:.0%} of prompts have right and wrong responses"
    if mixed <= 0.2:
        yield Finding(
            "wrong", "outcomes", f"{text}; little can be learned: choose problems nearer to what the model can do"
        )
    else:
        yield Finding("ok", "outcomes", text)
    cut = float(sample.truncated.mean())
    advice = "; raise rollout.max_tokens" if cut >= 0.5 else ""
    if cut >= 0.5 and not correct.any() and not recipe.rollout.stop:
        advice += ", or give rollout.stop the string after which the model goes on to something else"
    text = f"{lengths.mean():.0f} tokens on average, {cut:.0%} cut at the limit{advice}"
    yield Finding("wrong" if advice else "ok", "length", text)
    yield Finding("ok", "rollout", f"{lengths.sum() / sample.seconds:.0f} tokens a second")


def _longest(recipe: Recipe, engine: Engine) -> Iterator[Finding]:
    """The longest possible sequences through scoring and the backward pass, so that they fail now or never.

    As many as fill a micro-batch where responses share their prompt's tokens, all but the last of each;
    a backend that pads them makes several of it.
    """
    prompt = np.zeros(recipe.rollout.max_prompt_tokens, np.int64)
    length = recipe.rollout.max_tokens
    rows = max(1, (recipe.update.micro_batch_tokens - len(prompt)) // max(1, length - 1))
    what = f"{rows} × {length} tokens after a prompt of {len(prompt)}"
    starts = np.arange(rows + 1, dtype=np.int64) * length
    longest = Sequences((prompt,) * rows, np.zeros(rows * length, np.int64), starts, recipe.rollout.temperature)

    try:
        scores = engine.score(longest, Updater(recipe, engine).proxy)
        if scores.features:
            scores.features.close()
        engine.accumulate(longest, _nothing)
        engine.step(0.0)
    except (BackendError, MemoryError, ValueError) as error:
        yield Finding("wrong", "longest batch", f"{what}: {error}")
        return
    peak = _gib(engine.peak_memory())
    yield Finding("ok", "longest batch", f"{what} went through; {peak} at most so far")


def _times(recipe: Recipe, engine: Engine, sample: Sample) -> Iterator[Finding]:
    """What a step and the run will take, from the sample: each phase in proportion to its tokens."""
    proxy = Updater(recipe, engine).proxy
    start = time.perf_counter()
    scores = engine.score(sample.sequences, proxy)
    if scores.features:
        scores.features.close()
    scored = time.perf_counter()
    engine.accumulate(sample.sequences, _nothing)
    engine.step(0.0)
    updated = time.perf_counter()
    responses = recipe.rollout.prompts * recipe.rollout.responses
    share = responses / len(sample.sequences)
    phases = {
        "rollout": sample.seconds * share,
        "score": (scored - start) * share,
        "update": (updated - scored) * share * recipe.update.epochs,
    }
    step = sum(phases.values())
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    whole = step * recipe.run.steps
    run = f"{whole / 3600:.1f} h" if whole >= 5400 else f"{whole / 60:.1f} min"
    yield Finding(
        "ok", "time", f"about {step:.1f} s a step ({parts}), {run} for {recipe.run.steps} steps, evaluation apart"
    )


def _nothing(logp: Floats, rows: Ids) -> tuple[float, Floats]:
    """An objective of next to no gradient: forward and backward cost what they cost, the weights stay at a rate of 0.

    Not of none, for which a backend may leave the backward pass out.
    """
    return 0.0, np.full_like(logp, 1e-20)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
