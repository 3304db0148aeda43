"""From a reward's section of the recipe to the function that verifies one response."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward, RewardKind
from delta_cli.rewards.choice import choice_reward
from delta_cli.rewards.code.verdict import check_tests, code_blocks, code_reward
from delta_cli.rewards.math.boxed import closed_boxes
from delta_cli.rewards.math.external_graders import LENIENT
from delta_cli.rewards.math.last_number import MARK, last_number, number_reward
from delta_cli.rewards.math.verdict import math_reward, warm_up
from delta_cli.user_file import load_function, run

Verifier = Callable[[str, Problem], float]
GroupReward = Callable[[Sequence[str], Problem], Sequence[float | None]]


def check_answers(kind: RewardKind, problems: Sequence[Problem]) -> None:
    """Raise UserError with one line on the first problem whose answer a verifier of that kind cannot use."""
    for problem in problems:
        if kind == "code":
            try:
                check_tests(problem.answer)
            except UserError as error:
                raise UserError(f"problem '{problem.id}' of {problem.source}: {error}") from None
        elif kind == "math" and not isinstance(problem.answer, str):
            raise UserError(
                f"problem '{problem.id}' of {problem.source}: its answer is an object, which no answer in mathematics "
                'is equal to; name the column of the answer in data.answer, or set reward.kind = "code"'
            )
        elif kind == "number" and not (isinstance(problem.answer, str) and last_number(problem.answer)):
            raise UserError(
                f"problem '{problem.id}' of {problem.source}: its answer {str(problem.answer)[:60]!r} ends with no "
                'number; leave it out with data.filter, or set reward.kind = "math"'
            )


def verifier(reward: Reward, form: RewardKind = "math") -> Verifier:
    """The verifier of a reward, with all it needs imported; ``form`` is the answer's form that kind format asks for."""
    kind = reward.kind
    if kind == "math" and reward.verifier != "strict":
        judge = LENIENT[reward.verifier]
        judge("\\boxed{1}", "1")  # imports what it needs
        return lambda response, problem: judge(response, str(problem.answer))
    if kind == "math":
        warm_up()
        return lambda response, problem: math_reward(response, str(problem.answer), problem.question)
    if kind == "number":
        return lambda response, problem: number_reward(response, str(problem.answer), problem.question)
    if kind == "choice":
        return lambda response, problem: choice_reward(response, str(problem.answer))
    if kind == "code":
        return partial(_program, reward)
    if kind == "format" and reward.pattern is not None:
        whole = re.compile(reward.pattern, re.DOTALL)
        return lambda response, problem: float(whole.fullmatch(response.strip()) is not None)
    if kind == "format":
        return lambda response, problem: float(well_formed(response, form))
    return custom(Path(reward.custom_file or ""), reward.custom_function)


def _program(reward: Reward, response: str, problem: Problem) -> float:
    return code_reward(
        response,
        problem.answer,
        mode=reward.code,
        seconds=reward.run_seconds,
        allow_unsandboxed=reward.allow_unsandboxed,
    )


def custom(path: Path, name: str) -> Verifier:
    """The function ``name`` of a user's Python file, which must return a finite number. It may be ``async def``.

    Raises UserError if the file or the function is missing or the file does not run.
    """
    function = load_function(path, name, "reward", f"{name}(response, problem) -> float")

    def grade(response: str, problem: Problem) -> float:
        return _number(run(function, response, problem), f"{path}:{name}")

    return grade


def custom_group(reward: Reward) -> GroupReward:
    """A user's function of all responses to a prompt, which must return a finite number for each of them.

    It may be ``async def``. Raises UserError as :func:`custom` does.
    """
    path, name = Path(reward.custom_file or ""), reward.custom_function
    function = load_function(path, name, "reward", f"{name}(responses, problem) -> list of floats")

    def grade(responses: Sequence[str], problem: Problem) -> list[float]:
        values = run(function, list(responses), problem)
        if not isinstance(values, Sequence) or len(values) != len(responses):
            raise UserError(
                f"{path}:{name} returned {str(values)[:80]!r}; it must return {len(responses)} numbers, one for each "
                "response"
            )
        return [_number(value, f"{path}:{name}") for value in values]

    return grade


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where} returned {value!r}; it must return a finite number")
    return float(value)


def well_formed(response: str, kind: RewardKind) -> bool:
    """Whether a response holds exactly one answer in the form that the verifier ``kind`` reads."""
    if kind == "code":
        return len(code_blocks(response)) == 1
    if kind == "number":
        return response.count(MARK) == 1 and last_number(response) is not None
    boxes, unfinished = closed_boxes(response)
    return len(boxes) == 1 and not unfinished
