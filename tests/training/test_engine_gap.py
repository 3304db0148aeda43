"""The gap between sampler and trainer: its metrics, the advice, and what DelTA's credit sees under corrections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.fake.backend import FakeEngine
from backends.interface import Sequences
from delta_cli.credit import CORRECTIONS, correction
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.training.metrics import describe_gap
from delta_cli.training.tripwires import advice
from delta_cli.training.update import ScoredBatch
from tests.harness import make_recipe, train


def scored(difference: list[float], lengths: list[int], left_out: tuple[int, ...] = ()) -> ScoredBatch:
    """A batch whose trainer's log-probabilities exceed the engine's by ``difference``."""
    tokens = sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    known = np.repeat([row not in left_out for row in range(len(lengths))], lengths)
    sequences = Sequences(tuple(np.array([1]) for _ in lengths), np.zeros(tokens, np.int64), starts)
    rollout = RolloutBatch((), sequences, (), (), np.zeros(len(lengths), bool), np.full(tokens, -2.0))
    logp = np.array(difference) - 2.0
    return ScoredBatch(rollout, np.ones(len(lengths)), logp, np.ones(tokens), None, None, known)


def test_the_metrics_of_a_batch_worked_by_hand() -> None:
    """Responses of 4, 0, 2 and 1 tokens; the last was not scored."""
    batch = scored([0.1, -0.2, 0.3, -0.4, 0.0, 0.5, 9.0], [4, 0, 2, 1], left_out=(3,))
    found = describe_gap(batch, correction("none"))
    gaps = [0.1, 0.2, 0.3, 0.4, 0.0, 0.5]
    assert found["engine_gap_mean"] == pytest.approx(0.25, abs=1e-12)
    assert found["engine_gap_max"] == pytest.approx(0.5, abs=1e-12)
    assert found["engine_gap_p99"] == pytest.approx(0.4 + 0.95 * 0.1, abs=1e-12)  # place 4.95 of 0 to 5, sorted
    assert found["engine_gap_p999"] == pytest.approx(0.4 + 0.995 * 0.1, abs=1e-12)
    quarters = [(0.1 + 0.0) / 2, 0.2, (0.3 + 0.5) / 2, 0.4]
    np.testing.assert_allclose([found[f"engine_gap_q{n}"] for n in range(1, 5)], quarters, atol=1e-12)
    w = np.exp([0.1, -0.2, 0.3, -0.4, 0.0, 0.5])
    assert found["ess_token"] == pytest.approx(w.sum() ** 2 / (6 * (w**2).sum()), abs=1e-12)
    s = np.exp([0.1 - 0.2 + 0.3 - 0.4, 0.5])
    assert found["ess_sequence"] == pytest.approx(s.sum() ** 2 / (2 * (s**2).sum()), abs=1e-12)
    assert "correction_cut" not in found
    assert len(gaps) == 6


def test_the_share_cut_counts_weights_bounded_and_tokens_rejected() -> None:
    batch = scored([0.1, -0.2, 0.3, 1.5], [2, 2])
    assert describe_gap(batch, correction("decoupled_token_is"))["correction_cut"] == 0.25  # exp(1.5) > 2
    assert describe_gap(batch, correction("sequence_mask"))["correction_cut"] == 0.5  # exp(1.8) > 3
    assert describe_gap(batch, correction("bypass_ppo_clip"))["correction_cut"] == 0


def test_a_batch_that_was_not_scored_has_no_gap() -> None:
    found = describe_gap(scored([1.0, 1.0], [2], left_out=(0,)), correction("none"))
    assert set(found.values()) == {None}
    assert advice(found) is None


@pytest.mark.parametrize(
    ("gap", "preset"),
    [
        ({"engine_gap_p999": 0.05, "ess_sequence": 0.5}, None),
        ({"engine_gap_p999": 0.3, "ess_sequence": 0.95}, "decoupled_seq_is"),
        ({"engine_gap_p999": 0.3, "ess_sequence": 0.2}, "decoupled_token_is"),
        ({"engine_gap_p999": 6.0, "ess_sequence": 0.01, "ess_token": 0.3}, "decoupled_token_icepop"),
        ({"engine_gap_p999": 6.0, "engine_gap_p99": 3.0, "ess_sequence": 0.01, "ess_token": 0.3},
         "decoupled_k3_rs_token_tis"),
    ],
)  # fmt: skip
def test_the_advice_names_an_entry_of_the_menu(gap: dict[str, float], preset: str | None) -> None:
    found = advice({"engine_gap_p99": 0.1, "ess_token": 0.99} | gap)
    assert (None if found is None else found[0]) == preset
    assert preset is None or preset in CORRECTIONS


@pytest.fixture
def noisy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log-probabilities are off, as those of another program are."""
    rollout = FakeEngine.rollout

    def other(self: FakeEngine, *given: Any) -> Any:
        drawn = rollout(self, *given)
        noise = np.random.default_rng(5).normal(0, 0.3, len(drawn.logprobs)).astype(np.float32)
        return replace(drawn, logprobs=drawn.logprobs + noise)

    monkeypatch.setattr(FakeEngine, "rollout", other)


def records(folder: Path, name: str) -> list[Any]:
    """Of the responses with an advantage: the others are scored only under corrections that reject responses."""
    return [row[name] for row in read_lines(RunFolder(folder).rollout_file(1)) if row["advantage"]]


@pytest.mark.usefixtures("noisy_engine")
def test_the_credit_sees_the_trainers_log_probabilities_under_every_correction(model: Path, tmp_path: Path) -> None:
    common = {"run__steps": 1, "evaluation__every": "never", "update__old_logprobs": "recompute"}
    plain = train(make_recipe(model, **common), tmp_path / "none").records[0]
    losses = {plain["loss"]}
    for preset in ("sequence_mask", "decoupled_token_icepop", "decoupled_k3_rs_seq_tis", "bypass_ppo_clip"):
        near = {"correction__reject_high": 0.05} if "k3" in preset else {}  # its mean is 0.045 at this noise
        (record,) = train(make_recipe(model, **common, **near, correction__preset=preset), tmp_path / preset).records
        for column in ("coefficients", "margins", "logprobs", "advantage"):
            assert records(tmp_path / preset, column) == records(tmp_path / "none", column), (preset, column)
        losses.add(record["loss"])
        assert record["ratio_gap_first"] < 1e-6, "the policy has not moved yet, whatever the engine says"
    assert len(losses) == 5, "but each correction changes the loss"


@pytest.mark.usefixtures("noisy_engine")
def test_a_run_without_a_correction_is_told_which_one_to_take(model: Path, tmp_path: Path) -> None:
    watcher = train(make_recipe(model, run__steps=1, update__old_logprobs="recompute"), tmp_path / "run")
    (notice,) = [notice for notice in watcher.notices if notice.name == "correction_advised"]
    assert 'set correction.preset = "decoupled_token_is"' in notice.text
    changes = {"run__steps": 1, "correction__preset": "decoupled_token_is"}
    assert "correction_advised" not in train(make_recipe(model, **changes), tmp_path / "with").named
