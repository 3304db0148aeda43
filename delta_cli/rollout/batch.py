"""A graded rollout: responses to some prompts, their rewards, and what the sampler knew about each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.arrays import Bools, Doubles, Floats, Ids
from backends.interface import Features, Sequences, starts_of, token_index
from backends.regions import joined as joined_regions
from delta_cli.credit.advantages import AdvantageKind, group_advantages
from delta_cli.credit.features import JoinedFeatures, SelectedFeatures
from delta_cli.data.problem import Problem
from delta_cli.data.prompt_order import PassRate
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.episodes import Episode


@dataclass(frozen=True)
class LocalFeatures:
    """Features of the responses that this rank sampled; other ranks hold the rest."""

    rows: Ids  # ascending
    features: Features

    def select(self, rows: Ids, lengths: Ids) -> LocalFeatures | None:
        """The features within a batch that keeps ``rows`` [r] of responses of ``lengths`` [R].

        None unless ``rows`` ascend, because features stay in their order.
        """
        if np.any(np.diff(rows) < 0):
            return None
        starts = starts_of(lengths[self.rows])
        kept = np.flatnonzero(np.isin(self.rows, rows))
        selected = SelectedFeatures(self.features, token_index(starts, kept), int(starts[-1]))
        return LocalFeatures(np.searchsorted(rows, self.rows[kept]), selected)


@dataclass(frozen=True)
class RolloutBatch:
    """R graded responses to G prompts, prompt-major: response r answers problem r // (R / G).

    Every rank holds the whole batch, except for ``features``.
    """

    problems: tuple[Problem, ...]  # G
    sequences: Sequences  # R responses, N tokens
    texts: tuple[str, ...]  # R, each with the think tag that its prompt opened
    verdicts: tuple[Verdict, ...]  # R
    truncated: Bools  # [R] True: reached the length limit
    engine_logprobs: Floats  # [N] float32, from the sampler
    version: int = 0  # of the weights that sampled it, the oldest if there were several
    token_versions: Ids | None = None  # [N] of the weights that sampled each token; None: ``version`` sampled all
    engine_entropies: Floats | None = None  # [N] float32, nats; None if the sampler does not return entropies
    features: LocalFeatures | None = None  # None if the sampler did not keep them
    draws: int = 1  # batches of prompts sampled to fill it
    episodes: tuple[Episode, ...] | None = None  # R, if responses have several turns
    pass_rates: tuple[PassRate, ...] = ()  # with a curriculum, of every group that was drawn to fill it
    environment_wait: float = 0.0  # seconds in which a sampler had nothing to do but wait for environments

    @property
    def samples(self) -> int:
        """Responses per prompt."""
        return len(self.texts) // max(len(self.problems), 1)

    @property
    def groups(self) -> Ids:
        """The index of each response's prompt, [R]."""
        return np.repeat(np.arange(len(self.problems)), self.samples)

    @property
    def rewards(self) -> Doubles:
        """The total reward of each response, [R]."""
        return np.array([verdict.reward for verdict in self.verdicts], np.float64)

    @property
    def each_reward(self) -> dict[str, Doubles]:
        """Each reward by name before its weight, [R]; empty if there is only one."""
        names = next((verdict.parts for verdict in self.verdicts if verdict.parts), ())
        return {name: np.array([verdict.parts.get(name, np.nan) for verdict in self.verdicts]) for name in names}

    @property
    def failed(self) -> Bools:
        """Which responses have no verdict because a judge or their environment failed, [R]: no reward is known."""
        failed: Bools = np.array([verdict.void for verdict in self.verdicts], bool)
        if self.episodes is not None:
            failed |= np.array([episode.failure is not None for episode in self.episodes], bool)
        return failed

    @property
    def correct(self) -> Bools:
        """Which responses the verifier accepted, [R]."""
        return np.array([verdict.correct for verdict in self.verdicts], bool)

    def advantages(self, kind: AdvantageKind) -> Doubles:
        """The advantage of each response, [R]; one that failed is compared with no other and has none."""
        counted = ~self.failed
        advantages: Doubles = np.zeros(len(self.texts))
        advantages[counted] = group_advantages(self.rewards[counted], self.groups[counted], kind)
        return advantages

    @property
    def shortest_response(self) -> Sequences:
        """The response with the fewest tokens, and its prompt."""
        return self.sequences.select(np.argsort(self.sequences.lengths, kind="stable")[:1])

    @property
    def mixed_groups(self) -> Ids:
        """The prompts whose responses have different rewards; all others are zero-variance groups."""
        rewards, failed = (values.reshape(len(self.problems), -1) for values in (self.rewards, self.failed))
        highest = np.where(failed, -np.inf, rewards).max(axis=1)
        return np.flatnonzero(highest > np.where(failed, np.inf, rewards).min(axis=1))

    @property
    def group_pass_rates(self) -> Doubles:
        """The share of right responses among those with a verdict, [G]; NaN if none has one."""
        counted = ~self.failed.reshape(len(self.problems), -1)
        right, counted = (self.correct.reshape(counted.shape) & counted).sum(axis=1), counted.sum(axis=1)
        rates: Doubles = np.divide(right, counted, out=np.full(len(right), np.nan), where=counted > 0)
        return rates

    def rows(self, groups: Ids) -> Ids:
        """The responses to the prompts ``groups``, in that order."""
        return (groups[:, None] * self.samples + np.arange(self.samples)).ravel()

    def tokens_of_groups(self, wanted: Bools) -> Ids:
        """Tokens in one forward pass over each prompt and its ``wanted`` [R] responses, [G]; 0 if none is wanted."""
        prompts: Ids = np.array([len(prompt) for prompt in self.sequences.prompts[:: self.samples]])
        shape = len(self.problems), self.samples
        tokens: Ids = np.where(wanted, self.sequences.region_lengths, 0).reshape(shape).sum(axis=1)
        found: Ids = np.where(wanted.reshape(shape).any(axis=1), prompts + tokens, 0)
        return found

    def select(self, groups: Ids) -> RolloutBatch:
        """The batch restricted to the prompts ``groups``."""
        rows = self.rows(groups)
        index = token_index(self.sequences.starts, rows)
        return replace(
            self,
            problems=tuple(self.problems[group] for group in groups),
            sequences=self.sequences.select(rows),
            texts=tuple(self.texts[row] for row in rows),
            verdicts=tuple(self.verdicts[row] for row in rows),
            truncated=self.truncated[rows],
            engine_logprobs=self.engine_logprobs[index],
            engine_entropies=None if self.engine_entropies is None else self.engine_entropies[index],
            token_versions=None if self.token_versions is None else self.token_versions[index],
            features=None if self.features is None else self.features.select(rows, self.sequences.lengths),
            episodes=None if self.episodes is None else tuple(self.episodes[row] for row in rows),
        )

    def with_flipped_rewards(self, share: float, seed: int) -> RolloutBatch:
        """The batch with the rewards of a random ``share`` of responses inverted, to study reward noise.

        ``correct`` remains what the verifier said.
        """
        flips = np.random.default_rng(seed).random(len(self.texts)) < share
        verdicts = tuple(_flipped(v) if flip else v for v, flip in zip(self.verdicts, flips, strict=True))
        return replace(self, verdicts=verdicts)


def _flipped(verdict: Verdict) -> Verdict:
    return replace(verdict, reward=verdict.reward + (-1.0 if verdict.correct else 1.0))


def join(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Several batches as one, in order."""
    if len(batches) == 1:
        return batches[0]
    regions = [batch.sequences.regions for batch in batches if batch.sequences.regions is not None]
    sequences = Sequences(
        prompts=tuple(prompt for batch in batches for prompt in batch.sequences.prompts),
        tokens=np.concatenate([batch.sequences.tokens for batch in batches]),
        starts=starts_of(np.concatenate([batch.sequences.lengths for batch in batches])),
        temperature=batches[0].sequences.temperature,
        regions=joined_regions(regions) if len(regions) == len(batches) else None,
    )
    versions = [batch.token_versions for batch in batches if batch.token_versions is not None]
    entropies = [batch.engine_entropies for batch in batches if batch.engine_entropies is not None]
    return RolloutBatch(
        problems=tuple(problem for batch in batches for problem in batch.problems),
        sequences=sequences,
        texts=tuple(text for batch in batches for text in batch.texts),
        verdicts=tuple(verdict for batch in batches for verdict in batch.verdicts),
        truncated=np.concatenate([batch.truncated for batch in batches]),
        engine_logprobs=np.concatenate([batch.engine_logprobs for batch in batches]),
        version=min(batch.version for batch in batches),
        token_versions=np.concatenate(versions) if len(versions) == len(batches) else None,
        engine_entropies=np.concatenate(entropies) if len(entropies) == len(batches) else None,
        features=_joined_features(batches),
        draws=sum(batch.draws for batch in batches),
        episodes=None if regions == [] else tuple(each for batch in batches for each in batch.episodes or ()),
        pass_rates=tuple(measured for batch in batches for measured in batch.pass_rates),
        environment_wait=sum(batch.environment_wait for batch in batches),
    )


def _joined_features(batches: Sequence[RolloutBatch]) -> LocalFeatures | None:
    known = [(batch, batch.features) for batch in batches if batch.features is not None]
    if len(known) < len(batches):
        return None
    before = np.cumsum([0, *(len(batch.sequences) for batch, _ in known)])
    counts = [int(batch.sequences.lengths[local.rows].sum()) for batch, local in known]
    rows = [first + local.rows for first, (_, local) in zip(before[:-1], known, strict=True)]
    return LocalFeatures(np.concatenate(rows), JoinedFeatures([local.features for _, local in known], counts))
