"""Verifiable rewards: mathematics, code, format, length, and custom functions."""

from delta_cli.rewards.code.verdict import code_reward
from delta_cli.rewards.math.verdict import math_reward

__all__ = ["code_reward", "math_reward"]
