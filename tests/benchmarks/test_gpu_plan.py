"""The plan for one GPU runs on a processor with a tiny model, and a stage that fails does not end it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_plan


@pytest.mark.long
def test_the_plan_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: gpu_plan.Plan) -> Iterator[gpu_plan.Row]:
        yield {"what": "before it fails", "value": 1.0, "unit": "s"}
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(gpu_plan.Plan, "layer", breaks)
    out = tmp_path / "plan.json"
    stages = ["weights", "decoding", "attention", "layer", "training"]
    command = ["gpu_plan.py", "--device", "cpu", "--tiny", "--out", str(out), "--stages", *stages]
    monkeypatch.setattr(sys, "argv", command)
    gpu_plan.main()
    rows = json.loads(out.read_text())["results"]
    failed = [(row["what"], row["error"]) for row in rows if "error" in row]
    assert failed[0][0] == "attention, four rows of unequal length, varlen", "a processor has no such kernel"
    assert failed[1:] == [("layer", "RuntimeError: no such kernel")]
    assert {row["stage"] for row in rows if row["what"] == f"the stage {row['stage']}"} == set(stages)
    steps = [row for row in rows if row["what"].startswith("decoding step in ")]
    assert {row["what"].split()[3] for row in steps} == {"pages,", "slots,"}
    assert all(row["value"] > 0 for row in rows if row["what"].startswith(("scoring", "update")))
