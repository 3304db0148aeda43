"""One batch of graded responses: prompts drawn, responses sampled, each graded while others still grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.arrays import Bools, Doubles
from backends.interface import Features, Floats, Ids, Proxy, Sampling, Sequences, starts_of, token_index
from delta_cli.credit.features import ChosenFeatures, JoinedFeatures
from delta_cli.data.problem import Problem
from delta_cli.recipe.models import Rollout
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.worker import Drawn, RolloutWorker
from delta_cli.runs.observer import Observer


@dataclass(frozen=True)
class OwnFeatures:
    """Features of the tokens that this rank has drawn."""

    rows: Ids  # the responses, ascending
    features: Features

    def select(self, rows: Ids, lengths: Ids) -> OwnFeatures | None:
        """Of a batch that keeps the responses ``rows`` [r] of those with ``lengths`` [R]; None unless these ascend."""
        if np.any(np.diff(rows) < 0):
            return None
        starts = starts_of(lengths[self.rows])
        kept = np.flatnonzero(np.isin(self.rows, rows))
        chosen = ChosenFeatures(self.features, token_index(starts, kept), int(starts[-1]))
        return OwnFeatures(np.searchsorted(rows, self.rows[kept]), chosen)


@dataclass(frozen=True)
class RolloutBatch:
    """R responses of G prompts, prompt-major: response r belongs to problem r // (R / G)."""

    problems: tuple[Problem, ...]  # G
    sequences: Sequences  # R responses
    texts: tuple[str, ...]  # R
    verdicts: tuple[Verdict, ...]  # R
    truncated: Bools  # [R]
    engine_logprobs: Floats  # [N] float32
    version: int = 0  # of the weights it was drawn from
    engine_entropies: Floats | None = None  # [N] float32, nats; None where the engine tells none
    features: OwnFeatures | None = None  # those that the engine has kept

    @property
    def samples(self) -> int:
        """Responses of each prompt."""
        return len(self.texts) // max(len(self.problems), 1)

    @property
    def groups(self) -> Ids:
        """The prompt of each response, [R]."""
        return np.repeat(np.arange(len(self.problems)), self.samples)

    @property
    def rewards(self) -> Doubles:
        """[R]"""
        return np.array([verdict.reward for verdict in self.verdicts], np.float64)

    @property
    def each_reward(self) -> dict[str, Doubles]:
        """Of several rewards each alone, [R], before its weight."""
        return {name: np.array([verdict.parts[name] for verdict in self.verdicts]) for name in self.verdicts[0].parts}

    @property
    def correct(self) -> Bools:
        """[R]"""
        return np.array([verdict.correct for verdict in self.verdicts], bool)

    def select(self, groups: Ids) -> RolloutBatch:
        """The batch of some of its prompts."""
        rows = self.rows(groups)
        index = token_index(self.sequences.starts, rows)
        return RolloutBatch(
            problems=tuple(self.problems[group] for group in groups),
            sequences=self.sequences.select(rows),
            texts=tuple(self.texts[row] for row in rows),
            verdicts=tuple(self.verdicts[row] for row in rows),
            truncated=self.truncated[rows],
            engine_logprobs=self.engine_logprobs[index],
            version=self.version,
            engine_entropies=None if self.engine_entropies is None else self.engine_entropies[index],
            features=None if self.features is None else self.features.select(rows, self.sequences.lengths),
        )

    def rows(self, groups: Ids) -> Ids:
        """The responses to some of the prompts, in that order."""
        return (groups[:, None] * self.samples + np.arange(self.samples)).ravel()

    def tokens_of_groups(self, wanted: Bools) -> Ids:
        """Tokens that each prompt and its ``wanted`` [R] responses are together, [G]: what a forward of them costs."""
        prompts: Ids = np.array([len(prompt) for prompt in self.sequences.prompts[:: self.samples]])
        shape = len(self.problems), self.samples
        tokens: Ids = np.where(wanted, self.sequences.lengths, 0).reshape(shape).sum(axis=1)
        found: Ids = np.where(wanted.reshape(shape).any(axis=1), prompts + tokens, 0)
        return found

    def mixed_groups(self) -> Ids:
        """Prompts whose responses did not all get the same reward."""
        rewards = self.rewards.reshape(len(self.problems), -1)
        return np.flatnonzero(rewards.max(axis=1) != rewards.min(axis=1))


def join(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """One batch of several, in order."""
    if len(batches) == 1:
        return batches[0]
    sequences = Sequences(
        prompts=tuple(prompt for batch in batches for prompt in batch.sequences.prompts),
        tokens=np.concatenate([batch.sequences.tokens for batch in batches]),
        starts=starts_of(np.concatenate([batch.sequences.lengths for batch in batches])),
        temperature=batches[0].sequences.temperature,
    )
    return RolloutBatch(
        problems=tuple(problem for batch in batches for problem in batch.problems),
        sequences=sequences,
        texts=tuple(text for batch in batches for text in batch.texts),
        verdicts=tuple(verdict for batch in batches for verdict in batch.verdicts),
        truncated=np.concatenate([batch.truncated for batch in batches]),
        engine_logprobs=np.concatenate([batch.engine_logprobs for batch in batches]),
        version=min(batch.version for batch in batches),
        engine_entropies=_joined([batch.engine_entropies for batch in batches]),
        features=_joined_features(batches),
    )


def _joined_features(batches: Sequence[RolloutBatch]) -> OwnFeatures | None:
    known = [(batch, batch.features) for batch in batches if batch.features is not None]
    if len(known) < len(batches):
        return None
    before = np.cumsum([0, *(len(batch.sequences) for batch, _ in known)])
    counts = [int(batch.sequences.lengths[own.rows].sum()) for batch, own in known]
    rows = [first + own.rows for first, (_, own) in zip(before[:-1], known, strict=True)]
    return OwnFeatures(np.concatenate(rows), JoinedFeatures([own.features for _, own in known], counts))


def _joined(parts: Sequence[Floats | None]) -> Floats | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class PendingBatch:
    """Sampled responses whose last verdicts are still to come."""

    problems: tuple[Problem, ...]  # G
    drawn: Drawn
    sampling: Sampling
    flip: float  # share of rewards to turn into their opposite, to study noise

    def result(self) -> RolloutBatch:
        """Wait for the verdicts, those of other ranks included."""
        found, samples = self.drawn.result(), self.sampling.samples
        flips = np.random.default_rng(self.sampling.seed).random(len(found.texts)) < self.flip
        return RolloutBatch(
            problems=self.problems,
            sequences=Sequences(
                prompts=tuple(prompt for prompt in found.prompts for _ in range(samples)),
                tokens=found.completions.tokens,
                starts=found.completions.starts,
                temperature=self.sampling.temperature,
            ),
            texts=found.texts,
            verdicts=tuple(_flip(v) if flip else v for v, flip in zip(found.verdicts, flips, strict=True)),
            truncated=found.completions.truncated,
            engine_logprobs=found.completions.logprobs,
            version=found.completions.version,
            engine_entropies=found.completions.entropies,
            features=None if found.completions.features is None else OwnFeatures(found.own, found.completions.features),
        )


def _flip(verdict: Verdict) -> Verdict:
    """The reward of the opposite outcome; ``correct`` stays what the verifier said."""
    return replace(verdict, reward=verdict.reward + (-1.0 if verdict.correct else 1.0))


def roll(
    worker: RolloutWorker,
    problems: Sequence[Problem],
    settings: Rollout,
    seed: int,
    flip: float = 0.0,
    observer: Observer | None = None,
    interrupt: Callable[[], None] = lambda: None,
    proxy: Proxy | None = None,
) -> PendingBatch:
    """Sample ``settings.responses`` responses for each problem; ``interrupt`` may raise StopRequested.

    Features of a ``proxy`` are kept as they are drawn.
    """
    observer = observer or Observer()
    observer.phase("rollout", len(problems) * settings.responses)
    ranks = worker.collective.size  # what the others have drawn is not known here: about as much
    sampling = Sampling(
        max_tokens=settings.max_tokens,
        stop_ids=worker.tokenizer.eos_ids,
        temperature=settings.temperature,
        samples=settings.responses,
        seed=seed,
        stop=worker.tokenizer.stop_text(settings.stop),
    )

    def on_progress(responses: int, tokens: int) -> None:
        observer.advance(min(responses * ranks, len(problems) * settings.responses), tokens * ranks)

    drawn = worker.draw(problems, sampling, on_progress, interrupt, entropies=True, proxy=proxy)
    return PendingBatch(tuple(problems), drawn, sampling, flip)
