"""The problems of a recipe as they were loaded, and a count of the rows that were left out and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError

LEFT_OUT = {
    "filtered": "excluded by data.filter",
    "empty": "without a question",
    "without_gold": "without a gold answer",
    "duplicated": "with the question of an earlier row",
    "too_long": "with too long a prompt",
    "too_hard": "with a pass rate below data.pass_rate_min",
    "too_easy": "with a pass rate above data.pass_rate_max",
    "unrated": "without a pass rate in data.pass_rate_file",
}
LISTED = 100  # rows left out that are remembered for each reason


@dataclass(frozen=True)
class LeftOutRow:
    """A row that gives no problem."""

    where: str  # file and line, or the problem's id
    reason: str  # a field of LoadReport


@dataclass(frozen=True)
class LoadReport:
    """How many rows were read, how many were kept, and how many were left out for each reason."""

    read: int
    kept: int
    filtered: int = 0  # by data.filter
    empty: int = 0  # no question
    without_gold: int = 0
    duplicated: int = 0  # same question as an earlier row
    too_long: int = 0  # prompt above the limit
    too_hard: int = 0  # pass rate below data.pass_rate_min
    too_easy: int = 0  # pass rate above data.pass_rate_max
    unrated: int = 0  # not in data.pass_rate_file
    left_out: tuple[LeftOutRow, ...] = field(default=(), compare=False)  # the first ones of each reason

    def __str__(self) -> str:
        counts = {words: getattr(self, reason) for reason, words in LEFT_OUT.items()}
        reasons = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
        problems, rows = ("" if count == 1 else "s" for count in (self.kept, self.read))
        return f"{self.kept} problem{problems} of {self.read} row{rows}" + (f"; left out: {reasons}" if reasons else "")

    def refuse_empty(self, source: str) -> None:
        """Raise UserError if no problem is left."""
        if not self.read:
            raise UserError(
                f'{source}: holds no rows; each needs {{"question": …, "answer": …}}, or columns like these'
            )
        if not self.kept:
            raise UserError(f"{source}: no problem is left ({self})")


@dataclass(frozen=True)
class LoadedData:
    """Problems to train on, problems held out for evaluation, and the counts."""

    problems: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    report: LoadReport
