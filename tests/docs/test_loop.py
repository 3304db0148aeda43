"""docs/loop.py makes the same update as the trainer, and it learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from backends import registry
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.data import arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import load_recipe
from delta_cli.recipe.data import Arithmetic
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.update import Updater

FILE = Path(__file__).parents[2] / "docs" / "loop.py"
LOOP = runpy.run_path(str(FILE))


def test_its_update_is_the_trainers() -> None:
    """Both update the same weights on one batch: equal gradient norms, and equal log-probs afterwards."""
    model = model_path("tiny-base")
    tokenizer = Tokenizer.load(model)
    learners = [registry.create("fake", BackendSettings.of(model, optimizer=LOOP["OPTIMIZER"])) for _ in range(2)]
    problems = arithmetic.problems(Arithmetic(), 4, seed=3, split="train")
    sequences = LOOP["rollout"](learners[0], tokenizer, problems, 0)
    rewards = LOOP["grade"](sequences, tokenizer, problems)
    assert 0 < rewards.mean() < 1
    groups = np.repeat(np.arange(4), LOOP["RESPONSES"])
    norms = LOOP["update"](learners[0], sequences, rewards, groups)

    recipe = load_recipe(None, ["rollout.prompts=4", f"update.learning_rate={LOOP['LEARNING_RATE']}"])
    batch = RolloutBatch(
        problems=tuple(problems),
        sequences=sequences,
        texts=("",) * len(sequences),
        verdicts=tuple(Verdict(float(value), bool(value), None) for value in rewards),
        truncated=np.zeros(len(sequences), dtype=bool),
        engine_logprobs=np.zeros(len(sequences.tokens), np.float32),
    )
    updater = Updater(recipe, learners[1])
    scored = updater.score(batch)
    updates = updater.update(scored, updater.credit(scored, 0), 0)
    assert norms == pytest.approx(updates.norms, rel=1e-9)
    assert len(norms) > 1
    scores = [learner.score(sequences).logprobs for learner in learners]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-9)


@pytest.mark.long
def test_it_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    accuracies = LOOP["main"](12, "cpu")
    assert np.mean(accuracies[-3:]) > np.mean(accuracies[:3]) + 0.1
    assert "step  12/12" in capsys.readouterr().out


def test_it_can_be_read_at_one_sitting() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 130
