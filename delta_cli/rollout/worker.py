"""Responses drawn from a policy, each handed to the grader while others are still growing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from backends.collective import SOLO, any_of
from backends.interface import Collective, Completions, Ids, Proxy, RolloutRequest, Sampler, Sampling, starts_of
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, opened_think, render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import StopRequested
from delta_cli.rewards.grader import Verdict
from delta_cli.rewards.weighted import WeightedReward

Item = TypeVar("Item")
PATIENCE = 0.5  # seconds between two looks whether somebody asked to stop
Progress = Callable[[int, int], None]  # responses and tokens that are complete


@dataclass(frozen=True)
class Responses:
    """``samples`` graded responses to each of P problems, prompt-major: R in all, those of every rank.

    Features alone, if any, are of the responses ``own`` that this rank has drawn.
    """

    prompts: tuple[Ids, ...]  # P
    completions: Completions
    texts: tuple[str, ...]  # R, each with the think tag that its prompt opened
    verdicts: tuple[Verdict, ...]  # R
    own: Ids  # ascending


@dataclass(frozen=True)
class Drawn:
    """Responses that this rank has drawn, whose last verdicts are still to come."""

    prompts: tuple[Ids, ...]  # P, of all ranks
    rows: Ids  # [r] of the responses of this rank among all R
    completions: Completions  # r
    texts: tuple[str, ...]  # r
    verdicts: tuple[Future[Verdict], ...]  # r
    collective: Collective
    interrupt: Callable[[], None] = lambda: None

    def result(self) -> Responses:
        """Wait for the verdicts, here and on the other ranks; StopRequested where any is asked to stop meanwhile."""
        verdicts = together(self.collective, lambda: tuple(map(self._awaited, self.verdicts)))
        if self.collective.size == 1:
            return Responses(self.prompts, self.completions, self.texts, verdicts, self.rows)
        told = replace(self.completions, features=None)
        parts = self.collective.gather((self.rows, told, self.texts, verdicts))
        lacking = any_of(self.collective, self.completions.features is None)
        order = np.argsort(np.concatenate([rows for rows, *_ in parts]))
        completions = _in_order([completions for _, completions, *_ in parts], order)
        return Responses(
            prompts=self.prompts,
            own=self.rows,
            completions=replace(completions, features=None if lacking else self.completions.features),
            texts=_chosen([text for _, _, texts, _ in parts for text in texts], order),
            verdicts=_chosen([verdict for *_, each in parts for verdict in each], order),
        )

    def _awaited(self, verdict: Future[Verdict]) -> Verdict:
        while not wait((verdict,), PATIENCE).done:
            self.interrupt()
        return verdict.result()


@dataclass(frozen=True)
class RolloutWorker:
    """Draws responses with one sampler, and hands each to a grader as soon as it is complete."""

    sampler: Sampler
    tokenizer: Tokenizer
    grader: WeightedReward
    template: str
    collective: Collective = SOLO
    prompt_tokens: int | None = None  # a longer prompt loses its beginning; None: none is too long

    def draw(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        on_progress: Progress = lambda responses, tokens: None,
        interrupt: Callable[[], None] = lambda: None,
        entropies: bool = False,
        proxy: Proxy | None = None,
    ) -> Drawn:
        """Draw ``sampling.samples`` responses to each problem, every rank those of some problems.

        ``interrupt`` is called every few tokens and after each response; the StopRequested that it may raise is
        raised on all ranks. ``entropies`` and features of a ``proxy`` are asked of the sampler where they are wanted.
        """
        last = slice(None if self.prompt_tokens is None else -self.prompt_tokens, None)
        prompts = tuple(encode_prompt(problem, self.template, self.tokenizer)[last] for problem in problems)
        rank, ranks, samples = self.collective.rank, self.collective.size, sampling.samples
        mine = range(rank, len(problems), ranks)  # like cards: prompts of a kind often come together
        rows = (np.array(mine)[:, None] * samples + np.arange(samples)).ravel().astype(np.int64)
        begun = [opened_think(render(self.template, problems[place].question, self.tokenizer)) for place in mine]
        texts: dict[int, str] = {}
        verdicts: dict[int, Future[Verdict]] = {}
        tokens_seen = 0

        def finished(place: int, tokens: Ids) -> None:
            nonlocal tokens_seen
            problem, count = problems[mine[place // samples]], len(tokens)
            ended = sampling.ends(tokens)
            text = self.tokenizer.decode(tokens)
            texts[place] = begun[place // samples] + (before_stop(text, sampling) if ended else text)
            truncated = not ended
            verdicts[place] = self.grader.submit(texts[place], problem, count, truncated)
            tokens_seen += count
            on_progress(len(texts), tokens_seen)
            interrupt()

        request = RolloutRequest(
            tuple(prompts[problem] for problem in mine), sampling, rows, interrupt, entropies, proxy
        )
        completions = together(self.collective, lambda: self.sampler.rollout(request, finished))
        places = range(len(rows))
        return Drawn(
            prompts=prompts,
            rows=rows,
            completions=completions,
            texts=tuple(texts[place] for place in places),
            verdicts=tuple(verdicts[place] for place in places),
            collective=self.collective,
            interrupt=interrupt,
        )


def before_stop(text: str, sampling: Sampling) -> str:
    """The text of a response up to its first stop string, which is no part of the answer."""
    strings = () if sampling.stop is None else sampling.stop.strings
    return text[: min((place for place in map(text.find, strings) if place >= 0), default=len(text))]


def together(collective: Collective, work: Callable[[], Item]) -> Item:
    """What ``work`` returns; where it raises StopRequested on one rank, it is raised on all."""
    found = None
    try:
        found = work()
    except StopRequested:
        if collective.size == 1:
            raise
    if any_of(collective, found is None) or found is None:
        raise StopRequested
    return found


def _in_order(parts: Sequence[Completions], order: Ids) -> Completions:
    """The completions of all ranks in one; ``order`` [R] says where each comes from."""
    starts = starts_of(np.concatenate([np.diff(part.starts) for part in parts]))
    tokens, logprobs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs"))
    spans = [slice(starts[place], starts[place + 1]) for place in order]
    entropies = None
    if all(part.entropies is not None for part in parts):
        every = np.concatenate([np.asarray(part.entropies) for part in parts])
        entropies = np.concatenate([every[span] for span in spans])
    return Completions(
        tokens=np.concatenate([tokens[span] for span in spans]),
        starts=starts_of(np.diff(starts)[order]),
        logprobs=np.concatenate([logprobs[span] for span in spans]),
        truncated=np.concatenate([part.truncated for part in parts])[order],
        version=min(part.version for part in parts),
        entropies=entropies,
    )


def _chosen(items: Sequence[Item], order: Ids) -> tuple[Item, ...]:
    return tuple(items[place] for place in order)
