"""Evaluations against statistics recomputed from the responses on disk; resumption; refusals."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_tiny_base import write_tokenizer
from rich.console import Console

from backends.registry import create
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.evaluation import evaluate as evaluation_module
from delta_cli.evaluation.evaluate import Benchmark, evaluate, run_benchmark
from delta_cli.evaluation.results import EvaluationResult, EvaluationSettings
from delta_cli.evaluation.suites import load_benchmarks, load_suite
from delta_cli.evaluation.tables import render
from delta_cli.rollout.worker import RolloutWorker

from .fakes import BoxGrader, CharacterTokenizer, DigitBackend, problems

SETTINGS = EvaluationSettings(samples=4, max_tokens=20, seed=3, temperature=0.9, top_p=0.8, top_k=7, min_p=0.1)
BENCHMARKS = [Benchmark("easy", problems(7)), Benchmark("hard", problems(3, "2"))]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems a slice."""
    monkeypatch.setattr(evaluation_module, "SLICE_RESPONSES", 8)


def worker(sampler: Any) -> RolloutWorker:
    """With the tokenizer and grader of the tests; evaluations bring their own template."""
    return RolloutWorker(sampler, CharacterTokenizer(), BoxGrader(), "not this one")  # type: ignore[arg-type]


def run(
    folder: Path, backend: DigitBackend | None = None, benchmarks: list[Benchmark] = BENCHMARKS
) -> EvaluationResult:
    return evaluate(
        worker(backend or DigitBackend()),
        benchmarks,
        SETTINGS,
        model="some/model",
        backend="fake",
        suite="digits",
        folder=folder,
    )


def lines(folder: Path, benchmark: str) -> list[dict]:
    (file,) = folder.glob(f"responses/*/{benchmark}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_statistics_are_those_of_the_responses_on_disk(tmp_path: Path) -> None:
    evaluation = run(tmp_path)
    easy = lines(tmp_path, "easy")
    assert len(easy) == 7 * 4
    for line in easy:
        assert line["correct"] == line["text"].endswith("{1}")
        assert line["truncated"] == (line["text"] == "I think")
        assert line["tokens"] == len(line["text"]) + (not line["truncated"])  # the end-of-sequence token counts
        assert line["answer"] == (None if line["truncated"] else line["text"][-2])
    right = sum(line["correct"] for line in easy)
    hard_right = sum(line["correct"] for line in lines(tmp_path, "hard"))
    first, _ = evaluation.benchmarks
    assert first.avg.mean == pytest.approx(right / 28)
    assert first.passed[1].mean == pytest.approx(right / 28)
    assert first.passed[4].mean == pytest.approx(len({each["problem"] for each in easy if each["correct"]}) / 7)
    assert first.truncated == pytest.approx(sum(line["truncated"] for line in easy) / 28)
    assert first.mean_length == pytest.approx(sum(line["tokens"] for line in easy) / 28)
    assert evaluation.average.avg.mean == pytest.approx((right + hard_right) / 40)
    assert sum(evaluation.suite_scores) == pytest.approx((right + hard_right) / 10)
    marks = [line["correct"] for line in easy if line["problem"] == "p4"]
    assert first.outcomes["p4"] == "".join(str(int(mark)) for mark in marks)


def test_kinds_of_problems_are_told_apart(tmp_path: Path) -> None:
    mixed = [replace(problem, kind=("odd", "even", "")[at % 3]) for at, problem in enumerate(problems(8))]
    (found,) = run(tmp_path, benchmarks=[Benchmark("mixed", mixed)]).benchmarks
    assert list(found.kinds) == ["even", "odd"], "those without a kind are in none"
    for kind, each in found.kinds.items():
        own = [line for line in lines(tmp_path, "mixed") if line["problem"] in {p.id for p in mixed if p.kind == kind}]
        assert each.questions == len(own) // 4 == 3
        assert each.accuracy == pytest.approx(sum(line["correct"] for line in own) / 12)
        assert each.mean_length == pytest.approx(sum(line["tokens"] for line in own) / 12)
    table = Console(width=100, record=True, file=io.StringIO())
    table.print(render(run(tmp_path, benchmarks=[Benchmark("mixed", mixed)])))
    assert f"odd                      3      {100 * found.kinds['odd'].accuracy:.1f}" in table.export_text()
    (plain,) = run(tmp_path / "plain", benchmarks=[Benchmark("easy", problems(3))]).benchmarks
    assert plain.kinds == {}


def test_the_backend_is_asked_for_what_the_settings_say(tmp_path: Path) -> None:
    backend = DigitBackend()
    run(tmp_path, backend)
    assert [count for count, _ in backend.calls] == [2, 2, 2, 1, 2, 1]
    for _, sampling in backend.calls:
        assert (sampling.samples, sampling.max_tokens, sampling.temperature) == (4, 20, 0.9)
        assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.8, 7, 0.1)
        assert sampling.stop_ids == CharacterTokenizer.eos_ids
    assert len({sampling.seed for _, sampling in backend.calls}) == 6


def test_settings_that_came_later_change_no_folder_of_before_and_are_told_where_they_are_set() -> None:
    """Their names appear in the identity, and so decide on the folder, once they are not what they always were."""
    plain, given = EvaluationSettings(), EvaluationSettings(top_k=20, min_p=0.05, stop=("x",), thinking=False)
    for name in ("top_k", "min_p", "stop", "system", "thinking"):
        assert f'"{name}"' not in plain.identity()
        assert (f'"{name}"' in given.identity()) == (name != "system")
    assert (plain.truncation, given.truncation) == ("top-p 0.7", "top-p 0.7, top-k 20, min-p 0.05")


def test_an_evaluation_reads_back_as_it_was(tmp_path: Path) -> None:
    assert run(tmp_path) == EvaluationResult.read(tmp_path) == EvaluationResult.read(tmp_path / "evaluation.json")


@pytest.mark.parametrize("stop_at", range(6))
def test_an_interrupted_evaluation_goes_on_to_the_same_result(tmp_path: Path, stop_at: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", DigitBackend(stop_at=stop_at))
    rest = DigitBackend()
    assert run(tmp_path / "parts", rest) == whole
    assert len(rest.calls) == 6 - stop_at
    again = DigitBackend()
    assert run(tmp_path / "parts", again) == whole
    assert not again.calls


def test_a_torn_last_line_is_drawn_again(tmp_path: Path) -> None:
    whole = run(tmp_path)
    (file,) = tmp_path.glob("responses/*/easy.jsonl")
    content = file.read_bytes()
    for cut in (len(content) - 1, len(content) - 40, 10):
        file.write_bytes(content[:cut])
        assert run(tmp_path) == whole
        for line in file.read_text().splitlines():
            json.loads(line)  # nothing was appended to the torn line


def test_a_damaged_line_is_drawn_again(tmp_path: Path) -> None:
    whole = run(tmp_path)
    (file,) = tmp_path.glob("responses/*/hard.jsonl")
    content = file.read_text().splitlines()
    file.write_text("\n".join([*content[:-1], '{"key": 3}', "\ufffd"]) + "\n")
    backend = DigitBackend()
    assert run(tmp_path, backend) == whole
    assert len(backend.calls) == 1


@pytest.mark.parametrize(
    ("change", "slices"),
    [({"seed": 4}, 6), ({"temperature": 1.0}, 6), ({"max_tokens": 21}, 6), ({"template": "plain"}, 6), ({}, 0)],
)
def test_other_settings_draw_anew(tmp_path: Path, change: dict, slices: int) -> None:
    run(tmp_path)
    backend = DigitBackend()
    settings = SETTINGS.model_copy(update=change)
    evaluate(worker(backend), BENCHMARKS, settings, model="some/model", backend="fake", suite="", folder=tmp_path)
    assert len(backend.calls) == slices


def test_a_corrected_gold_answer_and_other_weights_draw_anew(tmp_path: Path) -> None:
    run(tmp_path, benchmarks=BENCHMARKS[:1])
    corrected = [*problems(6), *problems(7, "5")[6:]]
    backend = DigitBackend()
    run(tmp_path, backend, [Benchmark("easy", corrected)])
    assert len(backend.calls) == 1

    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    identities = set()
    for content in (b"12", b"123"):
        weights.write_bytes(content)
        identities.add(evaluation_module.model_identity(str(weights.parent)))
    assert len(identities) == 2


def test_in_memory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, int, int]] = []
    result = run_benchmark(
        worker(DigitBackend()),
        BENCHMARKS[0],
        SETTINGS,
        progress=lambda *news: seen.append(news),
    )
    assert result.questions == 7
    assert result == run(tmp_path / "folder").benchmarks[0]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert seen[-1] == ("easy", 28, 28)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_failed_gradings_are_counted_and_code_has_no_majority() -> None:
    settings = SETTINGS.model_copy(update={"verifier": "code"})
    benchmark = Benchmark("code", [*problems(2), *problems(3, "crash")[2:]])
    result = run_benchmark(worker(DigitBackend()), benchmark, settings)
    assert result.failures == {"timeout": 4}
    assert result.maj is None


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [(Benchmark("none", []), "'none' has no problems"), (Benchmark("twice", problems(2) + problems(1)), "id 'p0'")],
)
def test_benchmarks_that_cannot_be_evaluated(tmp_path: Path, benchmark: Benchmark, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, benchmarks=[benchmark])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    backend = DigitBackend()
    with pytest.raises(UserError, match="cannot be written"):
        run(file, backend)
    assert not backend.calls  # before any work is lost


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', "{", '{"format": 1, "model": "x"}'])
def test_damaged_evaluations_are_one_line_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=r"evaluation\.json: not an evaluation") as error:
        EvaluationResult.read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_evaluation_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `delta eval` first"):
        EvaluationResult.read(tmp_path)


def test_greedy_samples_are_all_alike_and_so_refused() -> None:
    with pytest.raises(ValueError, match="set samples = 1"):
        EvaluationSettings(temperature=0, samples=2)


def test_a_real_policy_is_evaluated_the_same_with_and_without_interruption(tmp_path: Path) -> None:
    """The numpy Qwen3 with random weights, its tokenizer and the embedded task, through the shipped suite."""
    model = tmp_path / "model"
    write_qwen3(model, vocab_size=258, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16)
    write_tokenizer(model)
    suite = load_suite("arithmetic").with_settings(samples=2, max_tokens=5)
    benchmarks = load_benchmarks(suite.benchmarks, limit=10)
    tokenizer = Tokenizer.load(str(model))

    def evaluated(folder: Path, only: int | None = None) -> EvaluationResult:
        chosen = [Benchmark(each.name, each.problems[:only]) for each in benchmarks]
        engine = create("fake", BackendSettings.of(str(model)))
        return evaluate(
            RolloutWorker(engine, tokenizer, BoxGrader(), suite.settings.template),  # type: ignore[arg-type]
            chosen,
            suite.settings,
            model=str(model),
            backend="fake",
            suite=suite.name,
            folder=folder,
        )

    evaluated(tmp_path / "parts", only=4)
    assert evaluated(tmp_path / "parts") == evaluated(tmp_path / "whole")
    for line in lines(tmp_path / "whole", "add 2 digits"):
        assert 1 <= line["tokens"] <= 5
        assert line["tokens"] == 5 or not line["truncated"]
