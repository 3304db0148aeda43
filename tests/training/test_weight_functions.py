"""method.credit as a function in a file: what it reads, what its weights do, and what goes wrong in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.interface import Sequences
from backends.settings import BackendSettings
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import Watcher, make_recipe, train, write_model

ONE_STEP = {"run__steps": 1, "evaluation__every": "never", "checkpoint__rollouts_every": 1, "method__preset": "dapo"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def credit_file(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\n{text}\n", encoding="utf-8")
    return f"{path}:weights"


def recorded(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """The responses of the first step."""
    train(recipe, folder)
    return list(read_lines(RunFolder(folder).rollout_file(1)))


def weights_of(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([row["coefficients"] for row in rows])


def test_its_weights_are_those_that_are_recorded(model: Path, tmp_path: Path) -> None:
    """From everything that a weight function reads; expected values are computed from the record."""
    text = """
def weights(batch, features):
    assert [len(batch.questions), len(batch.answers)] == [len(batch.advantages)] * 2
    assert len("".join(batch.pieces(0))) > 0 and features.weighted_sum(np.ones((1, len(batch.tokens)))).shape == (1, 16)
    return 1 - batch.logprobs + 10 * batch.entropies + 0.5 * batch.rows + batch.step + (batch.token_advantages > 0)
"""
    rows = recorded(make_recipe(model, **ONE_STEP, method__credit=credit_file(tmp_path, text)), tmp_path / "run")
    expected = [
        1 - logprob + 10 * entropy + 0.5 * index + (row["advantage"] > 0)
        for index, row in enumerate(rows)
        for logprob, entropy in zip(row["logprobs"], row["entropies"], strict=True)
    ]
    np.testing.assert_allclose(weights_of(rows), expected, atol=2e-5)


def test_weights_of_1_are_dapo_bit_for_bit(model: Path, tmp_path: Path) -> None:
    credit = credit_file(tmp_path, "def weights(batch):\n    return np.ones(len(batch.tokens))")
    plain, own = Watcher(), Watcher()
    train(make_recipe(model, method__preset="dapo"), tmp_path / "dapo", observer=plain)
    train(make_recipe(model, method__preset="dapo", method__credit=credit), tmp_path / "own", observer=own)
    for name in ("loss", "grad_norm", "accuracy", "entropy_mean"):
        assert [record[name] for record in plain.records] == [record[name] for record in own.records]
    assert "coefficient_mean" not in plain.records[0]
    assert own.records[0]["coefficient_mean"] == 1


def test_normalise_and_weight_negative_act_on_any_credit(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        model, **ONE_STEP, method__credit="surprisal", method__normalise="side", method__weight_negative=0.25
    )
    rows = recorded(recipe, tmp_path / "run")
    for sign, mean in ((1, 1.0), (-1, 0.25)):
        side = weights_of([row for row in rows if np.sign(row["advantage"]) == sign])
        assert side.mean() == pytest.approx(mean, abs=1e-6)
        assert side.std() > 1e-3  # the log-probabilities of this random model are all near log 258


def test_a_hint_takes_the_place_of_the_question_in_a_second_forward_pass(model: Path, tmp_path: Path) -> None:
    """Against the engine itself, on prompts that are written out here."""
    text = "def weights(batch):\n    return 100 + batch.hinted_logprobs"
    credit = credit_file(tmp_path, text)
    recipe = make_recipe(model, **ONE_STEP, method__credit=credit, method__hint="{answer} answers {question}")
    rows = [row for row in recorded(recipe, tmp_path / "run") if row["advantage"]]
    tokenizer = Tokenizer.load(str(model))
    engine = registry.create("fake", BackendSettings.of(str(model)))
    assert len(rows) > 1
    for row in rows:
        prompt = tokenizer.encode(
            f"{row['answer']} answers {row['prompt']}"
        )  # the chat template adds a line break alone
        tokens = np.array(row["tokens"])
        scored = engine.score(Sequences((prompt,), tokens, np.array([0, len(tokens)]))).logprobs
        np.testing.assert_allclose(np.array(row["coefficients"]) - 100, scored, atol=1e-4)


def test_arca_weighs_by_what_training_has_moved(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, **(ONE_STEP | {"run__steps": 2}), method__credit="arca", method__hidden_residuals=True)
    train(recipe, tmp_path)
    first, second = (list(read_lines(RunFolder(tmp_path).rollout_file(step))) for step in (1, 2))
    assert set(weights_of(first)) == {1.0}  # nothing has moved yet
    learned = [np.array(row["coefficients"]) for row in second if row["advantage"]]
    assert max(weights.std() for weights in learned) > 0.05
    assert [weights.mean() for weights in learned] == pytest.approx([1.0] * len(learned), abs=1e-5)


@pytest.mark.parametrize(("credit", "needed"), [("rlsd", "hint"), ("cort", "hint"), ("arca", "hidden_residuals")])
def test_a_credit_that_needs_a_second_forward_pass_says_so(credit: str, needed: str, model: Path) -> None:
    with pytest.raises(UserError, match=f'method.credit = "{credit}" needs method.{needed}'):
        make_recipe(model, method__credit=credit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def weights(batch):\n    return np.ones(3)", r"mine.py:weights returned shape \[3\]; it must return one"),
        ("def weights(batch):\n    return -np.ones(len(batch.tokens))", "the weight -1.0; weights must be finite"),
        ("def other(batch):\n    pass", r"has no function 'weights'; define weights\(batch\) -> weights \[N\]"),
        ("def weights(a, b, c):\n    pass", "or with features as a second parameter"),
        ("1 / 0", "does not run: ZeroDivisionError"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, message: str, model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, **ONE_STEP, method__credit=credit_file(tmp_path, text))
    with pytest.raises(UserError, match=message):
        train(recipe, tmp_path / "run")


def test_a_credit_that_does_not_exist_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"method\.credit"):
        make_recipe(model, method__credit="nonsense")
