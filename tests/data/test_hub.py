"""The hub's data sets, as local repositories of the same layout, through the same library calls."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from delta_cli.data import sources
from delta_cli.data.dataset_layouts import LAYOUTS
from delta_cli.data.loading import load_problems
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection

datasets = pytest.importorskip("datasets")

CARD = """---
dataset_info:
  config_name: {config}
  features:
{features}  splits:
  - name: {split}
    num_bytes: 1000
    num_examples: {rows}
  download_size: 1000
  dataset_size: 1000
configs:
- config_name: {config}
  data_files:
  - split: {split}
    path: data/{split}-*
---
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def repository(folder: Path, rows: list[dict[str, Any]], config: str = "default", split: str = "train") -> str:
    """A folder like a hub repository: a card that names configuration, columns and files, and Parquet shards."""
    table = pyarrow.Table.from_pylist(rows)
    described = datasets.Features.from_arrow_schema(table.schema).items()
    features = "".join(
        f"  - name: {name}\n    dtype: {kind.dtype}\n" for name, kind in described if isinstance(kind, datasets.Value)
    )
    (folder / "data").mkdir(parents=True)
    if len(features.splitlines()) == 2 * len(rows[0]):  # the card describes flat columns only
        card = CARD.format(config=config, split=split, features=features, rows=len(rows))
    else:
        card = "---\n" + CARD[CARD.index("configs:") :].format(config=config, split=split)
    (folder / "README.md").write_text(card)
    parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return str(folder)


def load(folder: str, name: str, **options: Any) -> list[tuple[str, str, Any]]:
    loaded = load_problems(DataSection(source=folder, layout=name, held_out=0.0, **options))
    return [(p.id, p.question, p.answer) for p in loaded.problems]


def test_deepmath_reads_no_column_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"question": "q1", "final_answer": "\\frac12", "difficulty": 6.0, "topic": "t", "r1_solution_1": "x" * 1000},
        {"question": "q2", "final_answer": "2", "difficulty": 3.0, "topic": "t", "r1_solution_1": "y" * 1000},
    ]
    folder = repository(tmp_path / "deepmath", rows)
    seen: list[Any] = []
    real = datasets.load_dataset

    def spy(*args: Any, **options: Any) -> Any:
        table = real(*args, **options)
        seen.extend([options["columns"], sorted(table.column_names)])
        return table

    monkeypatch.setattr(datasets, "load_dataset", spy)
    assert load(folder, "zwhe99/DeepMath-103K", filter="difficulty >= 5") == [("1", "q1", "\\frac12")]
    assert seen == 2 * [["difficulty", "final_answer", "question"]]


def test_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "She has 3 <<3=3>>.\n#### 3"}]
    folder = repository(tmp_path / "gsm8k", rows, config="main", split="test")
    assert load(folder, "openai/gsm8k", split="test") == [("1", "How many?", "3")]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith(("MathArena/", "HuggingFaceH4/aime"))])
def test_contests(tmp_path: Path, name: str) -> None:
    rows = [{"problem_idx": 4, "problem": "Find n.", "answer": 70}, {"problem_idx": 5, "problem": "m?", "answer": 8}]
    found = load(repository(tmp_path / "contest", rows), name)
    assert [row[1:] for row in found] == [("Find n.", "70"), ("m?", "8")]
    assert found[0][0] == ("4" if name.startswith("MathArena/") else "1")


def test_math500_comes_as_lines_of_json(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "long", "answer": "\\pi", "subject": "s", "level": 1, "unique_id": "test/1.json"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    assert load(str(tmp_path), "HuggingFaceH4/MATH-500") == [("test/1.json", "p", "\\pi")]


def eurus(ability: str, question: str, truth: Any) -> dict[str, Any]:
    return {
        "data_source": "taco",
        "prompt": [{"content": "Think.", "role": "system"}, {"content": question, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": truth if isinstance(truth, str) else json.dumps(truth), "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


def test_eurus_code_rows_become_tests(tmp_path: Path) -> None:
    rows = [
        eurus("math", "1+1?", "2"),
        eurus("code", "Add.", {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}),
        eurus("code", "f", {"fn_name": "f", "inputs": [[1, [2]], [3, []]], "outputs": [[5], [6]]}),
        eurus("code", "g", {"fn_name": "g", "inputs": ["1\n[2]", "3\n[]"], "outputs": ["5", "[6]"]}),
        eurus("code", "none", {"inputs": [], "outputs": []}),
    ]
    found = load(repository(tmp_path / "eurus", rows), "PRIME-RL/Eurus-2-RL-Data")
    assert [row[1] for row in found] == ["Add.", "f", "g"]
    assert [row[2] for row in found] == [
        {"type": "stdio", "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "3\n4", "output": "7"}]},
        {
            "type": "calls",
            "entry_point": "f",
            "cases": [{"args": [1, [2]], "expected": 5}, {"args": [3, []], "expected": 6}],
        },
        {
            "type": "calls",
            "entry_point": "g",
            "cases": [{"args": [1, [2]], "expected": 5}, {"args": [3, []], "expected": [6]}],
        },
    ]
    mathematics = load(str(tmp_path / "eurus"), "PRIME-RL/Eurus-2-RL-Data", filter='ability == "math"')
    assert mathematics == [("1", "1+1?", "2")]


def test_humaneval_and_mbpp_tests_run_after_the_response(tmp_path: Path) -> None:
    human = {
        "task_id": "HumanEval/0",
        "prompt": 'def f(x):\n    """Add one."""\n',
        "canonical_solution": "    return x + 1\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }
    ((name, question, tests),) = load(repository(tmp_path / "h", [human], split="test"), "evalplus/humanevalplus")
    assert name == "HumanEval/0"
    assert human["prompt"] in question
    exec(human["prompt"] + human["canonical_solution"] + tests["code"], {})
    with pytest.raises(AssertionError):
        exec(human["prompt"] + "    return x\n" + tests["code"], {})

    mbpp = {
        "task_id": 2,
        "code": "def add(a): return a + 1",
        "prompt": "Add one.",
        "source_file": "",
        "test_imports": ["import math"],
        "test_list": ["assert add(1) == 2", "assert add(2) == 3"],
        "test": "assert add(math.floor(1.5)) == 2",
    }
    ((name, question, tests),) = load(repository(tmp_path / "m", [mbpp], split="test"), "evalplus/mbppplus")
    assert name == "2"
    assert "assert add(1) == 2" in question
    assert "assert add(2)" not in question
    exec(mbpp["code"] + "\n" + tests["code"], {})
    with pytest.raises(AssertionError):
        exec("def add(a): return a\n" + tests["code"], {})


def test_fields_a_recipe_names_win_over_the_layout(tmp_path: Path) -> None:
    rows = [{"question": "q", "final_answer": "1", "other": "2"}]
    folder = repository(tmp_path / "deepmath", rows)
    assert load(folder, "zwhe99/DeepMath-103K", answer="other") == [("1", "q", "2")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"answer": "solution"}, "no column 'solution'; the columns are question, answer"),
        ({"split": "validation"}, r"cannot be loaded: .*validation"),
        ({"config": "nothing"}, r"cannot be loaded: .*nothing"),
    ],
    ids=str,
)
def test_what_is_not_there_is_one_line(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    folder = repository(tmp_path / "data", [{"question": "q", "answer": "1"}])
    with pytest.raises(UserError, match=reason) as caught:
        load_problems(DataSection(source=folder, **options))
    assert "\n" not in str(caught.value)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'delta-rlvr\[hub\]'"):
        list(sources.rows("some/name", None, "train", {"question"}))
