"""With all coefficients 1, DelTATrainer is GRPOTrainer: every loss and every final weight, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from delta_cli.integrations.trl import DelTAConfig, DelTATrainer
from delta_cli.integrations.trl.config import LOSS_TYPES
from tests.integrations.tiny import losses, model, questions, right, settings, tokenizer, weights

ONES = {"delta_lambda_min": 1.0, "delta_lambda_max": 1.0}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}


def talk() -> Dataset:
    """The questions as conversations."""
    rows = [{"prompt": [{"role": "user", "content": row["prompt"].strip()}]} for row in questions()]
    return Dataset.from_list([{**row, "answer": q["answer"]} for row, q in zip(rows, questions(), strict=True)])


def right_in_talk(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return right([completion[0]["content"] for completion in completions], answer)


def both(folder: Path, train: dict[str, Any] | None = None, **arguments: Any) -> tuple[Any, Any]:
    """A run of TRL's trainer and one of ours, with coefficients 1 unless told otherwise, from one model and seed."""
    runs = []
    for name, trainer, config in (("trl", GRPOTrainer, GRPOConfig), ("delta", DelTATrainer, DelTAConfig)):
        credit = {name: arguments[name] for name in arguments if name.startswith("delta_")}
        ours = (credit or ONES) if config is DelTAConfig else {}
        given = {"reward_funcs": right, "train_dataset": questions(), **(train or {})}
        plain = {name: value for name, value in arguments.items() if name not in credit}
        args = config(**settings(folder / name, **plain), **ours)
        run = trainer(model(), args=args, processing_class=tokenizer(), **given)
        run.train()
        runs.append(run)
    return runs[0], runs[1]


def assert_equal(trl: Any, delta: Any) -> None:
    """Bit-equal losses and weights, of a run in which something was learned."""
    assert losses(delta) == losses(trl)
    assert any(losses(trl))
    assert any(entry.get("grad_norm", 0) > 0 for entry in trl.state.log_history)
    for name, value in weights(trl).items():
        assert torch.equal(value, weights(delta)[name]), name


def few(names: Iterable[str], short: Iterable[str]) -> list[Any]:
    """All names as parameters, those outside ``short`` in the long tier."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]


@pytest.mark.parametrize("mini_batches", [1, 2], ids=["forward of ours", "forward of TRL's"])
@pytest.mark.parametrize("loss", few(LOSS_TYPES, ("dapo", "vespo")))
def test_every_loss(loss: str, mini_batches: int, tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, loss_type=loss, steps_per_generation=mini_batches, epsilon_high=0.3))


VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "two batches a step": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
    "iterations": {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4},
    "kl": {"beta": 0.1},
    "kl, iterations": {"beta": 0.1, "num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"bf16": True},
    "truncated left out": {"mask_truncated_completions": True, "max_completion_length": 20},
    "forking tokens": {"top_entropy_quantile": 0.2},
    "off-policy mask": {"off_policy_mask_threshold": 1e-4, "steps_per_generation": 2, "max_steps": 4},
    "entropy bonus": {"entropy_coef": 0.01},
    "batch scale": {"scale_rewards": "batch"},
    "temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("variant", few(VARIANTS, ("accumulation", "truncated left out")))
def test_every_variant(variant: str, tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, **VARIANTS[variant]))


@pytest.mark.parametrize(
    "variant", few(("accumulation", "kl", "iterations", "kl, iterations", "checkpointing"), ("kl, iterations",))
)
def test_adapters_with_dropout(variant: str, tmp_path: Path) -> None:
    train = {"peft_config": peft.LoraConfig(**LORA)}
    assert_equal(*both(tmp_path, train, **{"learning_rate": 1e-2, "max_steps": 4} | VARIANTS[variant]))


@pytest.mark.long
def test_conversations(tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, {"train_dataset": talk(), "reward_funcs": right_in_talk}, max_steps=3))


@pytest.mark.long
def test_evaluation_is_that_of_trl(tmp_path: Path) -> None:
    """With the paper's coefficients too: an evaluation before the first update has TRL's loss."""
    changes = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 8}
    train = {"eval_dataset": questions(4, seed=1)}
    trl, delta = both(tmp_path / "ones", train, **changes, log_completions=True)
    assert_equal(trl, delta)
    _, paper = both(tmp_path / "paper", train, **changes, delta_lambda_max=1.5)
    evaluated = [[h["eval_loss"] for h in run.state.log_history if "eval_loss" in h] for run in (trl, delta, paper)]
    assert evaluated[0] == evaluated[1]
    assert evaluated[0][0] == evaluated[2][0]
    assert len(evaluated[0]) == 3


def test_coefficients_change_what_is_learned(tmp_path: Path) -> None:
    """The comparison above can fail: with the paper's range neither losses nor weights are TRL's."""
    trl, paper = both(tmp_path, delta_lambda_max=1.2)
    assert losses(paper) != losses(trl)
    assert not all(torch.equal(value, weights(paper)[name]) for name, value in weights(trl).items())


@pytest.mark.long
def test_a_resumed_run_goes_on_as_trls(tmp_path: Path) -> None:
    runs = []
    for name, trainer, config in (("trl", GRPOTrainer, GRPOConfig), ("delta", DelTATrainer, DelTAConfig)):
        ours = {**ONES, "delta_rollouts_every": 1} if config is DelTAConfig else {}
        for steps in (2, 4):
            changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "lr_scheduler_type": "constant"}
            args = config(**settings(tmp_path / name, **changes), **ours)
            run = trainer(model(), right, args=args, train_dataset=questions(), processing_class=tokenizer())
            run.train(resume_from_checkpoint=steps == 4)
        runs.append(run)
    assert len(losses(runs[0])) == 4
    assert_equal(*runs)
    recorded = (tmp_path / "delta" / "delta" / "metrics.jsonl").read_text().splitlines()
    assert len(recorded) == 4
