"""What a run with TRL shows of the credit: its logs, its completions table, and delta's own pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from delta_cli.integrations.trl import DelTAConfig, DelTATrainer, with_delta
from delta_cli.integrations.trl.trainer import COLUMN
from delta_cli.reporting.inspection import inspect_run
from delta_cli.reporting.report import write_report
from delta_cli.runs.metrics import METRICS
from delta_cli.runs.records import RecordedRun
from tests.integrations.tiny import model, questions, right, settings, tokenizer


def train(folder: Path, reward: Any = right, **changes: Any) -> Any:
    own = {"per_device_train_batch_size": 16, "learning_rate": 1e-4, "delta_rollouts_every": 2}
    args = DelTAConfig(**{**settings(folder, **own), **changes})
    more = {"eval_dataset": questions(2, seed=1)} if "eval_steps" in changes else {}
    run = DelTATrainer(model(), reward, args, questions(40), processing_class=tokenizer(), **more)
    run.train()
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps with all records, the rollouts of every second one."""
    return train(tmp_path_factory.mktemp("recorded"), max_steps=4, log_completions=True)


def folder_of(run: Any) -> Path:
    return Path(run.args.output_dir)


def test_trl_logs_the_statistics(recorded: Any) -> None:
    for entry in recorded.state.log_history[:2]:
        assert abs(entry["delta/coefficient_mean"] - 1) < 1e-6
        assert entry["delta/coefficient_min"] < 0.95 < 1.05 < entry["delta/coefficient_max"]
        assert 0 <= entry["delta/margin_positive"] <= 1
        assert entry["delta/degenerate"] == 0
        assert {name for name in entry if name.startswith("delta/")} <= {f"delta/{name}" for name in METRICS}


def test_no_contrast_is_said_and_changes_nothing(tmp_path: Path) -> None:
    run = train(tmp_path, lambda completions, **_: [1.0] * len(completions), log_completions=True)
    entry = run.state.log_history[0]
    assert entry["delta/degenerate"] == 1
    assert entry["delta/coefficient_std"] == 0
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table[COLUMN].isna().all()


def test_the_completions_table_names_the_most_amplified_token(recorded: Any) -> None:
    check_table(folder_of(recorded), 16)


@pytest.mark.long
def test_evaluations_keep_the_completions_table_aligned(tmp_path: Path) -> None:
    """Evaluations add rows to TRL's tables too, and the column must not slip against the others."""
    changes = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    train(tmp_path, log_completions=True, **changes)
    check_table(tmp_path, 8)  # of 16 rows kept, the evaluation's are the last 8


def check_table(folder: Path, rows: int) -> None:
    table = pd.read_parquet(folder / "completions" / "completions_00001.parquet")
    table = table[table[COLUMN].notna()]
    assert len(table) == rows
    said = {}
    for response in RecordedRun(folder / "delta").responses(1):
        at = int(np.argmax(response.coefficients))
        piece = tokenizer().decode([int(response.tokens[at])])
        said.setdefault(response.text, f"{piece!r} {response.coefficients[at]:.2f}")
    assert [said[text] for text in table["completion"]] == table[COLUMN].tolist()


def test_what_is_written_is_what_trl_logged(recorded: Any) -> None:
    run = RecordedRun(folder_of(recorded) / "delta")
    assert run.steps == [1, 3]
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    assert {name for record in run.metrics for name in record} <= set(METRICS)
    for record, entry in zip(run.metrics, recorded.state.log_history, strict=False):
        assert record["reward_mean"] == pytest.approx(entry["reward"])
        assert record["accuracy"] == pytest.approx(entry["reward"])  # rewards are 0 or 1
        assert record["response_length_mean"] == pytest.approx(entry["completions/mean_length"])
        with_rollouts = record["step"] in run.steps  # entropies take TRL's forward more memory: none elsewhere
        assert record["entropy_mean"] == (pytest.approx(entry["entropy"], rel=1e-4) if with_rollouts else None)
    responses = list(run.responses(1))
    assert len(responses) == 16
    assert [response.group for response in responses] == np.repeat(range(4), 4).tolist()
    weights = np.concatenate([response.coefficients for response in responses])
    assert abs(weights.mean() - 1) < 1e-6
    assert weights.std() > 0.01
    for response in responses:
        assert len(response) == len(response.coefficients) == len(response.logprobs) == len(response.entropies)
        assert response.correct == (f"\\boxed{{{response.answer}}}" in response.text)
        assert response.prompt.startswith(response.problem)


def test_inspect_and_report_open_what_is_written(recorded: Any, tmp_path: Path) -> None:
    folder = folder_of(recorded) / "delta"
    third = list(RecordedRun(folder).responses(1))[4].problem
    inspection = inspect_run(folder, step=1, problem=third)
    assert len(inspection.responses) == 4
    assert inspection.responses[0].pieces[-1] == "<|endoftext|>"
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "figure-coefficients_1" in page
    assert "delta in TRL, loss dapo" in page


def test_resumed_steps_are_recorded_once(tmp_path: Path) -> None:
    """A checkpoint at step 2 of a run that was killed in step 4: what came after it is drawn again."""
    changes = {"save_strategy": "steps", "save_steps": 2, "delta_rollouts_every": 1}
    train(tmp_path, max_steps=3, **changes)
    file = tmp_path / "delta" / "metrics.jsonl"
    before = file.read_text().splitlines()
    args = DelTAConfig(**settings(tmp_path, per_device_train_batch_size=16, max_steps=4, **changes))
    run = DelTATrainer(model(), right, args, questions(40), processing_class=tokenizer())
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert RecordedRun(tmp_path / "delta").steps == [1, 2, 3, 4]


def test_several_batches_in_a_step_record_the_first(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    train(tmp_path, **changes)
    assert [record["step"] for record in RecordedRun(tmp_path / "delta").metrics] == [1, 2]


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    train(tmp_path, delta_rollouts_every=0)
    assert not (tmp_path / "delta").exists()


def test_a_reward_that_is_missing_is_no_wrong_answer_with_a_reason(tmp_path: Path) -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None if at % 8 == 0 else float(at % 2) for at in range(len(completions))]

    train(tmp_path, some)
    responses = list(RecordedRun(tmp_path / "delta").responses(1))
    assert [response.failure for response in responses] == (["no reward"] + [None] * 7) * 2
    assert not any(response.correct for response in responses[::8])


def test_a_subclass_that_drops_completions_still_gets_its_credit(tmp_path: Path) -> None:
    """Rows that are not those TRL scored: the features come from a forward of the rows that are left."""
    from trl import GRPOTrainer

    class Half(GRPOTrainer):  # type: ignore[misc]
        """Keeps the first twelve completions of the generation batch."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            return {name: value[:12] if value.dim() else value for name, value in output.items()}

    args = DelTAConfig(
        **settings(tmp_path, per_device_train_batch_size=8, steps_per_generation=2, log_completions=True, max_steps=2)
    )
    run = with_delta(Half)(model(), right, args=args, train_dataset=questions(40), processing_class=tokenizer())
    run.train()
    assert run.state.log_history[0]["delta/coefficient_std"] > 0.01
    assert pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")[COLUMN].isna().all()
