"""Mean length of right and of wrong responses over the steps of a run, from its recorded responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from delta_cli.runs.records import RecordedRun

READ_TOKENS = 200_000  # over all steps
FEWEST, MOST = 3, 24  # steps that are read; as many as READ_TOKENS allows


@dataclass(frozen=True)
class LengthByOutcome:
    """Mean lengths in tokens at some recorded steps; NaN if a step has no such response."""

    steps: list[int]
    right: list[float]
    wrong: list[float]


def lengths_by_outcome(run: RecordedRun) -> LengthByOutcome:
    """Mean lengths at steps spread evenly over the run, including the first and the last recorded one.

    Of a step with more tokens than its part of READ_TOKENS, only the first responses are read.
    """
    largest = max((record.get("tokens", 0) for record in run.metrics), default=0)  # tokens of a step
    steps = _spread(run.steps, min(max(READ_TOKENS // max(largest, 1), FEWEST), MOST))
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
    """At most ``count`` of the steps, evenly spaced, with the first and the last; ``count`` is at least 2."""
    if len(steps) <= count:
        return steps
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths) if lengths else math.nan
