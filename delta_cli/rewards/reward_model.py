"""A local reward model: a sequence classifier whose logit is the reward, run in a grading process of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from backends.errors import BackendError
from backends.registry import reward_model
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import read_json, small_files
from delta_cli.errors import UserError
from delta_cli.recipe.reward import RewardModelSection
from delta_cli.rewards.verifiers import GroupReward


def model_scores(settings: RewardModelSection) -> GroupReward:
    """Load the model. Returns a function that scores all responses to a problem: None for a chat that is too long.

    Raises UserError if the model cannot be loaded.
    """
    try:
        model = reward_model(settings)
    except BackendError as error:
        raise UserError(f"reward.model.path: {settings.path}: {error}") from error

    def score(responses: Sequence[str], problem: Problem) -> list[float | None]:
        asked = [*(dict(turn) for turn in problem.turns), {"role": "user", "content": problem.question}]
        logits = model.logits([[*asked, {"role": "assistant", "content": response}] for response in responses])
        return [None if logit is None else reward_of(logit, settings) for logit in logits]

    return score


def check_reward_model(path: str) -> None:
    """Raise UserError if a reward model is not there or generates text, without loading its weights."""
    try:
        folder = small_files(path)
        config = read_json(folder / "config.json")
    except UserError as error:
        raise type(error)(f"reward.model.path: {error}") from error
    if not config:
        raise UserError(f"reward.model.path: {folder}: no config.json, so it is not a model folder; choose another")
    if writer := re.search(r"\w+ForCausalLM", str(config.get("architectures"))):
        raise UserError(
            f"reward.model.path: {path}: {writer[0]} writes text and gives no score; choose a sequence classifier, or "
            'ask the model for a score with reward.kind = "judge" (docs/judges.md)'
        )


def reward_of(logit: float, settings: RewardModelSection) -> float:
    """scale × logit, or scale × sigmoid(logit), cut off at ± clip."""
    value = settings.scale * (0.5 * (1 + math.tanh(logit / 2)) if settings.sigmoid else logit)
    return value if settings.clip is None else max(-settings.clip, min(settings.clip, value))
