"""Sampling and grading at the same time: each response goes to the grader as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from backends.arrays import Ids
from backends.collective import SOLO, any_of
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
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, opened_think, render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import StopRequested
from delta_cli.rewards.grader import Verdict
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.rollout.batch import LocalFeatures, RolloutBatch

Item = TypeVar("Item")
STOP_CHECK_SECONDS = 0.5  # between two checks for a stop request while verdicts are awaited
OnSampled = Callable[[int, int], None]  # responses and tokens completed so far


@dataclass(frozen=True)
class PendingRollout:
    """Sampled responses whose last verdicts are still being decided; holds this rank's r of all R responses."""

    problems: tuple[Problem, ...]  # P, of all ranks
    prompts: tuple[Ids, ...]  # P, of all ranks
    sampling: Sampling
    rows: Ids  # [r] positions of this rank's responses among all R
    completions: Completions  # r
    texts: tuple[str, ...]  # r
    verdicts: tuple[Future[Verdict], ...]  # r
    ranks: Collective
    interrupt: Callable[[], None] = lambda: None

    def result(self) -> RolloutBatch:
        """Wait for the verdicts and exchange responses with the other ranks.

        Raises StopRequested on every rank if any rank is asked to stop meanwhile.
        """
        verdicts = on_all_ranks(self.ranks, lambda: tuple(map(self._await, self.verdicts)))
        completions, texts = self.completions, self.texts
        if self.ranks.size > 1:
            completions, texts, verdicts = self._exchange(verdicts)
        return RolloutBatch(
            problems=self.problems,
            sequences=Sequences(
                prompts=tuple(prompt for prompt in self.prompts for _ in range(self.sampling.samples)),
                tokens=completions.tokens,
                starts=completions.starts,
                temperature=self.sampling.temperature,
            ),
            texts=texts,
            verdicts=verdicts,
            truncated=completions.truncated,
            engine_logprobs=completions.logprobs,
            version=completions.version,
            engine_entropies=completions.entropies,
            features=None if completions.features is None else LocalFeatures(self.rows, completions.features),
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
        last = slice(None if self.max_prompt_tokens is None else -self.max_prompt_tokens, None)
        prompts = tuple(encode_prompt(problem, self.template, self.tokenizer)[last] for problem in problems)
        samples = sampling.samples
        mine = range(self.ranks.rank, len(problems), self.ranks.size)  # interleaved: similar problems often adjoin
        rows = (np.array(mine)[:, None] * samples + np.arange(samples)).ravel().astype(np.int64)
        think_tags = [opened_think(render(self.template, problems[place].question, self.tokenizer)) for place in mine]
        texts: dict[int, str] = {}
        verdicts: dict[int, Future[Verdict]] = {}
        tokens_sampled = 0

        def grade(place: int, tokens: Ids) -> None:
            nonlocal tokens_sampled
            problem, count = problems[mine[place // samples]], len(tokens)
            ended = sampling.ends(tokens)
            text = self.tokenizer.decode(tokens)
            texts[place] = think_tags[place // samples] + (before_stop(text, sampling) if ended else text)
            verdicts[place] = self.grader.submit(texts[place], problem, count, truncated=not ended)
            tokens_sampled += count
            on_sampled(len(texts), tokens_sampled)
            interrupt()

        own_prompts = tuple(prompts[problem] for problem in mine)
        request = RolloutRequest(own_prompts, sampling, rows, interrupt, entropies, proxy)
        completions = on_all_ranks(self.ranks, lambda: self.sampler.rollout(request, grade))
        return PendingRollout(
            problems=tuple(problems),
            prompts=prompts,
            sampling=sampling,
            rows=rows,
            completions=completions,
            texts=tuple(texts[place] for place in range(len(rows))),
            verdicts=tuple(verdicts[place] for place in range(len(rows))),
            ranks=self.ranks,
            interrupt=interrupt,
        )


def before_stop(text: str, sampling: Sampling) -> str:
    """A response's text up to its first stop string, which is not part of the answer."""
    strings = () if sampling.stop is None else sampling.stop.strings
    return text[: min((place for place in map(text.find, strings) if place >= 0), default=len(text))]


def on_all_ranks(ranks: Collective, work: Callable[[], Item]) -> Item:
    """The result of ``work``; if it raises StopRequested on one rank, every rank raises it."""
    found = None
    try:
        found = work()
    except StopRequested:
        if ranks.size == 1:
            raise
    if any_of(ranks, found is None) or found is None:
        raise StopRequested
    return found


def _reordered(items: Sequence[Item], order: Ids) -> tuple[Item, ...]:
    return tuple(items[place] for place in order)
