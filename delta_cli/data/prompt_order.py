"""Which problems each training step sees, as a function of seed, step and the pass rates measured before it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from backends.arrays import Doubles
from delta_cli.data.problem import Problem

BLOCK = 1000  # prompts in which each source has its exact share

Places = NDArray[np.int64]  # of problems among all
PassRate = tuple[int, float]  # the place of a problem, and the share of its latest responses that were right


class PromptOrder:
    """The order of a run's prompts. A resumed run needs only the step and the pass rates to continue exactly.

    Each source is walked through in shuffled epochs without a gap: each of its problems comes once in its epoch. With
    ``weights`` by the name of the source, each source has its share of every BLOCK prompts, rounded to whole prompts
    and at least one, in shuffled order; without, the problems are one source.

    ``exploration`` below 1 is a curriculum. Only this share of each source's prompts walks through its epochs. The
    others are drawn without replacement with probabilities in proportion to p · (1 − p), where p is the problem's
    latest pass rate: the variance of its reward, largest at 1/2. A problem without a pass rate counts as p = 1/2.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        weights: Mapping[str, float] | None = None,
        exploration: float = 1.0,
    ) -> None:
        if not problems:
            raise ValueError("no problems to draw from")
        self._problems, self._seed, self._exploration = problems, seed, exploration
        self._sources: list[Places] = [np.arange(len(problems))]
        self._quotas: Places = np.array([BLOCK])
        if weights:
            names = np.array([problem.source for problem in problems])
            self._sources = [np.flatnonzero(names == name) for name in weights]
            if empty := [name for name, found in zip(weights, self._sources, strict=True) if not len(found)]:
                raise ValueError(f"no problems of source {empty[0]}")
            self._quotas = _quotas(np.array(list(weights.values())))
        # [P] NaN: not measured
        self.pass_rates: Doubles = np.array([problem.pass_rate for problem in problems], np.float64)

    def after(self, measured: Iterable[PassRate]) -> PromptOrder:
        """The order with these pass rates added; a later rate of the same problem wins."""
        found = copy.copy(self)
        found.pass_rates = self.pass_rates.copy()
        for place, rate in measured:
            found.pass_rates[place] = rate
        return found

    def batch(self, step: int, size: int) -> list[Problem]:
        """The ``size`` problems of a step, counted from 0. One batch may span two epochs."""
        return [self._problems[place] for place in self.places(step, size)]

    def places(self, step: int, size: int) -> Places:
        """The places of the step's problems, [size]."""
        sources, indices = self._shares(np.arange(step * size, (step + 1) * size))
        walked = np.floor(indices * self._exploration).astype(np.int64)
        explores = np.floor((indices + 1) * self._exploration) > walked
        found = np.full(size, -1)
        for source in np.unique(sources):
            own = (sources == source) & explores
            found[own] = self._walk(source, walked[own])
        for source in np.unique(sources[~explores]):
            own = (sources == source) & ~explores
            found[own] = self._most_learnable(source, step, int(own.sum()), found)
        return found

    def _shares(self, positions: Places) -> tuple[Places, Places]:
        """The source of each prompt of the run, and how many prompts of that source come before it."""
        if len(self._sources) == 1:
            return np.zeros(len(positions), np.int64), positions
        found, before = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(positions // BLOCK):
            here = positions // BLOCK == block
            sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
            sources = np.random.default_rng([self._seed, int(block), 1]).permutation(sources)
            seen = np.cumsum(sources[:, None] == np.arange(len(self._quotas)), axis=0)  # [BLOCK, sources]
            place = positions[here] % BLOCK
            found[here] = sources[place]
            before[here] = block * self._quotas[found[here]] + seen[place, found[here]] - 1
        return found, before

    def _walk(self, source: int, positions: Places) -> Places:
        """The problems at ``positions`` of a source's epochs."""
        places = self._sources[source]
        epochs, within = np.divmod(positions, len(places))
        key = [self._seed] if len(self._sources) == 1 else [self._seed, int(source)]
        orders = {int(e): np.random.default_rng([*key, int(e)]).permutation(len(places)) for e in np.unique(epochs)}
        return places[[orders[int(e)][place] for e, place in zip(epochs, within, strict=True)]]

    def _most_learnable(self, source: int, step: int, count: int, taken: Places) -> Places:
        """``count`` problems of a source outside ``taken``, drawn in proportion to p · (1 − p).

        Each waits for an exponential time at this rate, and the first ones win (Efraimidis and Spirakis, 2006).
        Problems that are always or never solved fill what is left.
        """
        places = np.setdiff1d(self._sources[source], taken)
        if len(places) < count:
            places = self._sources[source]
        times = np.random.default_rng([self._seed, step, 2, int(source)]).exponential(size=len(places))
        waits = times / np.maximum(learnability(self.pass_rates[places]), 1e-300)
        return np.resize(places[np.argsort(waits, kind="stable")], count)


def learnability(pass_rates: Doubles) -> Doubles:
    """p · (1 − p), the variance of a reward of 0 or 1; that of 1/2 if nothing is measured."""
    found: Doubles = np.where(np.isnan(pass_rates), 0.25, pass_rates * (1 - pass_rates))
    return found


def batch(problems: Sequence[Problem], step: int, batch_size: int, seed: int) -> list[Problem]:
    """The ``batch_size`` problems of a step, counted from 0, of a single source."""
    return PromptOrder(problems, seed).batch(step, batch_size)


def _quotas(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Prompts of each source in a block: the shares rounded by largest remainder, each at least 1."""
    exact = weights / weights.sum() * BLOCK
    quotas: NDArray[np.int64] = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (missing := BLOCK - int(quotas.sum())) != 0:
        quotas[np.argmax((exact - quotas) * np.sign(missing))] += np.sign(missing)
    return quotas
