"""The counts that the GPU plan is made of are those of the present code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from delta_cli.doctor import assumptions

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import count_8b
import count_layers


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


def test_only_what_a_kernel_moves_is_counted() -> None:
    """Two sums of four float32 each, and the same tensor asked for its device and shape."""
    with FakeTensorMode(), count_layers._Count() as count:
        tensor = torch.empty(4)
        _ = ((tensor + tensor).reshape(2, 2) + 1).device
    assert count.bytes == 4 * 4 * (3 + 2)


def test_squares_are_padded_to_common_widths() -> None:
    """By hand, with a prompt of 150: 350 keys are no square, 1,124 of them are one of 1,536."""
    assert count_8b.square_padding(np.array([200])) == pytest.approx(350**2 / (350**2 - 150**2))
    assert count_8b.square_padding(np.array([974])) == pytest.approx(1536**2 / (1124**2 - 150**2))


@pytest.mark.long
def test_the_work_of_a_layer() -> None:
    """Products by hand; a layer in bfloat16 reads and writes its matrices' inputs and outputs outside products too."""
    found = count_layers.layer_work()
    matrices = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288
    for phases in found.values():
        assert phases["scoring"].flops == pytest.approx(2 * matrices, rel=1e-6)
        # The backward pass takes two products, and recomputing all but the last matrix, which nothing needs.
        assert phases["update"].flops == pytest.approx(2 * (4 * matrices - 4096 * 12288), rel=1e-6)
    half, full = (found[way]["scoring"].bytes for way in ("bfloat16", "autocast"))
    # Two norms and two sums of the residual stream, the feed-forward's activation and product; the rest is attention's.
    least = 2 * (2 * 2 * 4096 + 2 * 3 * 4096 + 2 * 12288 + 3 * 12288)
    assert least < half < 2 * least
    assert full > 2 * half
