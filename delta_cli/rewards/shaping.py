"""What a reward adds to its verdict: a bonus for the form of the answer and penalties for length."""

from __future__ import annotations

from delta_cli.recipe.reward import Reward, RewardKind
from delta_cli.rewards.code.verdict import code_blocks
from delta_cli.rewards.math.boxed import closed_boxes
from delta_cli.rewards.math.last_number import MARK, last_number


def shaping(reward: Reward, length: int, max_tokens: int, well_formed: bool) -> float:
    """What is added to the verdict on a response of ``length`` tokens."""
    total = -reward.length_penalty * length / 1000 + reward.format_bonus * well_formed
    if reward.overlong_buffer is not None:
        total += overlong_penalty(length, max_tokens, reward.overlong_buffer, reward.overlong_factor)
    return total


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Zero up to ``limit - buffer`` tokens, then falling linearly to ``-factor`` at ``limit`` (method, section 3)."""
    return min(-(length - (limit - buffer)) / buffer, 0.0) * factor


def well_formed(response: str, kind: RewardKind) -> bool:
    """Whether a response holds exactly one answer in the form that the verifier ``kind`` reads."""
    if kind == "code":
        return len(code_blocks(response)) == 1
    if kind == "number":
        return response.count(MARK) == 1 and last_number(response) is not None
    boxes, unfinished = closed_boxes(response)
    return len(boxes) == 1 and not unfinished
