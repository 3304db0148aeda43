"""What there is to do in a step: counted against a real model and against simulations."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from delta_cli.assets.random_model import write_qwen3
from delta_cli.doctor.model_shape import ModelShape, shape_of
from delta_cli.doctor.workload import (
    Workload,
    attention_flops,
    decode_steps,
    head_flops,
    score_flops,
    trunk_flops,
    update_flops,
)

TINY = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocabulary=50)


@pytest.mark.parametrize("tokens", [7, 32])
def test_flops_are_those_that_torch_counts_in_a_model(tokens: int, tmp_path: Path) -> None:
    """Forward and backward of a Qwen3 with plain attention, which computes all pairs and not half of them."""
    torch = pytest.importorskip("torch", reason="its counter is the oracle")
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    from torch.utils.flop_counter import FlopCounterMode

    write_qwen3(
        tmp_path, vocab_size=50, hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, intermediate=24, tie=False
    )
    assert replace(shape_of(str(tmp_path))[0], counted=None) == TINY  # which counts norms too
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.ones(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(ids).logits
    layers, head = trunk_flops(TINY, tokens) + attention_flops(TINY, tokens**2), head_flops(TINY, tokens)
    assert forward.get_total_flops() == layers + head
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == 2 * (layers + head)


def test_flops_of_scoring_and_updating_are_sums_of_those() -> None:
    work = Workload(groups=3, samples=2, prompt=5, mean=10, longest=10)  # all of one length: 3 × (5 + 2 × 10) tokens
    pairs = 3 * (5 * 5 / 2 + 2 * (10 * 5 + 10 * 10 / 2))
    assert (work.packed, work.drawn, work.pairs) == (75, 60, pairs)
    trunk, attention, head = trunk_flops(TINY, 75), attention_flops(TINY, pairs), head_flops(TINY, 60)
    assert score_flops(TINY, work) == trunk + attention + head
    assert score_flops(TINY, work, head_products=2) == trunk + attention + 2 * head
    for recompute, frozen, layers, maps, heads in [
        (False, False, 3, 3, 4),
        (True, False, 4, 4, 4),
        (False, True, 2, 3, 2),
        (True, True, 3, 4, 2),
    ]:
        found = update_flops(TINY, work, recompute=recompute, frozen=frozen)
        assert found == layers * trunk + maps * attention + heads * head


def test_pairs_and_context_of_exponential_lengths() -> None:
    """Against lengths that were drawn: token t of a response sees the prompt and the t before it."""
    lengths = np.random.default_rng(0).exponential(50, 200_000)
    work = Workload(groups=1, samples=len(lengths), prompt=20, mean=50, longest=10**6)
    counted = sum(20 * n + n * n / 2 for n in lengths)
    assert work.pairs - 200 == pytest.approx(counted, rel=0.02)
    assert work.context == pytest.approx(counted / lengths.sum(), rel=0.02)
    assert Workload(1, 4, 20, mean=50, longest=50).context == 20 + 25, "of one length: half of it on average"


@pytest.mark.parametrize(("rows", "slots"), [(64, 64), (512, 64), (2000, 50), (30, 64)])
def test_steps_of_slots_against_a_simulation(rows: int, slots: int) -> None:
    """Waiting responses enter as others finish, first come first served; the mean of twenty orders."""
    rng, found = np.random.default_rng(1), []
    for _ in range(20):
        lengths = np.minimum(np.ceil(rng.exponential(100, rows)), 400)
        lengths[rng.integers(rows)] = 400  # one reaches the limit
        free = [0.0] * slots
        for length in lengths:
            heapq.heappush(free, heapq.heappop(free) + length)
        found.append((max(free), lengths.mean()))
    steps, mean = np.mean(found, axis=0)
    assert decode_steps(Workload(1, rows, 0, mean, 400), slots) == pytest.approx(steps, rel=0.12)


def test_steps_of_equal_responses_are_rounds() -> None:
    assert decode_steps(Workload(1, 8, 5, mean=10, longest=10), slots=4) == 20
    assert decode_steps(Workload(1, 8, 5, mean=10, longest=10), slots=8) == 10
