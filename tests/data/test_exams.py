"""GPQA, MMLU-Pro and LiveCodeBench from local files of their hub's layout."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from delta_cli.data.loading import load_problems
from delta_cli.errors import UserError
from delta_cli.evaluation import suites
from delta_cli.evaluation.suites import BenchmarkSpec
from delta_cli.recipe.data import DataSection

LCB = "livecodebench/code_generation_lite"


def gpqa_rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "Record ID": f"rec{n}",
            "Question": f"Which gas is number {n}?\n",
            "Correct Answer": f"gas {n}",
            **{f"Incorrect Answer {k}": f"gas {n + k}" for k in (1, 2, 3)},
            "High-level domain": "Chemistry",
        }
        for n in range(count)
    ]


def write_csv(file: Path, rows: list[dict[str, Any]]) -> Path:
    import csv

    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_gpqa_options_are_mixed_and_the_letter_is_that_of_the_right_one(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "gpqa_diamond.csv", gpqa_rows())
    found = load_problems(DataSection(source=str(file), layout="Idavidrein/gpqa", held_out=0.0)).problems
    assert len(found) == 40
    for number, problem in enumerate(found):
        assert problem.id == f"rec{number}"
        assert f"\n({problem.answer}) gas {number}\n" in problem.question
        assert [f"\n({mark}) gas" in problem.question for mark in "ABCDE"] == [True] * 4 + [False]
    counts = [sum(problem.answer == mark for problem in found) for mark in "ABCD"]
    assert min(counts) >= 3  # of 40: the right one is in no favoured place
    other = write_csv(tmp_path / "other.csv", gpqa_rows()[::-1])
    again = load_problems(DataSection(source=str(other), layout="Idavidrein/gpqa", held_out=0.0)).problems
    assert {p.id: (p.question, p.answer) for p in again} == {p.id: (p.question, p.answer) for p in found}


def test_mmlu_pro_is_a_choice_of_600_by_a_seed(tmp_path: Path) -> None:
    rows = [
        {"question_id": n, "question": f"What is {n}?", "options": [str(n + k) for k in range(10)], "answer": "A"}
        for n in range(700)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    spec = suites.load_suite("mmlu_pro").benchmarks[0]
    local = spec.model_copy(update={"source": str(tmp_path / "test.parquet"), "layout": "TIGER-Lab/MMLU-Pro"})

    def chosen(spec: BenchmarkSpec) -> list[str]:
        return [problem.id for problem in suites.load_benchmarks([spec])[0].problems]

    ids = chosen(local)
    assert len(set(ids)) == 600
    assert chosen(local) == ids
    assert chosen(local.model_copy(update={"seed": 1})) != ids
    (problem,) = [p for p in suites.load_benchmarks([local])[0].problems if p.id == ids[0]]
    assert problem.answer == "A"
    assert f"(A) {ids[0]}\n(B) {int(ids[0]) + 1}\n" in problem.question
    assert f"(J) {int(ids[0]) + 9}\n" in problem.question


def lcb_row(name: str, date: str, cases: list[dict[str, str]], hidden: str, **more: str) -> dict[str, str]:
    return {
        "question_title": name,
        "question_content": f"Solve {name}.",
        "question_id": name,
        "contest_date": date,
        "starter_code": "",
        "public_test_cases": json.dumps(cases),
        "private_test_cases": hidden,
        "metadata": "{}",
    } | more


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def case(given: str, output: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": output, "testtype": kind}


STARTER = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        "


def lcb_rows() -> list[dict[str, str]]:
    functional = [case("1\n[2, 3]", "6", "functional")]
    more = {"starter_code": STARTER, "metadata": json.dumps({"func_name": "add"})}
    hidden = packed(json.dumps([case("4\n[]\n", "4", "functional")]))
    return [
        lcb_row("old", "2023-05-07T00:00:00", [case("1\n", "2\n")], "[]"),
        lcb_row("program", "2024-09-01T00:00:00", [case("1\n", "2\n")], packed(json.dumps([case("5\n", "6\n")]))),
        lcb_row("method", "2024-10-01T00:00:00", functional, hidden, **more),
        lcb_row("late", "2025-05-01T00:00:00", [case("1\n", "2\n")], "[]"),
    ]


def write_jsonl(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_livecodebench_is_cut_by_date_and_its_hidden_tests_are_unpacked(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "test.jsonl", lcb_rows())
    spec = suites.load_suite("livecodebench").benchmarks[0].model_copy(update={"source": str(file), "layout": LCB})
    first, second = suites.load_benchmarks([spec])[0].problems
    assert (first.id, second.id) == ("program", "method")
    cases = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}]
    assert first.answer == {"type": "stdio", "cases": cases}
    assert "standard input" in first.question
    cases = [{"args": [1, [2, 3]], "expected": 6}, {"args": [4, []], "expected": 4}]
    assert second.answer == {"type": "calls", "entry_point": "Solution.add", "cases": cases}
    assert STARTER.rstrip() in second.question


def test_livecodebench_from_a_folder_like_its_repository(tmp_path: Path) -> None:
    """Several files without a card; the library reads the dates as dates, which the window compares as well."""
    pytest.importorskip("datasets")
    rows = lcb_rows()
    write_jsonl(tmp_path / "test.jsonl", rows[:2])
    write_jsonl(tmp_path / "test2.jsonl", rows[2:])
    found = load_problems(
        DataSection(
            source=str(tmp_path),
            layout=LCB,
            filter='contest_date >= "2024-09-01" and contest_date < "2025-05-01"',
            held_out=0.0,
        )
    )
    assert [problem.id for problem in found.problems] == ["program", "method"]


def test_the_hubs_files_are_read_without_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(kind: str, data_files: str, split: str) -> Any:
        asked.append((kind, data_files, split))
        rows = [row | {"contest_date": datetime.fromisoformat(row["contest_date"])} for row in lcb_rows()]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = suites.load_suite("livecodebench").benchmarks[0]
    assert [problem.id for problem in suites.load_benchmarks([spec])[0].problems] == ["program", "method"]
    assert asked == [("json", f"hf://datasets/{LCB}/test*.jsonl", "train")]


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harm",)


@pytest.mark.parametrize(
    "hidden", [packed(Harm()), packed([1]), "no base64!", base64.b64encode(b"no zlib").decode(), '{"a": 1}']
)
def test_hidden_tests_that_are_no_data_are_refused_in_one_line(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_jsonl(tmp_path / "test.jsonl", [lcb_row("x", "2024-09-01", [], hidden)])
    with pytest.raises(UserError, match="LiveCodeBench: the tests of a problem cannot be read") as error:
        load_problems(DataSection(source=str(file), layout=LCB))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()
