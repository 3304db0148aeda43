"""Ranks compute what one process computes on the whole batch: three for every case, two and four for most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from . import cases

LOGPROB, COEFFICIENT, GRADIENT, WEIGHT = 2e-6, 1e-6, 1e-6, 2e-5
# After an update the float32 weights differ by rounding, and so do the log-probabilities.
LATER = 2e-5

GROUPS = [
    pytest.param((2, "short"), id="2-ranks"),
    pytest.param((2, "long"), marks=pytest.mark.long, id="2-ranks"),
    pytest.param((3, "all"), marks=pytest.mark.long, id="3-ranks"),
    pytest.param((4, "copies"), marks=pytest.mark.long, id="4-ranks-of-two-machines"),
]
EACH = [GROUPS[0], *GROUPS[2:]]  # every number of ranks once
SHARDINGS = [
    pytest.param(*group.values, sharding, marks=group.marks, id=f"{group.id}-{sharding}")
    for group in EACH
    for sharding in cases.shardings(group.values[0][0])
]
ALL_CASES = [
    pytest.param(*group.values, name, marks=group.marks, id=f"{group.id}-{name}")
    for group in GROUPS
    for name in cases.TIERS[group.values[0][1]]
]


@pytest.mark.parametrize(("found", "name"), ALL_CASES, indirect=["found"])
def test_ranks_compute_what_one_process_computes(
    name: str, found: list[dict[str, Any]], models: dict[str, Path]
) -> None:
    alone = cases.run(cases.CASES[name], models)
    for rank in found:
        for step in range(cases.STEPS):
            near = LOGPROB if step == 0 else LATER
            for what in ("logprobs", "entropies"):
                np.testing.assert_allclose(rank[name][what][step], alone[what][step], rtol=0, atol=near)
            near = COEFFICIENT if step == 0 else 10 * LATER
            np.testing.assert_allclose(rank[name]["weights"][step], alone["weights"][step], rtol=0, atol=near)
            for key, value in alone["records"][step].items():
                near = value if value is None else pytest.approx(value, rel=1e-4, abs=2e-5)
                assert rank[name]["records"][step][key] == near, (step, key)
        assert rank[name]["tokens"] == alone["tokens"]
        assert rank[name]["model"].keys() == alone["model"].keys()
        for weight, value in alone["model"].items():
            np.testing.assert_allclose(rank[name]["model"][weight], value, rtol=0, atol=WEIGHT, err_msg=weight)


@pytest.mark.parametrize(("found", "name"), ALL_CASES, indirect=["found"])
def test_ranks_agree_to_the_bit(name: str, found: list[dict[str, Any]]) -> None:
    """Each rank takes decisions from these numbers alone, so a rounding error would separate them."""
    first, *others = (rank[name] for rank in found)
    for other in others:
        assert other["records"] == first["records"]
        for what in ("logprobs", "entropies", "weights"):
            for mine, theirs in zip(first[what], other[what], strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("found", "sharding"), SHARDINGS, indirect=["found"])
def test_the_gradient(sharding: str, found: list[dict[str, Any]], models: dict[str, Path]) -> None:
    """The gradient of a mini-batch in which one of three ranks has no response; the error is relative to its norm."""
    check_gradient([rank[f"gradient-{sharding}"] for rank in found], cases.gradient("none", models))


@pytest.mark.parametrize("found", EACH, indirect=True)
def test_the_gradient_of_recurrent_layers(found: list[dict[str, Any]], models: dict[str, Path]) -> None:
    """Split weights are gathered while a layer computes prompts, and responses from the states after them."""
    check_gradient([rank["gradient-hybrid-full"] for rank in found], cases.gradient("none", models, hybrid=True))


def check_gradient(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    norm = float(alone.pop("norm"))
    for several in ranks:
        assert several["norm"] == pytest.approx(norm, rel=GRADIENT)
        gap = np.sqrt(sum(np.square(several[name] - value).sum() for name, value in alone.items()))
        assert gap < GRADIENT * norm


@pytest.mark.parametrize(("found", "sharding"), SHARDINGS, indirect=["found"])
def test_masters_of_bfloat16_weights(sharding: str, found: list[dict[str, Any]], models: dict[str, Path]) -> None:
    """The update differs by the rounding of products alone; whole or split, weights are their masters' rounding."""
    alone = cases.bfloat16_update("none", models)
    names = {name.removeprefix("after ") for name in alone if name.startswith("after ")}
    moved = {name: alone[f"after {name}"] - alone[f"before {name}"] for name in names}
    length = np.sqrt(sum(np.square(value).sum() for value in moved.values()))
    assert length > 1e-4
    for rank in found:
        several = rank[f"bfloat16-{sharding}"]
        assert several.keys() == alone.keys()
        gap = 0.0
        for name in names:
            np.testing.assert_array_equal(several[f"before {name}"], alone[f"before {name}"])
            gap += np.square(several[f"after {name}"] - several[f"before {name}"] - moved[name]).sum()
            master = torch.from_numpy(several[f"after {name}"])
            np.testing.assert_array_equal(several[f"exported {name}"], master.bfloat16().float().numpy())
        assert np.sqrt(gap) < 0.03 * length
        # The masters have moved by less than bfloat16 shows, so the export alone would not hold them.
        assert any(not np.array_equal(several[f"exported {name}"], several[f"after {name}"]) for name in names)


@pytest.mark.parametrize("found", EACH, indirect=True)
def test_items_of_any_size_cross_whole(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for size, items in zip(cases.SIZES, rank["exchanged"], strict=True):
            for place, other in enumerate(items):
                expected = cases.item(size, place)
                np.testing.assert_array_equal(other.pop("array"), expected.pop("array"))
                assert other == expected
        assert len(items) == len(found)


@pytest.mark.parametrize("found", EACH, indirect=True)
def test_each_ticket_goes_to_one_rank(found: list[dict[str, Any]]) -> None:
    for queue in range(2):
        assert sorted(ticket for rank in found for ticket in rank["counted"][queue]) == list(range(40))


@pytest.mark.parametrize("found", EACH, indirect=True)
def test_only_the_first_rank_reads_a_model_that_is_split(found: list[dict[str, Any]]) -> None:
    """The others' weights are compared above: recurrent layers are tried with real numbers, so all ranks read those."""
    split = {"tied-full", "reference-full", "bfloat16"}
    for rank, each in enumerate(found):
        assert each["read"] == {name: int(rank == 0 or name not in split) for name in each["read"]}
