"""Sampling and grading at the same time: each response goes to the grader as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np

from backends.arrays import Ids
from backends.collective import SOLO, SharedPrompts, any_of
from backends.interface import (
    Collective,
    Completions,
    Proxy,
    RolloutRequest,
    Sampler,
    Sampling,
    Sequences,
    starts_of,
    token_index,
)
from backends.regions import ResponseRegions, joined
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import CHAT, FIELD, encode_prompt, opened_think, render_problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.opened import Environments
from delta_cli.environments.verifiers_host import VerifiersHost
from delta_cli.environments.verifiers_trace import PlayedEpisode
from delta_cli.errors import StopRequested
from delta_cli.rewards.grader import GroupPlace, ResponseGroups, Verdict
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.rollout.batch import LocalFeatures, RolloutBatch
from delta_cli.rollout.episodes import Episode, EpisodeDriver, EpisodeRecords
from delta_cli.rollout.played_episodes import PlayedRollout

Item = TypeVar("Item")
STOP_CHECK_SECONDS = 0.5  # between two checks for a stop request while verdicts are awaited
OnSampled = Callable[[int, int], None]  # responses and tokens completed so far


@dataclass(frozen=True)
class PendingRollout:
    """Sampled responses whose last verdicts are still being decided; holds this rank's r of all R responses."""

    problems: tuple[Problem, ...]  # P, of all ranks
    prompts: tuple[Ids, ...]  # P, of all ranks; of episodes r, this rank's
    sampling: Sampling
    rows: Ids  # [r] positions of this rank's responses among all R
    completions: Completions  # r
    texts: tuple[str, ...]  # r
    verdicts: tuple[Future[Verdict], ...]  # r
    ranks: Collective
    interrupt: Callable[[], None] = lambda: None
    driver: EpisodeRecords | None = None  # of episodes

    def result(self) -> RolloutBatch:
        """Wait for the verdicts and exchange responses with the other ranks.

        Raises StopRequested on every rank if any rank is asked to stop meanwhile.
        """
        verdicts = on_all_ranks(self.ranks, lambda: tuple(map(self._await, self.verdicts)))
        completions, texts, driver = self.completions, self.texts, self.driver
        episodes = None if driver is None else tuple(driver.record(row) for row in range(len(self.rows)))
        prompts, wait = self.prompts, 0.0 if driver is None else driver.waited
        if driver is None:
            prompts = tuple(prompt for prompt in self.prompts for _ in range(self.sampling.samples))
        if self.ranks.size > 1:
            completions, texts, verdicts = self._exchange(verdicts)
            if episodes is not None:
                episodes, prompts, regions, wait = self._exchange_episodes(episodes)
                completions = replace(completions, regions=regions)
        return RolloutBatch(
            problems=self.problems,
            sequences=Sequences(
                prompts=prompts,
                tokens=completions.tokens,
                starts=completions.starts,
                temperature=self.sampling.temperature,
                regions=completions.regions,
            ),
            texts=texts,
            verdicts=verdicts,
            truncated=completions.truncated,
            engine_logprobs=completions.logprobs,
            version=completions.version,
            token_versions=completions.versions,
            engine_entropies=completions.entropies,
            features=None if completions.features is None else LocalFeatures(self.rows, completions.features),
            episodes=episodes,
            environment_wait=wait,
        )

    def _exchange_episodes(
        self, episodes: tuple[Episode, ...]
    ) -> tuple[tuple[Episode, ...], tuple[Ids, ...], ResponseRegions, float]:
        """Records, prompts and regions of all ranks in order, and the longest wait for environments."""
        regions, driver = self.completions.regions, self.driver
        assert regions is not None
        assert driver is not None
        parts = self.ranks.gather((self.rows, episodes, self.prompts, regions, driver.waited))
        order = np.argsort(np.concatenate([part[0] for part in parts]))
        prompts = _reordered([prompt for part in parts for prompt in part[2]], order)
        groups = {row: prompts[row - row % self.sampling.samples] for row in range(len(prompts))}
        shared = (np.array_equal(prompt, groups[row]) for row, prompt in enumerate(prompts))
        return (
            _reordered([episode for part in parts for episode in part[1]], order),
            tuple(groups[row] if same else prompts[row] for row, same in enumerate(shared)),
            joined([part[3] for part in parts]).select(order),
            max(part[4] for part in parts),
        )

    def _exchange(self, verdicts: tuple[Verdict, ...]) -> tuple[Completions, tuple[str, ...], tuple[Verdict, ...]]:
        """The responses of all ranks in order: numbers per token as one sum of arrays, the rest as objects."""
        own = self.completions
        has_entropies, has_features = own.entropies is not None, own.features is not None
        facts = (self.rows, np.diff(own.starts), own.truncated, self.texts, verdicts, own.version)
        parts = self.ranks.gather((facts, has_entropies, has_features))
        facts_of_ranks = [facts for facts, *_ in parts]
        order = np.argsort(np.concatenate([facts[0] for facts in facts_of_ranks]))
        starts = starts_of(np.concatenate([facts[1] for facts in facts_of_ranks])[order])
        index = token_index(starts, self.rows)
        columns = [own.tokens, own.logprobs, *([own.entropies] if all(each[1] for each in parts) else [])]
        values = np.zeros((len(columns), int(starts[-1])), np.float32)  # exact: ids are below 2**24
        for row, column in zip(values, columns, strict=True):
            row[index] = column
        values = self.ranks.sum(values)
        completions = Completions(
            tokens=values[0].astype(np.int64),
            starts=starts,
            logprobs=values[1],
            truncated=np.concatenate([facts[2] for facts in facts_of_ranks])[order],
            version=min(facts[5] for facts in facts_of_ranks),
            entropies=values[2] if len(values) > 2 else None,
            features=own.features if all(each[2] for each in parts) else None,
        )
        texts = _reordered([text for facts in facts_of_ranks for text in facts[3]], order)
        return completions, texts, _reordered([verdict for facts in facts_of_ranks for verdict in facts[4]], order)

    def _await(self, verdict: Future[Verdict]) -> Verdict:
        while not wait((verdict,), STOP_CHECK_SECONDS).done:
            self.interrupt()
        return verdict.result()


@dataclass(frozen=True)
class RolloutWorker:
    """Samples responses and hands each to the grader as soon as it is complete."""

    sampler: Sampler
    tokenizer: Tokenizer
    grader: WeightedReward
    template: str
    ranks: Collective = SOLO
    max_prompt_tokens: int | None = None  # a longer prompt loses its beginning; None: no limit
    environments: Environments | VerifiersHost | None = None  # of episodes of several turns
    prompt_queue: bool = False  # whether each rank takes the next prompt when it has room; else it has a fixed share

    def sample(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        on_sampled: OnSampled = lambda responses, tokens: None,
        interrupt: Callable[[], None] = lambda: None,
        entropies: bool = False,
        proxy: Proxy | None = None,
    ) -> PendingRollout:
        """Sample ``sampling.samples`` responses to each problem; each rank samples those to its share of problems.

        ``interrupt`` is called every few tokens and after each response; if it raises StopRequested on one rank,
        every rank raises it. ``entropies`` and ``proxy`` ask the sampler to keep entropies and features.
        """
        if isinstance(self.environments, VerifiersHost):
            return self._sample_played(self.environments, problems, sampling, on_sampled, interrupt)
        if self.environments is not None:
            return self._sample_episodes(problems, sampling, on_sampled, interrupt, entropies, proxy)
        prompts = tuple(map(self._encoded, problems))
        samples = sampling.samples
        tickets = self.ranks.tickets() if self.prompt_queue else None
        queue = SharedPrompts(tickets, self.ranks, len(problems)) if tickets is not None else None
        mine, rows = self._share(len(problems), samples)
        drawn = range(len(problems)) if queue is not None else mine  # the prompts of the request
        groups = ResponseGroups(samples)
        texts: dict[int, str] = {}
        verdicts: dict[int, Future[Verdict]] = {}
        tokens_sampled = 0

        @cache
        def think_tag(prompt: int) -> str:
            return opened_think(render_problem(self.template, problems[drawn[prompt]], self.tokenizer))

        def grade(place: int, tokens: Ids) -> None:
            nonlocal tokens_sampled
            problem, count = problems[drawn[place // samples]], len(tokens)
            ended = sampling.ends(tokens)
            text = self.tokenizer.decode(tokens)
            texts[place] = think_tag(place // samples) + (sampling.before_stop(text) if ended else text)
            where = GroupPlace(groups, *divmod(place, samples))
            verdicts[place] = self.grader.submit(texts[place], problem, count, not ended, place=where)
            tokens_sampled += count
            on_sampled(len(texts), tokens_sampled)
            interrupt()

        own_prompts = tuple(prompts[problem] for problem in drawn)
        request = RolloutRequest(
            own_prompts, sampling, None if queue else rows, interrupt, entropies, proxy, queue=queue
        )
        stop = queue.close if queue is not None else lambda: None
        completions = on_all_ranks(self.ranks, lambda: self.sampler.rollout(request, grade), stop)
        if queue is not None:
            rows = _rows_of(sorted(queue.taken), samples)
        return PendingRollout(
            problems=tuple(problems),
            prompts=prompts,
            sampling=sampling,
            rows=rows,
            completions=completions,
            texts=tuple(texts[place] for place in sorted(texts)),
            verdicts=tuple(verdicts[place] for place in sorted(verdicts)),
            ranks=self.ranks,
            interrupt=interrupt,
        )

    def _sample_episodes(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        on_sampled: OnSampled,
        interrupt: Callable[[], None],
        entropies: bool,
        proxy: Proxy | None,
    ) -> PendingRollout:
        """As ``sample``; each response is an episode with an environment of its own."""
        assert isinstance(self.environments, Environments)
        mine, rows = self._share(len(problems), sampling.samples)
        if (dialogue := self.environments.dialogue) is not None:
            sampling = replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *dialogue.stop_ids))))
        of_row = [problems[place] for place in mine for _ in range(sampling.samples)]
        driver = EpisodeDriver(self.environments, self.tokenizer, sampling, of_row)
        groups = ResponseGroups(sampling.samples)
        texts: dict[int, str] = {}
        verdicts: dict[int, Future[Verdict]] = {}
        tokens_sampled = 0

        def grade(row: int, region: Ids) -> None:
            nonlocal tokens_sampled

            def submit(text: str, own: int, truncated: bool, earned: float | None) -> Future[Verdict]:
                where = GroupPlace(groups, *divmod(row, sampling.samples))
                return self.grader.submit(text, of_row[row], own, truncated, earned, where)

            texts[row] = driver.text(row, region)
            verdicts[row] = driver.finish(row, region, texts[row], submit)
            tokens_sampled += len(region)
            on_sampled(len(texts), tokens_sampled)
            interrupt()

        def work() -> Completions:
            greeted = zip(of_row, driver.begin(), strict=True)
            prompts = _shared([self._encoded(_greeted(problem, text)) for problem, text in greeted], sampling.samples)
            driver.set_prompts(prompts)
            alike = all(prompt is prompts[row - row % sampling.samples] for row, prompt in enumerate(prompts))
            asked, way = prompts, replace(sampling, samples=1)
            if alike:
                asked, way = prompts[:: sampling.samples], sampling
            return self.sampler.rollout(RolloutRequest(asked, way, rows, interrupt, entropies, proxy, driver), grade)

        try:
            completions = on_all_ranks(self.ranks, work)
        except BaseException:
            driver.close(now=True)
            raise
        driver.close()
        return PendingRollout(
            problems=tuple(problems),
            prompts=driver.prompts,
            sampling=sampling,
            rows=rows,
            completions=completions,
            texts=tuple(texts[row] for row in range(len(rows))),
            verdicts=tuple(verdicts[row] for row in range(len(rows))),
            ranks=self.ranks,
            interrupt=interrupt,
            driver=driver,
        )

    def _sample_played(
        self,
        host: VerifiersHost,
        problems: Sequence[Problem],
        sampling: Sampling,
        on_sampled: OnSampled,
        interrupt: Callable[[], None],
    ) -> PendingRollout:
        """As ``sample``; each response is an episode that its environment drives itself."""
        mine, rows = self._share(len(problems), sampling.samples)
        of_row = [problems[place] for place in mine for _ in range(sampling.samples)]
        rollout = PlayedRollout(self.tokenizer, self.grader, of_row)

        def grade(row: int, episode: PlayedEpisode) -> None:
            rollout.grade(row, episode)
            on_sampled(len(rollout.texts), rollout.tokens)
            interrupt()

        found = on_all_ranks(self.ranks, lambda: host.play(of_row, rows, sampling, self.sampler, interrupt, grade))
        failures = self.ranks.gather([episode.failure for episode in found])
        host.refuse_if_all_failed([failure for part in failures for failure in part])
        rollout.waited = host.waited
        return PendingRollout(
            problems=tuple(problems),
            prompts=_shared(rollout.prompts, sampling.samples),
            sampling=sampling,
            rows=rows,
            completions=rollout.completions(self.sampler.version),
            texts=tuple(rollout.texts[row] for row in range(len(rows))),
            verdicts=tuple(rollout.verdicts[row] for row in range(len(rows))),
            ranks=self.ranks,
            interrupt=interrupt,
            driver=rollout,
        )

    def _encoded(self, problem: Problem) -> Ids:
        """The prompt's ids, without the beginning of one that is too long."""
        if self.environments is not None and self.environments.dialogue is not None:
            return self.environments.dialogue.prompt(CHAT[self.template].replace(FIELD, problem.question))
        last = slice(None if self.max_prompt_tokens is None else -self.max_prompt_tokens, None)
        return encode_prompt(problem, self.template, self.tokenizer)[last]

    def _share(self, problems: int, samples: int) -> tuple[range, Ids]:
        """The problems that this rank samples responses to, and the rows of these."""
        mine = range(self.ranks.rank, problems, self.ranks.size)  # interleaved: similar problems often adjoin
        return mine, _rows_of(mine, samples)


def _rows_of(groups: Sequence[int], samples: int) -> Ids:
    """The rows of the responses to some prompts."""
    return (np.array(groups, np.int64)[:, None] * samples + np.arange(samples)).ravel()


def _greeted(problem: Problem, text: str) -> Problem:
    """The problem with what its environment says first after its question."""
    return replace(problem, question=problem.question + text) if text else problem


def _shared(prompts: Sequence[Ids], samples: int) -> tuple[Ids, ...]:
    """The prompts, with one array for the equal ones of a group, so that they are computed once."""
    firsts = [prompts[row - row % samples] for row in range(len(prompts))]
    return tuple(
        first if np.array_equal(prompt, first) else prompt for prompt, first in zip(prompts, firsts, strict=True)
    )


def on_all_ranks(ranks: Collective, work: Callable[[], Item], stop: Callable[[], None] = lambda: None) -> Item:
    """The result of ``work``; if it raises StopRequested on one rank, every rank raises it.

    The rank that raises it first calls ``stop``.
    """
    found = None
    try:
        found = work()
    except StopRequested:
        if ranks.size == 1:
            raise
        stop()
    if any_of(ranks, found is None) or found is None:
        raise StopRequested
    return found


def _reordered(items: Sequence[Item], order: Ids) -> tuple[Item, ...]:
    return tuple(items[place] for place in order)
