"""A local reward model, against transformers' own pipeline on the same weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward, RewardModelSection
from delta_cli.rewards.grader import Grader, GroupPlace, ResponseGroups, Verdict
from delta_cli.rewards.reward_model import model_scores, reward_of
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import contents, train
from tests.rollout.test_rewards import several

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROBLEM = Problem("1", "What is 12 + 30?", "42", turns=({"role": "user", "content": "Hi"},))
RESPONSES = ("42", "It is 43, I think.", "", "It is 42 because 12 + 30 = 42.")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_reward_model(folder: Path, policy: Path, template: str | None = TEMPLATE, labels: int = 1) -> Path:
    """A folder with a random classifier of 8 hidden units and the policy's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_labels, config.pad_token_id, config.max_position_embeddings = labels, tokenizer.pad_token_id, 256
    if labels > 1:
        config.id2label = {number: ("bad", "fair", "good")[number] for number in range(labels)}
    model = transformers.LlamaForSequenceClassification(config)
    model.score.weight.data *= 100
    model.save_pretrained(folder)
    return folder


def pipeline_logits(folder: Path, texts: Sequence[Any]) -> list[list[float]]:
    """The logits of all labels for each text, one at a time, by transformers' pipeline."""
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    found = [pipeline(text, top_k=None, function_to_apply="none") for text in texts]
    return [[entry["score"] for entry in sorted(each, key=lambda entry: entry["label"])] for each in found]


def rendered(response: str) -> str:
    return f"user: Hi\nuser: What is 12 + 30?\nassistant: {response}\n"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_the_pipeline(batch_size: int, model: Path, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "rm", model)
    score = model_scores(RewardModelSection(path=str(folder), batch_size=batch_size, device="cpu"))
    expected = [row[0] for row in pipeline_logits(folder, [rendered(response) for response in RESPONSES])]
    assert max(expected) - min(expected) > 0.01, "the responses would have one score whatever is computed"
    assert score(RESPONSES, PROBLEM) == pytest.approx(expected, abs=1e-5)


def test_a_label_is_chosen_by_name_and_without_a_template_texts_are_a_pair(model: Path, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "rm", model, template=None, labels=3)
    score = model_scores(RewardModelSection(path=str(folder), label="good", device="cpu"))
    pairs = [{"text": "Hi\n\nWhat is 12 + 30?", "text_pair": response} for response in RESPONSES]
    expected = [row[2] for row in pipeline_logits(folder, pairs)]  # bad, fair, good
    assert score(RESPONSES, PROBLEM) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match=r"rm: reward.model.label = None; the model's labels are bad, fair, good"):
        model_scores(RewardModelSection(path=str(folder), device="cpu"))


def test_a_logit_becomes_a_reward() -> None:
    """Worked by hand: sigmoid(ln 3) = 3/4."""
    settings = RewardModelSection(path="x", sigmoid=True, scale=2.0)
    assert reward_of(math.log(3), settings) == pytest.approx(1.5, abs=1e-12)
    assert reward_of(-1000.0, settings) == 0.0
    assert reward_of(-3.0, RewardModelSection(path="x", scale=2.0, clip=5.0)) == -5.0
    assert reward_of(3.0, RewardModelSection(path="x")) == 3.0


def graded(grader: Grader, responses: Sequence[str]) -> list[Verdict]:
    groups = ResponseGroups(len(responses))
    futures = [
        grader.submit(response, PROBLEM, 1, False, place=GroupPlace(groups, 0, place))
        for place, response in enumerate(responses)
    ]
    return [future.result(timeout=120) for future in futures]


@pytest.mark.long
def test_a_chat_that_is_too_long_has_no_verdict(model: Path, tmp_path: Path) -> None:
    """In a process of its own; the other responses of the group have their scores."""
    folder = write_reward_model(tmp_path / "rm", model)
    expected = [row[0] for row in pipeline_logits(folder, [rendered(response) for response in RESPONSES])]
    threshold = sorted(expected)[1] + 1e-3
    settings = RewardModelSection(path=str(folder), device="cpu", right=threshold)
    with Grader(Reward(kind="model", model=settings, workers=7)) as grader:
        *found, long = graded(grader, (*RESPONSES, "x" * 500))
        assert [verdict.reward for verdict in found] == pytest.approx(expected, abs=1e-5)
        assert [verdict.correct for verdict in found] == [value >= threshold for value in expected]
        assert long.void
        assert "reward.model.max_length" in str(long.failure)
        assert not any(verdict.void for verdict in found)


def test_a_model_without_a_trained_head_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"score.weight.*not a trained reward model"):
        model_scores(RewardModelSection(path=str(model), device="cpu"))


@pytest.mark.long
def test_a_worker_refuses_a_model_without_a_trained_head(model: Path) -> None:
    with Grader(Reward(kind="model", model=RewardModelSection(path=str(model), device="cpu"))) as grader:
        with pytest.raises(UserError, match=r"score.weight.*not a trained reward model"):
            grader.check(PROBLEM)
        (verdict,) = graded(grader, ["42"])
        assert verdict.void  # a model that cannot be loaded gives no zeros


@pytest.mark.long
def test_a_run_scores_with_it_and_resumes_to_the_bit(model: Path, tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "rm", model)
    reward = {"kind": "model", "model": {"path": str(folder), "device": "cpu"}}
    recipe = several(model, [{"kind": "math", "weight": 0.0}, reward], run__steps=2, evaluation__every="never")
    train(recipe, tmp_path / "whole")
    rows = list(read_lines(RunFolder(tmp_path / "whole").rollout_file(1)))
    assert len({row["reward"] for row in rows}) > 8
    train(recipe.but(run=recipe.run.but(steps=1)), tmp_path / "parts")
    train(recipe, tmp_path / "parts", resume=True)
    assert contents(tmp_path / "whole")["metrics.jsonl"] == contents(tmp_path / "parts")["metrics.jsonl"]


@pytest.mark.parametrize("reward", [{"kind": "model"}, {"kind": "math", "model": {"path": "x"}}])
def test_the_section_and_the_kind_belong_together(reward: dict[str, Any], model: Path) -> None:
    with pytest.raises(UserError, match=r'reward.kind = "model" and \[reward.model\]'):
        several(model, [reward])
