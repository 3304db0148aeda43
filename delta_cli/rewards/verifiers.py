"""From a reward's settings to the function that grades one response."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.rewards.choice import choice_reward
from delta_cli.rewards.code.verdict import check_tests, code_reward
from delta_cli.rewards.math.external_graders import LENIENT
from delta_cli.rewards.math.last_number import last_number, number_reward
from delta_cli.rewards.math.verdict import math_reward, warm_up
from delta_cli.rewards.spec import Kind, RewardSpec

Verifier = Callable[[str, Problem], float]


def check_answers(kind: Kind, problems: Sequence[Problem]) -> None:
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


def verifier(spec: RewardSpec) -> Verifier:
    """The verifier of a reward, with all it needs imported."""
    if spec.kind == "math" and spec.grader != "strict":
        judge = LENIENT[spec.grader]
        judge("\\boxed{1}", "1")  # imports what it needs
        return lambda response, problem: judge(response, str(problem.answer))
    if spec.kind == "math":
        warm_up()
        return lambda response, problem: math_reward(response, str(problem.answer), problem.question)
    if spec.kind == "number":
        return lambda response, problem: number_reward(response, str(problem.answer), problem.question)
    if spec.kind == "choice":
        return lambda response, problem: choice_reward(response, str(problem.answer))
    if spec.kind == "code":
        return lambda response, problem: code_reward(
            response,
            problem.answer,
            mode=spec.mode,
            seconds=spec.run_seconds,
            allow_unsandboxed=spec.allow_unsandboxed,
        )
    if spec.kind == "format":
        whole = re.compile(spec.pattern or "", re.DOTALL)
        return lambda response, problem: float(whole.fullmatch(response.strip()) is not None)
    return custom(Path(spec.path), spec.function)


def custom(path: Path, name: str) -> Verifier:
    """The function ``name`` of a user's Python file, its result held to be a finite number.

    Raises UserError where the file or the function is missing or the file does not run.
    """
    if not path.is_file():
        raise UserError(f"reward file {path} does not exist; give the path of a Python file")
    module_spec = importlib.util.spec_from_file_location("delta_custom_reward", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"reward file {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"reward file {path} does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"reward file {path} has no function '{name}'; define {name}(response, problem) -> float")

    def grade(response: str, problem: Problem) -> float:
        value = function(response, problem)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{path}:{name} returned {value!r}; it must return a finite number")
        return float(value)

    return grade
