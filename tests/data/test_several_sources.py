"""Several weighted sources: their shares, what is held out, and the recipes that name them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from delta_cli.api.show_data import show_data
from delta_cli.data.loading import load_problems
from delta_cli.data.problem import Problem
from delta_cli.data.prompt_order import BLOCK, PromptOrder
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, parse_recipe
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.document import to_toml
from delta_cli.recipe.loading import differences, load_recipe
from delta_cli.runs.folder import read_lines
from tests.harness import assert_same, make_recipe, train
from tests.training.test_resume import run_to_end

WEIGHTS = {"easy": 3.0, "hard": 1.0, "rare": 1e-6}


def pool(sizes: dict[str, int]) -> list[Problem]:
    return [Problem(f"{name}:{i}", f"{name} {i}", i, name) for name, size in sizes.items() for i in range(size)]


def test_shares_are_exact_in_a_block_and_epochs_are_whole() -> None:
    order = PromptOrder(pool({"easy": 7, "hard": 5, "rare": 2}), 4, WEIGHTS)
    drawn = [each for step in range(2 * BLOCK // 40) for each in order.batch(step, 40)]
    for block in (drawn[:BLOCK], drawn[BLOCK:]):
        shares = Counter(each.source for each in block)
        assert shares == {"easy": 749, "hard": 250, "rare": 1} or shares == {"easy": 750, "hard": 249, "rare": 1}
    for name, size in (("easy", 7), ("hard", 5), ("rare", 2)):
        own = [each.id for each in drawn if each.source == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert (
        len({tuple(each.source for each in drawn[:50]), tuple(each.source for each in drawn[BLOCK : BLOCK + 50])}) == 2
    )


def test_a_step_needs_no_step_before_it_and_batches_may_span_blocks() -> None:
    problems = pool({"easy": 7, "hard": 5, "rare": 2})
    whole = PromptOrder(problems, 4, WEIGHTS).batch(0, 3 * BLOCK)
    assert PromptOrder(problems, 4, WEIGHTS).batch(3, 700) == whole[2100:2800]
    assert PromptOrder(problems, 5, WEIGHTS).batch(3, 700) != whole[2100:2800]


def write(path: Path, questions: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": each, "answer": "1"}) + "\n" for each in questions))
    return str(path)


@pytest.fixture
def mixture(tmp_path: Path) -> dict[str, Any]:
    first = write(tmp_path / "a.jsonl", [f"a{i}?" for i in range(20)])
    second = write(tmp_path / "b.jsonl", [f"a{i}?" for i in range(5)] + [f"b{i}?" for i in range(10)])
    return {"a": {"source": first, "weight": 3.0}, "b": {"source": second}}


def test_a_problem_of_two_sources_is_in_one(mixture: dict[str, Any]) -> None:
    """Otherwise one could be trained on in one source and held out in the other."""
    loaded = load_problems(DataSection.model_validate({"sources": mixture, "held_out": 0.2}))
    everything = [*loaded.problems, *loaded.held_out]
    assert len({each.question for each in everything}) == len(everything) == loaded.report.kept
    assert len({each.id for each in everything}) == len(everything)
    assert {each.id.partition(":")[0] for each in everything} == {"a", "b"} == {each.source for each in everything}
    assert sum(each.question.startswith("a") for each in everything) == 20
    assert loaded.report.read == 35


def test_held_out_problems_of_the_sources_are_mixed() -> None:
    sources = {"sums": {"limit": 200}, "words": {"source": "word_problems", "limit": 100}}
    data = DataSection.model_validate({"sources": sources, "held_out": 0.3, "template": "plain"})
    held_out = load_problems(data).held_out
    assert Counter(each.source for each in held_out) == {"sums": 60, "words": 30}
    assert Counter(each.source for each in held_out[:30]) == {"sums": 20, "words": 10}
    assert all(each.kind.startswith(each.source) for each in held_out)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sources": {"a": {"source": "x.jsonl"}}, "limit": 3}, "data.limit = 3 is for a single source"),
        ({"sources": {"A b": {}}}, "use small letters"),
        (
            {"sources": {"a": {"columns": ["unit"]}, "b": {}}, "template": "{question} in {unit}"},
            r"names {unit}, which data.sources.b does not load; add it to data.sources.b.columns",
        ),
        ({"sources": {"a": {"weight": 0.0}}}, "greater than 0"),
        ({"sources": {"a": {"held_out": 0.1}}}, "held_out"),
    ],
)
def test_mistakes(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSection.model_validate(table)


def test_a_source_that_another_holds_is_named(mixture: dict[str, Any]) -> None:
    again = {"sources": {"a": mixture["a"], "again": mixture["a"]}, "template": "plain"}
    with pytest.raises(UserError, match=r"data\.sources\.again: no problem is left that an earlier source"):
        load_problems(DataSection.model_validate(again))


def test_the_recipe_as_a_file(mixture: dict[str, Any], tmp_path: Path) -> None:
    recipe = parse_recipe({"data": {"sources": mixture}}, "test")
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe))
    assert load_recipe(file) == recipe
    changed = load_recipe(file, ("data.sources.b.weight=2.5",))
    assert changed.data.weights == {"a": 3.0, "b": 2.5}
    ((name, line),) = differences(recipe, changed)
    assert name == "data.sources"
    assert "weight = 2.5" in line
    assert recipe.data.title == "a + b"
    assert Recipe().data.weights == {}
    shown = show_data(str(file), "tiny-base")
    assert {each.id.partition(":")[0] for each in shown.problems} == {"a", "b"}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"source": "data.source.jsonl"}, "data.sources.mine.source: data.source.jsonl: no such file"),
        ({"source": "odd.jsonl"}, "data.sources.mine: odd.jsonl:1: no column 'question'"),
        ({"source": "odd.jsonl", "question": "q", "filter": "level > 2"}, "data.sources.mine.filter: 'level > 2'"),
    ],
)
def test_a_message_names_its_source(
    own: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.jsonl").write_text('{"q": "1+1=?", "answer": "2", "level": []}\n')
    data = {"sources": {"sums": {"limit": 5}, "mine": own}, "template": "plain"}
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        load_problems(DataSection.model_validate(data))


def test_a_run_on_two_sources_resumes_to_the_bit(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        model,
        data__operation=None,
        data__digits=None,
        data__limit=None,
        data__held_out=0.2,
        data__template="plain",
        data__sources__sums__limit=12,
        data__sources__sums__weight=2.0,
        data__sources__products__limit=12,
        data__sources__products__operation="multiply",
        data__sources__products__digits=1,
        rollout__max_tokens=8,
        evaluation__problems=4,
        evaluation__every=2,
        checkpoint__every=3,
        run__steps=5,
    )
    train(recipe, tmp_path / "straight")
    assert run_to_end(recipe, tmp_path / "stopped") >= 2
    assert_same(tmp_path / "straight", tmp_path / "stopped")
    assert any("accuracy_sums" in record for record in read_lines(tmp_path / "straight" / "metrics.jsonl"))
