"""One batch of graded responses: prompts drawn, responses sampled, each graded while others still grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from backends.interface import Backend, Completions, Floats, Ids, Sampling, Sequences, token_index
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.models import Rollout
from delta_cli.rewards.grader import Grader, Verdict
from delta_cli.rewards.responses import Graded, draw
from delta_cli.training.observer import Observer


@dataclass(frozen=True)
class RolloutBatch:
    """R responses of G prompts, prompt-major: response r belongs to problem r // (R / G)."""

    problems: tuple[Problem, ...]  # G
    sequences: Sequences  # R responses
    texts: tuple[str, ...]  # R
    verdicts: tuple[Verdict, ...]  # R
    truncated: NDArray[np.bool_]  # [R]
    engine_logprobs: Floats  # [N] float32

    @property
    def samples(self) -> int:
        """Responses of each prompt."""
        return len(self.texts) // max(len(self.problems), 1)

    @property
    def groups(self) -> Ids:
        """The prompt of each response, [R]."""
        return np.repeat(np.arange(len(self.problems)), self.samples)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[R]"""
        return np.array([verdict.reward for verdict in self.verdicts], np.float64)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """[R]"""
        return np.array([verdict.correct for verdict in self.verdicts], bool)

    def select(self, groups: Ids) -> RolloutBatch:
        """The batch of some of its prompts."""
        rows = (groups[:, None] * self.samples + np.arange(self.samples)).ravel()
        return RolloutBatch(
            problems=tuple(self.problems[group] for group in groups),
            sequences=self.sequences.select(rows),
            texts=tuple(self.texts[row] for row in rows),
            verdicts=tuple(self.verdicts[row] for row in rows),
            truncated=self.truncated[rows],
            engine_logprobs=self.engine_logprobs[token_index(self.sequences.starts, rows)],
        )

    def mixed_groups(self) -> Ids:
        """Prompts whose responses did not all get the same reward."""
        rewards = self.rewards.reshape(len(self.problems), -1)
        return np.flatnonzero(rewards.max(axis=1) != rewards.min(axis=1))


def join(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """One batch of several, in order."""
    if len(batches) == 1:
        return batches[0]
    lengths = np.concatenate([batch.sequences.lengths for batch in batches])
    sequences = Sequences(
        prompts=tuple(prompt for batch in batches for prompt in batch.sequences.prompts),
        tokens=np.concatenate([batch.sequences.tokens for batch in batches]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        temperature=batches[0].sequences.temperature,
    )
    return RolloutBatch(
        problems=tuple(problem for batch in batches for problem in batch.problems),
        sequences=sequences,
        texts=tuple(text for batch in batches for text in batch.texts),
        verdicts=tuple(verdict for batch in batches for verdict in batch.verdicts),
        truncated=np.concatenate([batch.truncated for batch in batches]),
        engine_logprobs=np.concatenate([batch.engine_logprobs for batch in batches]),
    )


@dataclass(frozen=True)
class PendingBatch:
    """Sampled responses whose last verdicts are still to come."""

    problems: tuple[Problem, ...]  # G
    sequences: Sequences  # R
    completions: Completions
    responses: tuple[Graded, ...]  # R
    flips: NDArray[np.bool_]  # [R] rewards to turn into their opposite, to study noise

    def result(self) -> RolloutBatch:
        """Wait for the verdicts."""
        verdicts = [response.verdict.result() for response in self.responses]
        return RolloutBatch(
            problems=self.problems,
            sequences=self.sequences,
            texts=tuple(response.text for response in self.responses),
            verdicts=tuple(_flip(v) if flip else v for v, flip in zip(verdicts, self.flips, strict=True)),
            truncated=self.completions.truncated,
            engine_logprobs=self.completions.logprobs,
        )


def _flip(verdict: Verdict) -> Verdict:
    """The reward of the opposite outcome; ``correct`` stays what the verifier said."""
    return replace(verdict, reward=verdict.reward + (-1.0 if verdict.correct else 1.0))


@dataclass
class Roller:
    """Draws responses with one model and tokenizer, and hands each to a grader as soon as it is complete."""

    backend: Backend
    tokenizer: Tokenizer
    grader: Grader
    settings: Rollout
    template: str
    flip: float = 0.0  # share of rewards to flip
    observer: Observer = field(default_factory=Observer)

    def roll(self, problems: Sequence[Problem], seed: int, check: Callable[[], None] = lambda: None) -> PendingBatch:
        """Sample ``settings.responses`` responses for each problem; ``check`` may raise to end it early.

        It is called whenever a response is complete.
        """

        def heard(responses: int, tokens: int) -> None:
            check()
            self.observer.advance(responses, tokens)

        samples = self.settings.responses
        self.observer.phase("rollout", len(problems) * samples)
        sampling = self._sampling(seed)
        drawn = draw(self.backend, self.tokenizer, self.grader, problems, self.template, sampling, heard)
        sequences = Sequences(
            prompts=tuple(prompt for prompt in drawn.prompts for _ in range(samples)),
            tokens=drawn.completions.tokens,
            starts=drawn.completions.starts,
            temperature=self.settings.temperature,
        )
        return PendingBatch(
            problems=tuple(problems),
            sequences=sequences,
            completions=drawn.completions,
            responses=drawn.responses,
            flips=np.random.default_rng(seed).random(len(sequences)) < self.flip,
        )

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(
            max_tokens=self.settings.max_tokens,
            stop_ids=self.tokenizer.eos_ids,
            temperature=self.settings.temperature,
            samples=self.settings.responses,
            seed=seed,
        )
