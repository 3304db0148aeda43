"""Rewards that can be verified: mathematics, code, format, length, and the user's own."""

from delta_cli.rewards.code.verdict import code_reward
from delta_cli.rewards.math.verdict import math_reward

__all__ = ["code_reward", "math_reward"]
