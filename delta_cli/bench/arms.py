"""The arms that the bench compares: DAPO with another credit, or with the wrong side's weight tuned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from delta_cli.credit.methods import Method
from delta_cli.errors import UserError

SOLVER_CREDITS = Path(__file__).parent / "solver_credits.py"
HINT = "<hint>"  # in the changes of an arm: the task's
Role = Literal["reference", "credit", "good", "bad"]


@dataclass(frozen=True)
class BenchArm:
    """A row of the page; ``role`` "good" and "bad" are the solver's and must come out above and below."""

    name: str
    changes: tuple[str, ...]
    role: Role = "credit"


def credit_arm(name: str, credit: str) -> BenchArm:
    """A credit in DAPO, scaled to mean 1 on each side, so that it changes no balance between the sides."""
    return BenchArm(name, ("method.preset=dapo", f"method.credit={credit}", "method.normalise=side"))


def _hinted(name: str, credit: str) -> BenchArm:
    """A credit that reads a second forward pass with the task's hint."""
    return BenchArm(name, (*credit_arm(name, credit).changes, f"method.hint={HINT}"))


def _solver(function: str) -> tuple[str, ...]:
    return ("method.preset=dapo", f"method.credit={SOLVER_CREDITS}:{function}", "method.normalise=budget")


DAPO = BenchArm("dapo", ("method.preset=dapo",), "reference")
ARMS: dict[str, BenchArm] = {
    arm.name: arm
    for arm in (
        DAPO,
        BenchArm("wrong side × 0.75", ("method.preset=dapo", "method.weight_negative=0.75")),
        BenchArm("wrong side × 0.5", ("method.preset=dapo", "method.weight_negative=0.5")),
        BenchArm("wrong side × 0.25", ("method.preset=dapo", "method.weight_negative=0.25")),
        BenchArm("wrong side × 0", ("method.preset=dapo", "method.weight_negative=0")),
        BenchArm("delta", ("method.preset=delta",)),
        BenchArm("delta, by side", ("method.preset=delta", "method.normalise=side")),
        BenchArm(
            "delta, by side, wrong × 0.5",
            ("method.preset=delta", "method.normalise=side", "method.weight_negative=0.5"),
        ),
        BenchArm("delta, exact by group", ("method.preset=delta_group", "method.normalise=side")),
        BenchArm("forking tokens", ("method.preset=dapo_ft",)),
        credit_arm("surprisal", "surprisal"),
        credit_arm("entropy", "entropy_weight"),
        credit_arm("position", "position"),
        credit_arm("random", "random"),
        credit_arm("eapo", "eapo"),
        _hinted("rlsd", "rlsd"),
        _hinted("cort", "cort"),
        BenchArm("arca", (*credit_arm("arca", "arca").changes, "method.hidden_residuals=true")),
        BenchArm("solver", _solver("solver"), "good"),
        credit_arm("solver, by side", f"{SOLVER_CREDITS}:solver"),
        BenchArm("solver, as given", _solver("solver")[:2]),  # which also lightens the wrong side
        BenchArm("solver, flipped", _solver("flipped"), "bad"),
    )
}


def own_arm(credit: str) -> BenchArm:
    """The user's credit, ``FILE.py:FUNCTION`` or a built-in weight function. Raises UserError if it cannot be opened.

    The file's path becomes absolute, because runs happen in other processes.
    """
    from delta_cli.training.credit_file import open_weight_function

    file, colon, function = credit.rpartition(":")
    named = f"{Path(file).resolve()}:{function}" if colon else credit
    try:
        method = Method("group_normalised", named, "clip", "token_mean")
    except ValueError as error:
        raise UserError(f"--credit {credit}: {error}, or FILE.py:FUNCTION") from None
    if open_weight_function(method) is None:
        raise UserError(f"--credit {credit}: is an arm of the bench already; name it with --arm")
    return credit_arm(credit if not colon else f"{Path(file).name}:{function}", named)


def find_arms(names: list[str]) -> list[BenchArm]:
    """The built-in arms of these names. Raises UserError for an unknown one."""
    for name in names:
        if name not in ARMS:
            raise UserError(f"--arm {name}: there is no such arm; choose from {'; '.join(ARMS)}")
    return [ARMS[name] for name in names]
