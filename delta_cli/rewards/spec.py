"""What one reward is: a verifier, or a measure of form or length, and what is added to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_cli.errors import UserError

Kind = Literal["math", "number", "choice", "code", "custom", "format", "length"]


@dataclass(frozen=True)
class Overlong:
    """A penalty that grows over the last ``buffer`` tokens before ``limit`` (method, section 3)."""

    limit: int  # tokens a response may have
    buffer: int  # tokens before the limit in which the penalty grows
    factor: float = 1.0  # the penalty at the limit

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise UserError(f"overlong buffer {self.buffer} must be between 1 and the limit, {self.limit} tokens")

    def __call__(self, length: int) -> float:
        return min(-(length - (self.limit - self.buffer)) / self.buffer, 0.0) * self.factor


@dataclass(frozen=True)
class RewardSpec:
    """The kind with its settings, and additive shapers that are off at zero.

    reward = verdict + format_bonus·[the answer has the form asked for]
             − length_penalty·length/1000 + overlong(length)
    """

    kind: Kind = "math"
    format_bonus: float = 0.0  # for a complete response with exactly one closed box, code block, or ####
    length_penalty: float = 0.0  # for every thousand tokens
    overlong: Overlong | None = None
    grader: Literal["strict", "math-verify", "public"] = "strict"  # math: ours, or one of rewards.lenient
    mode: Literal["all", "share"] = "all"  # code: all tests or nothing, or the share that passed
    run_seconds: float = 6.0  # code: wall-clock time of a response's whole test run
    allow_unsandboxed: bool = False  # code: run without a sandbox where there is none
    path: str = ""  # custom: a Python file
    function: str = "reward"  # custom: its function (response: str, problem: Problem) -> float
    pattern: str | None = None  # format: of the whole response; None: the form of an answer that ``form`` reads
    form: Kind = "math"  # format: the verifier whose form is asked for
    limit: int = 1  # length: tokens a response may have
