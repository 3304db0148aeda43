"""From rewards to advantages: how good a response is among those of its own prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles, Ids


AdvantageKind = Literal["group_normalised", "mean_removed", "leave_one_out"]
ADVANTAGES: tuple[str, ...] = get_args(AdvantageKind)

_STD_FLOOR = 1e-6


def group_advantages(rewards: ArrayLike, groups: ArrayLike, kind: AdvantageKind = "group_normalised") -> Doubles:
    """Advantages [R] of responses with ``rewards`` [R] that belong to ``groups`` [R] (any integers).

    ``group_normalised``: (reward − mean) / (std + 1e-6), std unbiased; ``mean_removed``:
    reward − mean; ``leave_one_out``: n/(n−1)·(reward − mean), the reward less the mean of the
    others. A group of one has mean 0 and std 1 (method, section 3), and no others to compare with:
    its advantage is its reward. Raises ValueError for shapes that differ or an unknown kind.
    """
    rewards = np.asarray(rewards, np.float64)
    groups = np.asarray(groups)
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards and groups must both be [R]; got {list(rewards.shape)} and {list(groups.shape)}")
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage '{kind}' does not exist; choose one of {', '.join(ADVANTAGES)}")
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    alone = sizes == 1
    means = np.where(alone, 0.0, np.bincount(index, rewards, len(sizes)) / sizes)
    centred = np.where(_all_equal(rewards, index, len(sizes)), 0.0, rewards - means[index])
    if kind == "mean_removed":
        return centred
    if kind == "leave_one_out":
        return centred * np.where(alone, 1.0, sizes / np.maximum(sizes - 1, 1))[index]
    variance = np.bincount(index, centred**2, len(sizes)) / np.maximum(sizes - 1, 1)
    stds = np.where(alone, 1.0, np.sqrt(variance))
    return centred / (stds + _STD_FLOOR)[index]


def _all_equal(rewards: Doubles, index: Ids, groups: int) -> Bools:
    """Whether all rewards of a response's group (of two or more) are equal, [R].

    Their mean may differ from them by rounding, which division by the floor of the standard deviation would turn into
    an advantage.
    """
    lowest, highest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(lowest, index, rewards)
    np.maximum.at(highest, index, rewards)
    alike: NDArray[np.bool] = (lowest == highest) & (np.bincount(index, minlength=groups) > 1)
    return alike[index]


def check_layout(advantages: ArrayLike, starts: ArrayLike) -> tuple[Doubles, Ids]:
    """Advantages [R] and starts [R+1] as matching arrays; raises ValueError if they do not match."""
    advantages = np.asarray(advantages, np.float64)
    starts = np.asarray(starts, np.int64)
    if advantages.ndim != 1 or starts.shape != (len(advantages) + 1,):
        raise ValueError(
            f"advantages must be [R] and starts [R+1]; got {list(advantages.shape)} and {list(starts.shape)}"
        )
    if starts[0] != 0 or np.any(np.diff(starts) < 0):
        raise ValueError("starts must begin with 0 and never fall")
    if not np.all(np.isfinite(advantages)):
        raise ValueError(f"advantage of response {np.argmin(np.isfinite(advantages))} is not a finite number")
    return advantages, starts
