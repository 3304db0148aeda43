"""Episodes that their environments have driven themselves, as a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from backends.arrays import Ids
from backends.interface import Completions
from backends.regions import ResponseRegions
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.verifiers_trace import PlayedEpisode
from delta_cli.rewards.grader import Verdict
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.rollout.episodes import Episode


class PlayedRollout:
    """Grades the episodes of ``problems`` [R] as they end, and joins them; see ``episodes.EpisodeRecords``."""

    def __init__(self, tokenizer: Tokenizer, grader: WeightedReward, problems: Sequence[Problem]) -> None:
        self._tokenizer, self._grader, self._problems = tokenizer, grader, problems
        self.waited = 0.0  # seconds in which the sampler had nothing to do
        self.episodes: dict[int, PlayedEpisode] = {}
        self.texts: dict[int, str] = {}
        self.verdicts: dict[int, Future[Verdict]] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens after the prompts so far."""
        return sum(len(episode.region) for episode in self.episodes.values())

    def grade(self, row: int, episode: PlayedEpisode) -> None:
        """Grade the last turn of an episode; one that failed gets no reward but its failure."""
        self.episodes[row] = episode
        self.texts[row] = text = self._tokenizer.decode(episode.last_turn)
        if episode.failure is not None:
            self.verdicts[row] = Future()
            self.verdicts[row].set_result(Verdict(0.0, False, f"environment: {episode.failure}"))
            return
        own, truncated = int(episode.own.sum()), episode.ended == "tokens"
        self.verdicts[row] = self._grader.submit(text, self._problems[row], own, truncated, episode.reward)

    @property
    def prompts(self) -> list[Ids]:
        """The prompt of each episode; that of one without tokens is its question."""
        return [self._prompt(row) for row in range(len(self._problems))]

    def _prompt(self, row: int) -> Ids:
        found = self.episodes[row].prompt
        if not len(found):
            found = self._tokenizer.encode(self._problems[row].question)
        return found if len(found) else np.array([self._tokenizer.pad_id], dtype=np.int64)

    def completions(self, version: int) -> Completions:
        """The tokens of all episodes, drawn from weights of this version."""
        episodes = [self.episodes[row] for row in range(len(self._problems))]
        regions = ResponseRegions.of([each.region for each in episodes], [each.own for each in episodes])
        return Completions(
            tokens=regions.own_tokens,
            starts=regions.own_starts,
            logprobs=np.concatenate([np.zeros(0, np.float32), *(each.logprobs for each in episodes)]),
            truncated=np.array([each.ended == "tokens" for each in episodes], dtype=bool),
            version=version,
            regions=regions,
        )

    def record(self, row: int) -> Episode:
        """How an episode went."""
        episode = self.episodes[row]
        return Episode(
            turns=episode.turns,
            calls=episode.calls,
            errors=0,
            cut=0,
            observation_tokens=int((~episode.own).sum()),
            seconds=episode.seconds,
            ended=episode.ended,
            reward=episode.reward,
            failure=episode.failure,
        )
