"""The checks that run the model: sampled responses, the longest batch, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from backends import registry
from backends.interface import BackendError, Engine, Floats, Ids, Sampling, Sequences
from delta_cli.assets import model_path
from delta_cli.data.loading import LoadedData
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
        for subject, what, check in (
            ("longest batch", "a forward and backward pass of the longest batch", partial(_longest, recipe, engine)),
            ("time", "a forward and backward pass of the drawn responses", partial(_times, recipe, engine, sample)),
        ):
            if deadline.left <= 0:
                text = f"not checked: {deadline.seconds:g} s are over; allow more with --seconds"
                yield Finding("note", subject, text)
            else:
                deadline.say(what)
                yield from check()
    finally:
        engine.close()


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


def _longest(recipe: Recipe, engine: Engine) -> Iterator[Finding]:
    """Score and train on the longest possible batch once, so that it runs out of memory now or never.

    As many responses as fill a micro-batch if they share the tokens of their prompt. A backend that pads them needs
    several micro-batches for them.
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
        engine.accumulate(longest, _negligible)
        engine.step(0.0)
    except (BackendError, MemoryError, ValueError) as error:
        yield Finding("wrong", "longest batch", f"{what}: {error}")
        return
    yield Finding("ok", "longest batch", f"{what} went through; {gib(engine.peak_memory())} at most so far")


def _times(recipe: Recipe, engine: Engine, sample: SampledResponses) -> Iterator[Finding]:
    """The time of a step and of the run, with each phase of the sample scaled by its number of responses."""
    proxy = Updater(recipe, engine).proxy
    start = time.perf_counter()
    scores = engine.score(sample.batch.sequences, proxy)
    if scores.features:
        scores.features.close()
    scored = time.perf_counter()
    engine.accumulate(sample.batch.sequences, _negligible)
    engine.step(0.0)
    updated = time.perf_counter()
    responses = recipe.rollout.prompts * recipe.rollout.responses
    share = responses / len(sample.batch.sequences)
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
        "ok", "time", f"about {step:.1f} s a step ({parts}), {run} for {recipe.run.steps} steps, without evaluation"
    )


def _negligible(logp: Floats, rows: Ids) -> tuple[float, Floats]:
    """An objective with a negligible gradient: full forward and backward passes, and at rate 0 no weight moves.

    The gradient is not exactly zero, because a backend may skip the backward pass of a zero gradient.
    """
    return 0.0, np.full_like(logp, 1e-20)
