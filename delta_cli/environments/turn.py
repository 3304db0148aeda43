"""What an environment answers, and how it fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Row = Mapping[str, Any]  # what an environment learns of the problem: id, question, answer, source, prompt


@dataclass(frozen=True)
class Turn:
    """The answer of a text environment to a turn of the model.

    ``text`` is appended to what the model wrote, which then goes on, unless the episode is ``done``. The rewards of an
    episode's turns add up to the environment's own reward.
    """

    text: str = ""
    done: bool = False
    reward: float = 0.0


class EpisodeFailure(Exception):
    """An environment failed, so the episode ends without a reward. The text says why, on one line."""


class ToolError(Exception):
    """A call failed, and the model reads the message."""


class EpisodeSession(Protocol):
    """The environment of one episode. Methods raise EpisodeFailure; ``call`` also raises ToolError."""

    def reset(self, row: Row) -> str | None:
        """Begin; the text that is appended to the question, if any."""

    def step(self, text: str) -> Turn:
        """Answer a turn of a text environment."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool."""

    def reward(self) -> float | None:
        """The environment's own reward at the end of the episode; None if it gives none."""

    def close(self) -> None:
        """End whatever runs for the episode."""


def as_turn(value: Any) -> Turn:
    """The answer of ``step``: a Turn, or anything with its fields, or only a text. Raises EpisodeFailure."""
    if isinstance(value, str):
        return Turn(value)
    if isinstance(value, Mapping):
        text, done, reward = value.get("text", ""), value.get("done", False), value.get("reward", 0.0)
    else:
        text, done, reward = (getattr(value, name, None) for name in ("text", "done", "reward"))
    if not isinstance(text, str) or isinstance(reward, bool) or not isinstance(reward, int | float):
        raise EpisodeFailure(f"step returned {type(value).__name__}, not a Turn with text, done and reward")
    return Turn(text, bool(done), finite(reward))


def finite(reward: Any) -> float:
    """A reward as a finite number. Raises EpisodeFailure."""
    if isinstance(reward, int | float) and math.isfinite(reward):
        return float(reward)
    raise EpisodeFailure(f"the reward is {str(reward)[:40]}, not a finite number")
