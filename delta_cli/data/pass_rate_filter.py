"""Problems to train on get their measured pass rates, and those that are too hard or too easy are left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

from delta_cli.data.load_report import LISTED, LeftOutRow, LoadedData
from delta_cli.data.pass_rates import read_pass_rates
from delta_cli.data.problem import question_key
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection


def with_pass_rates(loaded: LoadedData, data: DataSection, file: str) -> LoadedData:
    """The problems with the pass rates in ``file``, without those to train on whose rate is not wanted."""
    rates = read_pass_rates(file)
    rated = [replace(each, pass_rate=rates.get(question_key(each.question, each.turns))) for each in loaded.problems]
    if all(each.pass_rate is None for each in rated):
        raise UserError(
            f"data.pass_rate_file: {file}: has none of the {len(rated)} problems to train on; rate them with "
            "`delta data rate RECIPE`"
        )
    reasons = [_unwanted(each.pass_rate, data) for each in rated]
    counts = Counter(reason for reason in reasons if reason is not None)
    kept = tuple(each for each, reason in zip(rated, reasons, strict=True) if reason is None)
    dropped = [(each.id, reason) for each, reason in zip(rated, reasons, strict=True) if reason is not None]
    listed = tuple(
        LeftOutRow(f"problem {name}", reason)
        for why in counts
        for name, reason in islice((pair for pair in dropped if pair[1] == why), LISTED)
    )
    report = replace(
        loaded.report, kept=loaded.report.kept - len(dropped), left_out=loaded.report.left_out + listed, **counts
    )
    if not kept:
        raise UserError(
            f"data.pass_rate_min = {data.pass_rate_min:g}, data.pass_rate_max = {data.pass_rate_max:g}: no problem is "
            f"left to train on ({report})"
        )
    return replace(loaded, problems=kept, report=report)


def _unwanted(rate: float | None, data: DataSection) -> str | None:
    """Why a problem with this pass rate is left out; None if it is not."""
    if rate is None:
        return "unrated" if data.filters_pass_rates else None
    return "too_hard" if rate < data.pass_rate_min else "too_easy" if rate > data.pass_rate_max else None
