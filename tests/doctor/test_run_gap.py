"""``delta doctor RUN`` explains the gap with the run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_cli.doctor.run_gap import explain
from delta_cli.errors import UserError
from tests.command import delta

STEP = {"engine_gap_mean": 0.02, "engine_gap_max": 1.5, "engine_gap_p99": 0.1, "ess_token": 0.99, "ess_sequence": 0.5}


def run(folder: Path, *p999: float | None) -> Path:
    lines = [json.dumps({"step": n, **STEP, "engine_gap_p999": gap}) for n, gap in enumerate(p999, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_advice_rests_on_the_steps_shown(tmp_path: Path) -> None:
    lines = list(explain(run(tmp_path, 0.01, 0.3, 0.4)))
    assert lines[3].split() == ["2", "0.02", "0.1", "0.3", "1.5", "99%", "50%", "–"]
    assert lines[-1].startswith('2 of these 3 steps ask for a correction; set correction.preset = "decoupled_token_is"')


def test_stale_batches_ask_for_a_lower_learning_rate(tmp_path: Path) -> None:
    """The first step is on-policy, and the effective sample size of the second is not below a half."""
    steps = [(0, 0.4), (2, 0.5), (2, 0.49)]
    lines = [
        json.dumps(STEP | {"step": n, "engine_gap_p999": 0.3, "staleness": staleness, "ess_sequence": share})
        for n, (staleness, share) in enumerate(steps, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    last = list(explain(tmp_path))[-1]
    assert last.startswith("1 of these 3 steps trained on batches from which the policy had moved too far: divide upd")


def test_a_harmless_gap_and_none_at_all(tmp_path: Path) -> None:
    assert list(explain(run(tmp_path, 0.01)))[-1] == "the gap is harmless: no correction is needed"
    (line,) = explain(run(tmp_path, None))
    assert "no step compared" in line


def test_the_command_takes_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no metrics of a run"):
        list(explain(tmp_path))
    result = delta("doctor", str(run(tmp_path, 0.3)))
    assert result.code == 0
    assert "decoupled_token_is" in result.out
