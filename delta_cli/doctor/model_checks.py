"""The checks that run the model: sampled responses, the longest batch, and the time of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from backends import registry
from backends.interface import BackendError, Engine, Floats, Ids, Proxy, Sampling, Sequences
from delta_cli.assets import model_path
from delta_cli.data.load_report import LoadedData
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.doctor.deadline import Deadline, DeadlineExceeded
from delta_cli.doctor.finding import Finding, gib
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.training.setup import open_episodes
from delta_cli.training.update import Updater

PROMPT_SAMPLE = 16  # prompts to draw responses for
FIRST_SAMPLE = 4  # of them, drawn first to learn how long the others will take
RESPONSE_SAMPLE = 8  # responses to each
RATE_SAMPLE = 8  # responses whose pass is timed, to learn how many another pass may have
PASS_SHARE = 0.5  # of the time left that a pass may take by that rate
REPEATED_SHARE = 0.05  # of the time left that the timed pass may take if it is to be repeated


@dataclass(frozen=True)
class SampledResponses:
    """A few responses to the first problems."""

    batch: RolloutBatch
    seconds: float  # to draw them


def model_findings(
    recipe: Recipe, backend: str, tokenizer: Tokenizer, data: LoadedData, grader: WeightedReward, deadline: Deadline
) -> Iterator[Finding]:
    """Load the model and run it, as long as the deadline allows."""
    if not Path(model_path(recipe.model.path)).is_dir():
        yield Finding("note", "model", "not run: its weights are not on this machine")
        return
    try:
        engine = registry.create(backend, backend_settings(recipe))
    except BackendError as error:
        yield Finding("wrong", "model", str(error))
        return
    try:
        yield Finding("ok", "model", f"{engine.parameters:,} parameters, {engine.trainable:,} trained")
        try:
            with ExitStack() as stack:
                environments = open_episodes(recipe, tokenizer, stack)
                template = recipe.data.prompt_template
                worker = RolloutWorker(engine, tokenizer, grader, template, environments=environments)
                sample = _draw(recipe, worker, data, deadline)
        except UserError as error:
            yield Finding("wrong", "environment", str(error))
            return
        except DeadlineExceeded:
            yield _too_slow(recipe, deadline)
            return
        yield from _outcomes(recipe, sample)
        engine.interrupt = deadline.check
        yield from _learning(recipe, engine, sample, deadline)
    finally:
        engine.close()


def _learning(recipe: Recipe, engine: Engine, sample: SampledResponses, deadline: Deadline) -> Iterator[Finding]:
    """The checks that score and train, each on as many responses as the time left allows."""
    for subject, what, check in (
        ("longest batch", "the longest batch", partial(_longest_in_time, recipe, engine)),
        ("time", "the drawn responses", partial(_times, recipe, engine, sample)),
    ):
        try:
            deadline.check()
            deadline.say(f"a forward and backward pass of {what}")
            yield from check(deadline)
        except DeadlineExceeded:
            text = f"not checked: {deadline.seconds:g} s are over; allow more with --seconds"
            yield Finding("note", subject, text)


def _affordable(engine: Engine, proxy: Proxy | None, few: Sequences, deadline: Deadline) -> float:
    """Tokens, prompts included, that a pass may have, by the rate of a pass of a few responses.

    If that pass is short, it is repeated, because the first one may have compiled kernels.
    """
    seconds = sum(_pass(engine, proxy, few))
    if seconds < REPEATED_SHARE * deadline.left:
        seconds = sum(_pass(engine, proxy, few))
    return max(deadline.left, 0.0) * PASS_SHARE * _with_prompts(few) / seconds


def _with_prompts(sequences: Sequences) -> int:
    return len(sequences.tokens) + sum(map(len, sequences.prompts))


def _pass(engine: Engine, proxy: Proxy | None, sequences: Sequences) -> tuple[float, float]:
    """Score and train at learning rate 0. Returns the seconds of each."""
    start = time.perf_counter()
    scores = engine.score(sequences, proxy)
    if scores.features:
        scores.features.close()
    scored = time.perf_counter()
    engine.accumulate(sequences, _negligible)
    engine.step(0.0)
    return scored - start, time.perf_counter() - scored


def _too_slow(recipe: Recipe, deadline: Deadline) -> Finding:
    count, limit = FIRST_SAMPLE * RESPONSE_SAMPLE, recipe.rollout.max_tokens
    return Finding(
        "note",
        "outcomes",
        f"{count} responses of at most {limit} tokens were not complete after {deadline.seconds:g} s; allow more with "
        "--seconds, or try a smaller rollout.max_tokens",
    )


def _draw(recipe: Recipe, worker: RolloutWorker, data: LoadedData, deadline: Deadline) -> SampledResponses:
    """Responses to the first few problems; to more if time allows. Raises DeadlineExceeded."""
    first = _draw_for(recipe, worker, data.problems[:FIRST_SAMPLE], deadline)
    if len(data.problems) <= FIRST_SAMPLE or first.seconds * PROMPT_SAMPLE / FIRST_SAMPLE > deadline.left / 2:
        return first
    try:
        return _draw_for(recipe, worker, data.problems[:PROMPT_SAMPLE], deadline)
    except DeadlineExceeded:
        return first


def _draw_for(
    recipe: Recipe, worker: RolloutWorker, problems: Sequence[Problem], deadline: Deadline
) -> SampledResponses:
    count, limit = len(problems) * RESPONSE_SAMPLE, recipe.rollout.max_tokens
    deadline.say(f"drawing {count} responses of at most {limit} tokens")
    tokenizer, temperature = worker.tokenizer, recipe.rollout.temperature
    stop = tokenizer.stop_text(recipe.rollout.stop)
    sampling = Sampling(limit, tokenizer.eos_ids, temperature, samples=RESPONSE_SAMPLE, stop=stop)
    start = time.perf_counter()
    pending = worker.sample(problems, sampling, interrupt=deadline.check)
    seconds = time.perf_counter() - start
    return SampledResponses(pending.result(), seconds)


def _outcomes(recipe: Recipe, sample: SampledResponses) -> Iterator[Finding]:
    """Whether there is something to learn from the responses."""
    batch = sample.batch
    lengths = batch.sequences.lengths
    if batch.failed.any():
        reasons = [episode.failure for episode in batch.episodes or () if episode.failure is not None]
        text = f"{len(reasons)} of {len(batch.texts)} episodes failed, the first because {reasons[0]}"
        yield Finding("wrong", "environment", text)
    correct = batch.correct.reshape(len(batch.problems), -1)
    mixed = float(np.mean(correct.any(axis=1) & ~correct.all(axis=1)))
    text = f"{correct.mean():.0%} right; {mixed:.0%} of prompts have right and wrong responses"
    if mixed <= 0.2:
        yield Finding(
            "wrong", "outcomes", f"{text}; there is little to learn: choose problems closer to what the model can do"
        )
    else:
        yield Finding("ok", "outcomes", text)
    cut = float(batch.truncated.mean())
    advice = "; raise rollout.max_tokens" if cut >= 0.5 else ""
    if cut >= 0.5 and not correct.any() and not recipe.rollout.stop:
        advice += ", or put the string that follows an answer into rollout.stop"
    text = f"{lengths.mean():.0f} tokens on average, {cut:.0%} cut at the limit{advice}"
    yield Finding("wrong" if advice else "ok", "length", text)
    yield Finding("ok", "rollout", f"{lengths.sum() / sample.seconds:.0f} tokens a second")


def _longest_in_time(recipe: Recipe, engine: Engine, deadline: Deadline) -> Iterator[Finding]:
    """:func:`_longest` with as many responses as the time left allows."""
    full = _full_micro_batch(recipe)
    one = _copies(recipe, 1)
    try:
        tokens = _affordable(engine, Updater(recipe, engine).proxy, one, deadline)
    except (BackendError, MemoryError, ValueError):
        tokens = math.inf  # the same error comes again there, with the number of responses
    rows = max(1, int(min(full, (tokens - len(one.prompts[0])) // recipe.rollout.max_tokens)))
    for found in _longest(recipe, engine, rows):
        if rows == full or found.level != "ok":
            yield found
        else:
            text = f"{found.text}; all {full} responses would take too long, allow more time with --seconds"
            yield Finding("note", found.subject, text)


def _longest(recipe: Recipe, engine: Engine, rows: int) -> Iterator[Finding]:
    """Score and train on the longest possible batch once, so that it runs out of memory now or never."""
    longest = _copies(recipe, rows)
    what = f"{rows} × {recipe.rollout.max_tokens} tokens after a prompt of {len(longest.prompts[0])}"
    try:
        _pass(engine, Updater(recipe, engine).proxy, longest)
    except (BackendError, MemoryError, ValueError) as error:
        yield Finding("wrong", "longest batch", f"{what}: {error}")
        return
    yield Finding("ok", "longest batch", f"{what} went through; {gib(engine.peak_memory())} at most so far")


def _full_micro_batch(recipe: Recipe) -> int:
    """How many of the longest responses fill a micro-batch if they share the tokens of their prompt.

    A backend that pads them needs several micro-batches for them.
    """
    room = recipe.update.micro_batch_tokens - recipe.rollout.max_prompt_tokens
    return max(1, room // max(1, recipe.rollout.max_tokens - 1))


def _copies(recipe: Recipe, rows: int) -> Sequences:
    """The longest response to the longest prompt, several times."""
    prompt, length = np.zeros(recipe.rollout.max_prompt_tokens, np.int64), recipe.rollout.max_tokens
    starts = np.arange(rows + 1, dtype=np.int64) * length
    return Sequences((prompt,) * rows, np.zeros(rows * length, np.int64), starts, recipe.rollout.temperature)


def _times(recipe: Recipe, engine: Engine, sample: SampledResponses, deadline: Deadline) -> Iterator[Finding]:
    """The time of a step and of the run, with each phase of the sample scaled by its number of responses."""
    every, proxy = sample.batch.sequences, Updater(recipe, engine).proxy
    tokens = _affordable(engine, proxy, every.select(np.arange(min(RATE_SAMPLE, len(every)))), deadline)
    fitting = max(1, int(len(every) * min(1.0, tokens / _with_prompts(every))))
    score, update = _pass(engine, proxy, every.select(np.arange(fitting)))
    responses = recipe.rollout.prompts * recipe.rollout.responses
    phases = {
        "rollout": sample.seconds * responses / len(every),
        "score": score * responses / fitting,
        "update": update * responses / fitting * recipe.update.epochs,
    }
    step = sum(phases.values())
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    whole = step * recipe.run.steps
    run = f"{whole / 3600:.1f} h" if whole >= 5400 else f"{whole / 60:.1f} min"
    yield Finding(
        "ok", "time", f"about {step:.1f} s a step ({parts}), {run} for {recipe.run.steps} steps, without evaluation"
    )


def _negligible(logp: Floats, rows: Ids) -> tuple[float, Floats]:
    """An objective with a negligible gradient: full forward and backward passes, and at rate 0 no weight moves.

    The gradient is not exactly zero, because a backend may skip the backward pass of a zero gradient.
    """
    return 0.0, np.full_like(logp, 1e-20)
