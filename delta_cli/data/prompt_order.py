"""The order of training: which problems a step sees, as a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delta_cli.data.problem import Problem


def batch(problems: Sequence[Problem], step: int, batch_size: int, seed: int) -> list[Problem]:
    """The ``batch_size`` problems of a step, counted from 0.

    The steps walk through one shuffled epoch after the other without a gap: each problem comes once
    an epoch, and a batch may hold the end of one epoch and the beginning of the next. A resumed run
    needs nothing but the step to go on exactly.
    """
    if not problems:
        raise ValueError("no problems to draw from")
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places = np.divmod(positions, len(problems))
    orders = {int(e): np.random.default_rng([seed, int(e)]).permutation(len(problems)) for e in np.unique(epochs)}
    return [problems[orders[int(e)][place]] for e, place in zip(epochs, places, strict=True)]
