"""The counts that the GPU plan is made of are those of the present code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from delta_cli.doctor import assumptions

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import count_8b


def test_the_doctor_assumes_the_counted_kernels() -> None:
    """To a tenth, because torch's versions differ in what is one kernel."""
    counted = count_8b.kernels()
    layer, beside = assumptions.DECODE_KERNELS
    assert counted["layer"] == pytest.approx(layer, rel=0.1)
    assert counted["beside"] == pytest.approx(beside, rel=0.1)


def test_the_simulated_drawing_against_arithmetic() -> None:
    """Equal responses in two rounds; and a pool that holds one and a half of them, whose second one waits."""
    lengths = np.full(4, 80.0)
    found = count_8b.simulate(lengths, lambda held: 0.01 * len(held), lambda held: len(held) <= 2)
    assert (found.steps, found.rows, found.preemptions) == (160, 2, 0)
    assert found.seconds == pytest.approx(160 * 0.02)
    assert found.tokens_per_second == pytest.approx(320 / 3.2)
    pool = 1.5 * (assumptions.MEAN_PROMPT + 80 + 8)
    crowded = count_8b.simulate(lengths, lambda held: 0.01, lambda held: held.sum() <= pool + 512 * (len(held) > 1))
    assert crowded.steps >= 160
