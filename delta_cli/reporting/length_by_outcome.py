"""How long right and wrong responses are, over the steps: from the recorded responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from delta_cli.runs.records import RecordedRun

READ_TOKENS = 200_000  # of all steps together
FEWEST, MOST = 3, 24  # steps that are read, as many as READ_TOKENS allows


@dataclass(frozen=True)
class LengthByOutcome:
    """Mean lengths, in tokens, of the responses of some recorded steps; no number where a step has none such."""

    steps: list[int]
    right: list[float]
    wrong: list[float]


def lengths_by_outcome(run: RecordedRun) -> LengthByOutcome:
    """Of steps spread over the run, the first and the last recorded among them.

    Where a step is longer than its part of READ_TOKENS, its first responses stand for all.
    """
    of_step = max((record.get("tokens", 0) for record in run.metrics), default=0)
    steps = _spread(run.steps, min(max(READ_TOKENS // max(of_step, 1), FEWEST), MOST))
    right, wrong = [], []
    for step in steps:
        lengths: dict[bool, list[int]] = {True: [], False: []}
        read = 0
        for response in run.responses(step):
            lengths[response.correct].append(len(response))
            read += len(response)
            if read >= READ_TOKENS / len(steps):
                break
        right.append(_mean(lengths[True]))
        wrong.append(_mean(lengths[False]))
    return LengthByOutcome(steps, right, wrong)


def _spread(steps: list[int], count: int) -> list[int]:
    """At most ``count`` (2 or more) of the steps, evenly apart, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths) if lengths else math.nan
