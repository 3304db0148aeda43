"""What the bench measures, against hand-worked examples and vectors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from delta_cli.bench.arms import ARMS, find_arms, own_arm
from delta_cli.bench.letters import FORM, KEY, chain_reward, deciding_characters, fork_reward
from delta_cli.bench.runner import plan, records, run
from delta_cli.bench.solver import token_marks
from delta_cli.bench.solver_credits import first_mistake, flipped, solver
from delta_cli.bench.tasks import TASKS, find_tasks
from delta_cli.bench.units import ADAPTERS, Unit, _cosine, measure, mistake_aucs
from delta_cli.credit.weight_functions import CreditInput
from delta_cli.errors import UserError
from delta_cli.training.update import Updater

SHORT = ("run.steps=2", "rollout.prompts=4", "rollout.responses=4", "update.mini_batches=2", "data.limit=60")


def batch(texts: list[str], question: str, answer: str, advantages: list[float]) -> CreditInput:
    """Responses of one character a token."""
    starts = np.cumsum([0, *map(len, texts)])
    tokens = np.frombuffer("".join(texts).encode(), np.uint8).astype(np.int64)
    count = len(tokens)
    return CreditInput(
        np.full(count, -1.0),
        np.ones(count),
        np.array(advantages),
        np.zeros(len(texts), np.int64),
        starts,
        tokens,
        questions=[question] * len(texts),
        answers=[answer] * len(texts),
        pieces=lambda row: list(texts[row]),
    )


def marked(given: CreditInput, marks: np.ndarray) -> list[str]:
    text = bytes(given.tokens.astype(np.uint8)).decode()
    return ["".join(text[i] for i in range(a, b) if marks[i]) for a, b in pairwise(given.starts)]


def test_the_solver_marks_the_first_wrong_token_of_an_addition() -> None:
    right, wrong = "7+8=15 4+3+1=8 \\boxed{85}", "7+8=14 4+3+1=8 \\boxed{84}"
    given = batch([right, wrong], "47+38=?", "85", [1.0, -1.0])
    marks = token_marks(given)
    assert marked(given, marks.wrong) == ["", "4"]
    assert marked(given, marks.decisive) == ["7815431885", "7814431884"]
    assert marked(given, first_mistake(given) > 0) == ["", "4"]
    assert marked(given, solver(given) > 0) == ["7815431885", "4"]
    assert marked(given, flipped(given) > 0) == ["+= ++= \\boxed{}", "7+8=1 4+3+1=8 \\boxed{84}"]


def test_the_solver_marks_the_first_false_equation_of_a_word_problem() -> None:
    given = batch(["2 * 5 = 10, 10 + 1 = 12, 1 + 1 = 3"], "How many?", "11", [-1.0])
    assert marked(given, token_marks(given).wrong) == ["2"]


def test_the_solver_marks_the_letter_that_decides() -> None:
    texts = ["abcdefgh a bda", "abcdefgh c caa", "abcdefgh ab", "abcdefgha", "abcdefgh "]
    given = batch(texts, "47+38=?", "85", [1.0, -1.0, -1.0, -1.0, -1.0])
    marks = token_marks(given)
    assert marked(given, marks.wrong) == ["", "c", "b", "a", " "]
    assert np.flatnonzero(marks.decisive).tolist() == [9, 14 + 9, 28 + 9, 28 + 10, 39 + 8, 48 + 8]
    assert marked(given, solver(given) > 0) == ["a", "c", "b", "a", " "]
    assert [fork_reward(text, None) for text in texts] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_letter_behind_each_tag_decides_a_chain() -> None:
    right = FORM.replace("F", "h")
    for place, letter in zip([i for i, c in enumerate(FORM) if c == "D"], KEY.values(), strict=True):
        right = right[:place] + letter + right[place + 1 :]
    assert right.startswith("then we take Kc from hhhhhhhh. then we take La from ")
    texts = [right, right.replace("La", "Ld").replace("Nb", "Na"), right.replace("Md", "Mx"), right + "t", right[:-1]]
    expected = [[], [45, 107], [76], [186], [185]]
    assert [deciding_characters(text)[1] for text in texts] == expected
    assert [chain_reward(text, None) for text in texts] == [1.0, 0.0, 0.0, 0.0, 0.0]
    ended = [f"{text}!" for text in texts]  # a token more, for the end of sequence
    given = batch(ended, "47+38=?", "85", [1.0, -1.0, -1.0, -1.0, -1.0])
    given = replace(given, pieces=lambda row: [*texts[row], "<|endoftext|>"])
    assert np.flatnonzero(token_marks(given).wrong).tolist() == [
        given.starts[row] + place for row, places in enumerate(expected) for place in places
    ]
    assert marked(given, solver(given) > 0)[:3] == ["cadbac", "da", "x"]


def test_aucs_by_hand() -> None:
    weights = np.array([3.0, 1.0, 3.0, 5.0, 2.0, 9.0, 1.0])
    marks = np.array([True, False, False, False, False, True, False])
    found = list(mistake_aucs(weights, marks, np.array([0, 4, 7]), np.array([True, True])))
    assert found == [pytest.approx((1 + 0.5 + 0) / 3), 1.0]
    assert list(mistake_aucs(weights, marks, np.array([0, 4, 7]), np.array([False, False]))) == []


def test_the_cosine_of_norms_is_that_of_vectors() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 7))
    expected = a @ b / np.sqrt((a @ a) * (b @ b))
    assert _cosine(a @ a, b @ b, (a + b) @ (a + b)) == pytest.approx(expected)
    assert _cosine(0.0, 1.0, 1.0) == 0


def test_a_gradient_on_the_fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cosine of a gradient with itself is 1, and a random credit has another gradient."""
    from delta_cli.bench import units

    monkeypatch.setattr(units, "REFERENCE", 4)
    monkeypatch.setattr(units, "MINI_BATCHES", 2)
    monkeypatch.setattr(units, "MINI_BATCH", 2)
    unit = Unit("gradient", TASKS["addition"], ARMS["dapo"], 0, "fake", SHORT)
    found = measure(unit)
    assert -1 <= found["cosine"] <= 1
    assert found["norm"] > 0
    assert found["ratio"] > -1
    with units._trainer(unit) as trainer:
        drawn = units._batch(trainer, 0, 4)
        own = units._Gradients(Updater(unit.recipe(), trainer.learner), drawn)
        square = own.square(np.arange(4))
        assert _cosine(square, square, own.square(np.arange(4), own, np.arange(4))) == pytest.approx(1.0)
    random = measure(Unit("gradient", TASKS["addition"], ARMS["random"], 0, "fake", SHORT))
    assert random["cosine"] != found["cosine"]


def test_the_solvers_own_mark_is_found_always(monkeypatch: pytest.MonkeyPatch) -> None:
    from delta_cli.bench import units

    monkeypatch.setattr(units, "MEASURED_STEPS", (0,))
    found = measure(Unit("finding", TASKS["addition"], ARMS["solver"], 0, "fake", SHORT))
    assert found["responses_0"] > 0
    assert found["auc_0"] == 1.0
    plain = measure(Unit("finding", TASKS["addition"], ARMS["wrong side × 0.5"], 0, "fake", SHORT))
    assert plain["auc_0"] == 0.5


def test_a_run_is_measured() -> None:
    unit = Unit("learning", TASKS["addition"], ARMS["random"], 3, "fake", SHORT)
    found = measure(unit)
    assert len(found["curve"]) == 2
    assert found["area"] == pytest.approx(np.mean(found["curve"]), abs=1e-4)
    assert found["key"] == ("learning", "addition", "random", "3", "full", *SHORT)
    assert found["peak_memory"] > 0


def test_a_protocol_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = list(plan([TASKS["addition"]], [ARMS["dapo"]], range(2), "fake", True, SHORT))
    assert [(unit.question, unit.seed) for unit in units] == [
        ("gradient", 0),
        ("learning", 0),
        ("gradient", 1),
        ("learning", 1),
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"key": unit.key}) + "\n" for unit in units))
    said: list[str] = []
    run(units, file, 1, said.append)
    assert said == []


def test_the_full_protocol_has_recipes_for_all_of_its_units() -> None:
    tasks = [TASKS["addition"], TASKS["noisy"]]
    units = list(plan(tasks, list(ARMS.values()), range(9), "cpu", False))
    assert len({unit.key for unit in units}) == len(units)
    first = [unit for unit in units if unit.seed == 0]
    assert [unit.task.name for unit in first if unit.question == "adapters"] == ["addition"]
    for adapter in ADAPTERS.values():
        lora = first[0].recipe(*adapter).model.lora
        assert (lora is not None) == bool(adapter)
    hints = {unit.arm.name: unit.recipe(*unit.arm.changes).method.hint for unit in first}
    assert {name: hint for name, hint in hints.items() if hint} == dict.fromkeys(("rlsd", "cort"), tasks[0].hint)
    assert {unit.question for unit in units if unit.seed == 8} == {"learning"}


@pytest.mark.long
def test_adapters_are_compared_on_the_same_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full weights agree with themselves, and after no update DoRA agrees with them too, but for rounding."""
    from delta_cli.bench import units

    monkeypatch.setattr(units, "MEASURED_STEPS", (0,))
    monkeypatch.setattr(units, "ADAPTERS", {name: units.ADAPTERS[name] for name in ("full", "dora")})
    monkeypatch.setattr(units, "ADAPTER_CREDITS", {name: units.ADAPTER_CREDITS[name] for name in ("delta", "arca")})
    table = measure(Unit("adapters", TASKS["addition"], ARMS["dapo"], 0, "cpu", SHORT))["table"]
    assert table["delta"]["full"]["rank"] == pytest.approx(1, abs=1e-9)
    assert table["delta"]["dora"] == pytest.approx(table["delta"]["full"], abs=1e-3)
    assert table["arca"]["dora"]["auc"] == 0.5  # nothing has moved
    assert table["arca"]["dora"]["rank"] is None


def test_what_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--task nothing: there is no such task; choose from addition"):
        find_tasks(["nothing"], {})
    with pytest.raises(UserError, match="--task words: needs a model; give its folder with --smollm2"):
        find_tasks(["words"], {"--smollm2": None})
    with pytest.raises(UserError, match="--arm nobody: there is no such arm"):
        find_arms(["nobody"])
    with pytest.raises(UserError, match=r"credit file .*absent\.py does not exist"):
        own_arm(f"{tmp_path}/absent.py:weights")
    with pytest.raises(UserError, match=r"--credit nonsense: credit 'nonsense' does not exist.*FILE\.py:FUNCTION"):
        own_arm("nonsense")


def test_a_line_that_a_killed_bench_left_unfinished_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"key": ["a"]}\n{"key": ["b"', encoding="utf-8")
    assert len(records(file)) == 1
    run([], file, 1, print)
    assert file.read_text(encoding="utf-8") == '{"key": ["a"]}\n'


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_workers_end_when_the_bench_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    options = [f"--set={change}" for change in SHORT]
    command = ["bench", "--quick", "--backend=fake", "--jobs=1", f"--out={out}", *options]
    with subprocess.Popen([sys.executable, "-m", "delta_cli", *command], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("1/")
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        workers = children.read_text().split() if children.exists() else []
        running.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
    assert len(records(out / "answers.jsonl")) >= 1
