"""A curriculum by measured pass rates: which problems come, that none starves, and exact resume."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Sequences, starts_of
from delta_cli.data.pass_rates import FILE, read_measured, read_pass_rates, write_pass_rates
from delta_cli.data.problem import Problem
from delta_cli.data.prompt_order import PromptOrder
from delta_cli.recipe import load_recipe
from delta_cli.rewards import grader
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import BatchCollector
from delta_cli.runs.folder import JsonObject, read_lines
from delta_cli.runs.observer import Observer
from tests.harness import assert_same, contents, make_recipe, train, write_model
from tests.rollout.test_async_steps import Dies
from tests.training.test_resume import SMALL, run_to_end
from tests.vllm.server import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def pool(count: int, source: str = "") -> list[Problem]:
    return [Problem(f"{source}{i}", f"{source} question {i}", i, source) for i in range(count)]


def drawn(order: PromptOrder, steps: int, size: int) -> Counter[int]:
    return Counter(place for step in range(steps) for place in order.places(step, size).tolist())


def test_problems_come_in_proportion_to_the_variance_of_their_reward() -> None:
    """One at a time, so that drawing without replacement changes no share; p · (1 − p) by hand."""
    rates = {0: 0.5, 1: 0.25, 2: 0.0, 3: 1.0, 4: 0.9}  # and 5 is not measured
    order = PromptOrder(pool(6), seed=3, exploration=1e-9).after(rates.items())
    steps = 2500
    counts = drawn(order, steps, 1)
    weights = np.array([0.25, 0.1875, 0.0, 0.0, 0.09, 0.25])
    shares = np.array([counts[place] for place in range(6)]) / steps
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=4 * 0.5 / np.sqrt(steps))


@given(count=st.integers(1, 20), size=st.integers(1, 25), exploration=st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_no_problem_starves(count: int, size: int, exploration: float) -> None:
    """Always solved problems come too, once in every epoch of the explored prompts."""
    order = PromptOrder(pool(count), seed=1, exploration=exploration)
    order = order.after((place, float(place % 2)) for place in range(count))
    steps = int(np.ceil((count + 1) / exploration / size))
    assert len(drawn(order, steps, size)) == count


def test_a_batch_repeats_a_problem_only_if_there_are_too_few() -> None:
    order = PromptOrder(pool(12), seed=1, exploration=0.25).after((place, 0.0) for place in range(10))
    for step in range(30):
        assert len(set(order.places(step, 12))) >= 9, "explored prompts may span two epochs"
        assert {10, 11} <= set(order.places(step, 8)), "the only ones that teach anything are in each batch"
    assert len(order.places(0, 40)) == 40


def test_each_source_keeps_its_share() -> None:
    problems = pool(8, "easy") + pool(8, "hard")
    plain = PromptOrder(problems, 4, {"easy": 3.0, "hard": 1.0})
    order = PromptOrder(problems, 4, {"easy": 3.0, "hard": 1.0}, exploration=0.25)
    order = order.after((place, 0.5 if place >= 8 else 1.0) for place in range(16))
    for step in range(40):
        named = [[problem.source for problem in each.batch(step, 30)] for each in (plain, order)]
        assert named[0] == named[1]


def test_what_is_drawn_depends_on_the_latest_rates_alone() -> None:
    order = PromptOrder(pool(50), seed=2, exploration=0.25)
    before = order.places(7, 10).tolist()
    later = order.after([(0, 0.25), (1, 1.0), (0, 0.75)])
    again = PromptOrder(pool(50), seed=2, exploration=0.25).after([(1, 0.0)]).after([(1, 1.0), (0, 0.75)])
    np.testing.assert_array_equal(later.pass_rates, again.pass_rates)
    assert later.places(7, 10).tolist() == again.places(7, 10).tolist()
    assert order.places(7, 10).tolist() == before, "an order does not change"


def test_the_rates_of_groups_leave_out_responses_without_a_verdict() -> None:
    marks = "1100" + "1v0v" + "vvvv"
    verdicts = tuple(Verdict(0.0, mark == "1", None if mark != "v" else "judge", void=mark == "v") for mark in marks)
    sequences = Sequences((np.array([1]),) * 12, np.zeros(0, np.int64), starts_of([0] * 12))
    flat = np.zeros(0, np.float32)
    batch = RolloutBatch(tuple(pool(3)), sequences, ("",) * 12, verdicts, np.zeros(12, bool), flat)
    np.testing.assert_array_equal(batch.group_pass_rates, [0.5, 0.5, np.nan])


def test_the_recipes_exploration_reaches_the_order() -> None:
    assert load_recipe(None, ["data.curriculum_exploration=0.5"]).data.exploration == 1.0, "without a curriculum"
    assert load_recipe(None, ["data.curriculum=pass_rate"]).data.exploration == 0.25
    recipe = load_recipe(None, ["data.curriculum=pass_rate", "data.curriculum_exploration=0.5"])
    collector = BatchCollector(
        recipe, *(SimpleNamespace() for _ in range(2)), pool(9), Observer(), lambda: None, lambda: None
    )
    assert collector._order.places(3, 4).tolist() == PromptOrder(pool(9), 0, exploration=0.5).places(3, 4).tolist()


def test_the_file_of_rates(tmp_path: Path) -> None:
    problems = [*pool(3), Problem("chat", "why?", "", turns=({"role": "user", "content": "hello"},))]
    write_pass_rates(tmp_path / FILE, problems, np.array([1 / 3, np.nan, 0.0, 1.0]))
    assert read_measured(tmp_path / FILE) == [(0, 1 / 3), (2, 0.0), (3, 1.0)]
    rates = read_pass_rates(str(tmp_path / FILE))
    assert sorted(rates.values()) == [0.0, 1 / 3, 1.0]
    assert "why?" not in rates, "a question after other turns is another problem"
    assert read_measured(tmp_path / "none") == []


# --------------------------------------------------------------------------------------- whole runs

KEYS: dict[str, Any] = {"data__curriculum": "pass_rate", "reward__length_penalty": None}


@pytest.fixture
def short_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short responses of the random model are right by chance, but not to every third problem."""

    def quick(response: str, problem: Problem) -> float:
        return float(int(problem.answer) % 3 > 0 and len(response) < 9)

    monkeypatch.setattr(grader, "quick_verifier", lambda *_: quick)


DYNAMIC = {"rollout__dynamic_sampling": True, "rollout__dynamic_sampling_limit": 3}


@pytest.mark.usefixtures("short_is_right")
@pytest.mark.parametrize(
    ("more", "steps"), [({}, 5), pytest.param(DYNAMIC, 6, marks=pytest.mark.long)], ids=["plain", "dynamic"]
)
def test_a_run_that_is_stopped_again_and_again_draws_the_same(
    more: dict[str, Any], steps: int, model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(model, **(SMALL | KEYS | more), run__steps=steps)
    train(recipe, tmp_path / "straight")
    assert run_to_end(recipe, tmp_path / "stopped") >= 2
    assert_same(tmp_path / "straight", tmp_path / "stopped")
    newest = [
        folder / f"checkpoints/step-00000{steps}" / FILE for folder in (tmp_path / "straight", tmp_path / "stopped")
    ]
    assert newest[0].read_text() == newest[1].read_text()
    _check_records(list(read_lines(tmp_path / "straight/metrics.jsonl")), newest[0], bool(more))


def _check_records(records: list[JsonObject], file: Path, dynamic: bool) -> None:
    """The metrics of the last step against the file; a batch that dynamic sampling chose hides what was drawn."""
    rates = [rate for _, rate in read_measured(file)]
    assert records[-1]["problems_measured"] == len(rates) / 12
    assert records[-1]["problems_always_solved"] == pytest.approx(rates.count(1.0) / len(rates))
    assert records[-1]["problems_never_solved"] == pytest.approx(rates.count(0.0) / len(rates))
    assert len(set(rates)) > 1
    same = [record["pass_rate_drawn"] == pytest.approx(record["accuracy"]) for record in records]
    assert all(same) != dynamic


@pytest.mark.long
@pytest.mark.usefixtures("short_is_right")
def test_a_crashed_run_with_batches_drawn_ahead_goes_on_to_the_bit(model: Path, tmp_path: Path) -> None:
    """What chooses a batch are the rates of the batches used when it was started, however fast anything is."""
    keys = KEYS | {"data__limit": 16, "engine__kind": "vllm", "engine__async_steps": 2, "run__steps": 7}
    for name, resume in (("whole", False), ("parts", False), ("parts", True)):
        with serving(model) as (_, url):
            recipe = make_recipe(model, engine__url=[url], evaluation__every=3, **keys)
            with pytest.raises(RuntimeError) if (name, resume) == ("parts", False) else nullcontext():
                train(
                    recipe, tmp_path / name, resume=resume, observer=Dies() if name == "parts" and not resume else None
                )
    whole, parts = (contents(tmp_path / name) for name in ("whole", "parts"))
    for name in whole.keys() - {"recipe.toml", "state.json"}:  # the addresses of the servers differ
        np.testing.assert_equal(parts[name], whole[name], name)
    files = [(tmp_path / name / "checkpoints/step-000007" / FILE).read_text() for name in ("whole", "parts")]
    assert files[0] == files[1] != ""
