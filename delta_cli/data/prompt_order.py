"""Which problems each training step sees, as a function of seed and step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delta_cli.data.problem import Problem


def batch(problems: Sequence[Problem], step: int, batch_size: int, seed: int) -> list[Problem]:
    """The ``batch_size`` problems of a step, counted from 0.

    Steps walk through shuffled epochs without a gap: each problem comes once an epoch, and one batch may span two
    epochs. A resumed run needs only the step to continue exactly.
    """
    if not problems:
        raise ValueError("no problems to draw from")
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places = np.divmod(positions, len(problems))
    orders = {int(e): np.random.default_rng([seed, int(e)]).permutation(len(problems)) for e in np.unique(epochs)}
    return [problems[orders[int(e)][place]] for e, place in zip(epochs, places, strict=True)]
