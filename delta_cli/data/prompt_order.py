"""Which problems each training step sees, as a function of seed and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from delta_cli.data.problem import Problem

BLOCK = 1000  # prompts in which each source has its exact share


class PromptOrder:
    """The order of a run's prompts. A resumed run needs only the step to continue exactly.

    Each source is walked through in shuffled epochs without a gap: each of its problems comes once in its epoch. With
    ``weights`` by the name of the source, each source has its share of every BLOCK prompts, rounded to whole prompts
    and at least one, in shuffled order; without, the problems are one source.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, weights: Mapping[str, float] | None = None) -> None:
        if not problems:
            raise ValueError("no problems to draw from")
        self._seed = seed
        self._sources = [problems]
        self._quotas: NDArray[np.int64] = np.array([BLOCK])
        if weights:
            self._sources = [[each for each in problems if each.source == name] for name in weights]
            if empty := [name for name, found in zip(weights, self._sources, strict=True) if not found]:
                raise ValueError(f"no problems of source {empty[0]}")
            self._quotas = _quotas(np.array(list(weights.values())))

    def batch(self, step: int, size: int) -> list[Problem]:
        """The ``size`` problems of a step, counted from 0. One batch may span two epochs."""
        positions = np.arange(step * size, (step + 1) * size)
        if len(self._sources) == 1:
            return self._walk(0, positions)
        found: list[Problem] = []
        for block in np.unique(positions // BLOCK):
            sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
            sources = np.random.default_rng([self._seed, int(block), 1]).permutation(sources)
            for position in positions[positions // BLOCK == block]:
                source = sources[position % BLOCK]
                before = int(np.sum(sources[: position % BLOCK] == source))
                found += self._walk(source, np.array([block * self._quotas[source] + before]))
        return found

    def _walk(self, source: int, positions: NDArray[np.int64]) -> list[Problem]:
        """The problems at ``positions`` of a source's epochs."""
        problems = self._sources[source]
        epochs, places = np.divmod(positions, len(problems))
        key = [self._seed] if len(self._sources) == 1 else [self._seed, int(source)]
        orders = {int(e): np.random.default_rng([*key, int(e)]).permutation(len(problems)) for e in np.unique(epochs)}
        return [problems[orders[int(e)][place]] for e, place in zip(epochs, places, strict=True)]


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
