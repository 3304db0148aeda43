"""Suites: the shipped ones load with the values the paper states; mistakes are one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_cli.data import arithmetic
from delta_cli.data.dataset_layouts import LAYOUTS
from delta_cli.errors import UserError
from delta_cli.evaluation import suites
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe.data import Arithmetic

MINIMAL = 'name = "mine"\n[[benchmarks]]\nname = "one"\nsource = "problems.jsonl"\n'


def write(folder: Path, text: str) -> str:
    file = folder / "mine.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", suites.names())
def test_every_shipped_suite_loads_and_its_sources_are_known(name: str) -> None:
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.description
    assert {each.source for each in suite.benchmarks} <= {*LAYOUTS, arithmetic.SOURCE}


def test_the_suites_the_project_promises_are_shipped() -> None:
    mathematics = {"aime25", "arithmetic", "gsm8k", "math4", "math500", "math7"}
    code = {"code3", "humaneval+", "livecodebench", "mbpp+"}
    assert set(suites.names()) == mathematics | code | {"gpqa", "mmlu_pro", "ood2"}


def test_math7_is_the_papers() -> None:
    suite = suites.load_suite("math7")
    columns = ["AIME24", "AIME25", "AIME26", "HMMT25 Feb", "HMMT25 Nov", "HMMT26 Feb", "Brumo25"]
    assert [each.name for each in suite.benchmarks] == columns
    settings = suite.settings
    assert (settings.samples, settings.max_tokens, settings.temperature, settings.top_p) == (16, 30_000, 1.0, 0.7)
    assert settings == EvaluationSettings()


def test_arithmetic_problems_are_held_out() -> None:
    (benchmark,) = suites.load_benchmarks(suites.load_suite("arithmetic").benchmarks)
    training = {problem.question for problem in arithmetic.problems(Arithmetic(), 5000, seed=0)}
    assert len(benchmark.problems) == 256
    assert not training & {problem.question for problem in benchmark.problems}


def test_a_limit_takes_the_smaller_of_both() -> None:
    specs = suites.load_suite("arithmetic").benchmarks
    assert len(suites.load_benchmarks(specs, limit=5)[0].problems) == 5
    assert len(suites.load_benchmarks(specs, limit=10**6)[0].problems) == 256


def test_a_suite_of_ones_own_finds_the_data_beside_it(tmp_path: Path) -> None:
    rows = [{"q": f"{n}+{n}?", "gold": f"so {2 * n} is it"} for n in range(4)]
    (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    text = MINIMAL + 'question = "q"\nanswer = "gold"\nanswer_pattern = "so (\\\\d+)"\n[settings]\nsamples = 2\n'
    suite = suites.load_suite(write(tmp_path, text))
    (benchmark,) = suites.load_benchmarks(suite.benchmarks)
    assert suite.settings.samples == 2
    assert [problem.question for problem in benchmark.problems] == ["0+0?", "1+1?", "2+2?", "3+3?"]
    assert [problem.answer for problem in benchmark.problems] == ["0", "2", "4", "6"]


def test_a_data_file_is_a_suite(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1?", "answer": 2}\n')
    suite = suites.file_suite(str(file), EvaluationSettings(samples=1))
    (benchmark,) = suites.load_benchmarks(suite.benchmarks)
    assert (benchmark.name, len(benchmark.problems)) == ("mine", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"', "benchmarks: it is missing"),
        (MINIMAL + 'sorce = "x"', r"unknown key benchmarks.0.sorce; did you mean source\?"),
        (MINIMAL + "[settings]\ntopp = 1", r"unknown key settings.topp; did you mean top_p\?"),
        (MINIMAL + "[settings]\ntop_p = 2", r"settings.top_p = 2 is not allowed: it must be at most 1"),
        (MINIMAL + "[setings]\n", r"unknown key setings; did you mean settings\?"),
        (
            MINIMAL + '[settings]\nverifier = "music"',
            r"settings.verifier = 'music' is not allowed: choose math, number, choice or code",
        ),
        (MINIMAL + '[settings]\ntemplate = "papr"', "prompt template 'papr'"),
        (MINIMAL + '[[benchmarks]]\nname = "one"\nsource = "x"', "two benchmarks are called 'one'"),
        ('name = "x"\nbenchmarks = []', "must not be empty"),
    ],
)
def test_mistakes_in_a_suite(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        suites.load_suite(write(tmp_path, text))
    assert "\n" not in str(error.value)
    assert "mine.toml" in str(error.value)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"suite 'maths7' does not exist; did you mean math7\?"):
        suites.load_suite("maths7")
    with pytest.raises(UserError, match=r"nowhere\.toml: no such file"):
        suites.load_suite("nowhere.toml")


def test_settings_can_be_changed_within_their_range() -> None:
    suite = suites.load_suite("math7")
    assert suite.with_settings(samples=2, top_p=None).settings == EvaluationSettings(samples=2)
    with pytest.raises(UserError, match="--samples 0: it must be at least 1"):
        suite.with_settings(samples=0)


def test_a_filter_on_generated_problems_is_refused(tmp_path: Path) -> None:
    text = 'name = "mine"\n[[benchmarks]]\nname = "sums"\nsource = "arithmetic"\nfilter = "answer > 9"\n'
    with pytest.raises(UserError, match=r"benchmark 'sums': data\.filter: .* arithmetic are generated"):
        suites.load_benchmarks(suites.load_suite(write(tmp_path, text)).benchmarks)


def test_a_source_that_cannot_be_read_names_the_benchmark(tmp_path: Path) -> None:
    suite = suites.load_suite(write(tmp_path, MINIMAL))
    with pytest.raises(UserError, match=r"benchmark 'one': .*problems\.jsonl"):
        suites.load_benchmarks(suite.benchmarks)
