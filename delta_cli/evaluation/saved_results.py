"""Saved evaluations: those of a run or a model, and which two of them can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_cli.errors import UserError, delta_command
from delta_cli.evaluation.compare import unlike
from delta_cli.evaluation.results import FILE, EvaluationResult

FOLDER = "evaluations"  # of a run
LISTED = 4  # evaluations in a message


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation and its folder."""

    path: Path
    evaluation: EvaluationResult

    def as_json(self) -> dict[str, Any]:
        """What identifies it, and its result."""
        made = self.evaluation
        about = made.model_dump(mode="json", include={"model", "step", "suite", "limit", "settings"})
        return about | {"avg": made.average.avg.mean, "standard_error": made.average.avg.standard_error}


def evaluations_of(path: Path) -> list[SavedEvaluation]:
    """The evaluation at ``path``, or all of the run or model at ``path``, sorted by suite and step.

    Raises UserError if there is none.
    """
    if path.is_file() or (path / FILE).is_file():
        return [SavedEvaluation(path if path.is_dir() else path.parent, EvaluationResult.read(path))]
    path = _located(path)
    root = path / FOLDER if (path / "recipe.toml").is_file() else path
    found = [SavedEvaluation(file.parent, EvaluationResult.read(file)) for file in sorted(root.glob(f"*/{FILE}"))]
    if not found:
        raise UserError(f"{path}: holds no evaluation; make one: {delta_command('eval', path, '--data', 'FILE')}")
    return sorted(found, key=lambda each: (each.evaluation.suite, each.evaluation.step or 0))


def _located(path: Path) -> Path:
    """The path, or the folder where ``delta eval`` keeps a model's evaluations; raises UserError if neither exists."""
    if not path.exists() and (Path(FOLDER) / path.name).is_dir():
        return Path(FOLDER) / path.name
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a run, or an evaluation that delta eval wrote")
    return path


def comparable(before: Path, after: Path) -> tuple[SavedEvaluation, SavedEvaluation]:
    """One evaluation of each with the same suite and settings; of several steps, the newest.

    Raises UserError if there is no such pair, or if there are pairs with different suites or settings.
    """
    for path in (before, after):  # both are looked for before either is opened
        _located(path)
    first, second = evaluations_of(before), evaluations_of(after)
    pairs = [(a, b) for a in first for b in second if not unlike(a.evaluation, b.evaluation)]
    if not pairs:
        if len(first) == len(second) == 1:
            return first[0], second[0]  # the comparison will name the difference
        raise UserError(
            f"{before} has {_listed(first)}, {after} has {_listed(second)}: no two are of the same suite and settings; "
            "evaluate both alike"
        )
    same = [(a, b) for a, b in pairs if a.evaluation.data == b.evaluation.data]
    pairs = same or pairs  # otherwise they may share some problems
    kinds = {_kind(a.evaluation) for a, _ in pairs}
    if len(kinds) > 1:
        raise UserError(
            f"{before} and {after} were both evaluated in {len(kinds)} ways; name the two evaluations: "
            f"{_listed([a for a, _ in pairs])} against {_listed([b for _, b in pairs])}"
        )
    return max(pairs, key=lambda pair: (pair[0].evaluation.step or 0, pair[1].evaluation.step or 0))


def _kind(evaluation: EvaluationResult) -> str:
    """Two evaluations with the same text can be compared."""
    return f"{evaluation.suite} {evaluation.limit} {evaluation.settings.model_copy(update={'seed': 0})}"


def _listed(found: Sequence[SavedEvaluation]) -> str:
    names = list(dict.fromkeys(each.path.name for each in found))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
