"""From a data section of a recipe to problems, with an account of what was left out and why."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_cli.data import filters, sources, tasks, word_problems
from delta_cli.data.filters import Filter
from delta_cli.data.layouts import LAYOUTS, Layout
from delta_cli.data.problem import Problem, Row
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tasks import TaskSpec
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError

GENERATED_PROBLEMS = 5000  # where no limit is set
GENERATED = (tasks.SOURCE, word_problems.SOURCE)  # sources that are made here
OF_ROWS = ("filter", "question", "answer", "answer_pattern", "layout", "config", "split")  # what they have not


@dataclass(frozen=True)
class DataSpec:
    """Which problems. What is None is taken from the data set's row in LAYOUTS, or Layout's defaults."""

    source: str = tasks.SOURCE  # a hub name, a file, a folder, or one of GENERATED
    layout: str | None = None  # a key of LAYOUTS for a copy under another name; otherwise the source
    config: str | None = None
    split: str | None = None
    question: str | None = None
    answer: str | None = None
    answer_pattern: str | None = None
    filter: str | None = None
    limit: int | None = None  # problems, held-out ones included: a random choice in the order of the source
    held_out: float = 0.0  # share kept apart from training
    seed: int = 0  # of the choice
    template: str = "plain"  # the prompt's, to measure prompts with
    task: TaskSpec = field(default_factory=TaskSpec)  # of "arithmetic"

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UserError(f"data.held_out: {self.held_out} is out of range; choose a share from 0 to below 1")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit: {self.limit} is out of range; choose 1 or more")


@dataclass(frozen=True)
class LoadReport:
    """How many rows were read, kept, and left out for each reason."""

    read: int
    kept: int
    filtered: int = 0  # by the recipe's own condition
    empty: int = 0  # no question
    without_gold: int = 0
    duplicated: int = 0  # of an earlier question
    too_long: int = 0  # prompt beyond the limit

    def __str__(self) -> str:
        left_out = {
            "do not meet the filter": self.filtered,
            "without a question": self.empty,
            "without a gold answer": self.without_gold,
            "duplicates": self.duplicated,
            "with too long a prompt": self.too_long,
        }
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        return f"{self.kept} problems of {self.read} rows" + (f"; left out: {reasons}" if reasons else "")


@dataclass(frozen=True)
class LoadedData:
    """Problems to train on, problems kept apart, and the account."""

    problems: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    report: LoadReport


def load_problems(
    spec: DataSpec, tokenizer: Tokenizer | None = None, max_prompt_tokens: int | None = None
) -> LoadedData:
    """Read, check and split the problems of a data set; the same arguments give the same ones.

    Prompts of more than ``max_prompt_tokens`` are left out, where a tokenizer is given. Raises
    UserError where the source cannot be read or nothing is left of it.
    """
    if spec.source in GENERATED:
        refuse_fields(spec.source, spec)
        return _generated(spec)
    layout = _resolve(spec)
    condition = Filter(layout.filter) if layout.filter else None
    located = sources.rows(spec.source, layout.config, layout.split, _columns(layout, condition), layout.files)
    kept, report = _collect(located, spec.source, layout, condition)
    if tokenizer is not None and max_prompt_tokens is not None:
        longest = max_prompt_tokens * tokenizer.longest_token  # characters; beyond, nothing needs to be encoded
        fitting = [
            problem
            for problem in kept
            if len(problem.question) <= longest
            and len(encode_prompt(problem, spec.template, tokenizer)) <= max_prompt_tokens
        ]
        report = replace(report, kept=len(fitting), too_long=len(kept) - len(fitting))
        kept = fitting
    if not kept:
        raise UserError(f"data.source: {spec.source}: no problem is left ({report})")
    return _divide(kept, spec, report)


def _resolve(spec: DataSpec) -> Layout:
    """The data set's layout with what the recipe sets in its place."""
    name = spec.layout or spec.source
    if spec.layout and name not in LAYOUTS:
        raise UserError(f"data.layout: '{name}' is not known; choose one of {', '.join(LAYOUTS)}")
    own = {key: getattr(spec, key) for key in ("config", "split", "question", "answer", "answer_pattern", "filter")}
    layout = replace(LAYOUTS.get(name, Layout()), **{key: value for key, value in own.items() if value is not None})
    if spec.question is not None:
        layout = replace(layout, read_question=None)
    if spec.answer is not None:
        layout = replace(layout, read_answer=None)
    if layout.answer_pattern is not None:
        _check_pattern(layout.answer_pattern)
    return layout


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UserError(f"data.answer_pattern: {pattern!r}: {error}") from error
    if groups == 0:
        raise UserError(f"data.answer_pattern: {pattern!r} has no group; put brackets round the answer")


def _columns(layout: Layout, condition: Filter | None) -> set[str]:
    names = set(layout.columns)
    if layout.read_question is None:
        names.add(layout.question)
    if layout.read_answer is None:
        names.add(layout.answer)
    if layout.id is not None:
        names.add(layout.id)
    return {name.partition(".")[0] for name in names} | (condition.fields if condition else set())


def _collect(
    located: sources.Located, source: str, layout: Layout, condition: Filter | None
) -> tuple[list[Problem], LoadReport]:
    kept: dict[str, Problem] = {}  # by question
    left_out: Counter[str] = Counter()
    read = 0
    for where, row in located:
        read += 1
        if condition is not None and not condition(row):
            left_out["filtered"] += 1
        elif not (question := _whole(_question(row, layout), where)):
            left_out["empty"] += 1
        elif (answer := _answer(row, layout)) is None:
            left_out["without_gold"] += 1
        elif question in kept:
            left_out["duplicated"] += 1
        else:
            own_id = row.get(layout.id) if layout.id else None
            kept[question] = Problem(str(read if own_id is None else own_id), question, answer, source)
    return list(kept.values()), LoadReport(read, len(kept), **left_out)


def _question(row: Row, layout: Layout) -> str:
    """The question's text; of a chat, the content of its last turn. Empty where there is none."""
    if layout.read_question and any(row[column] is None for column in layout.columns):
        return ""
    value = layout.read_question(row) if layout.read_question else filters.field(row, layout.question)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value.strip() if isinstance(value, str) else ""


def _whole(text: str, where: str) -> str:
    """The text, where it can be encoded. Raises UserError that names the row."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = f"U+{ord(text[error.start]):04X}"
        raise UserError(
            f"{where}: character {error.start + 1} of the question is half a character ({broken}); write it in UTF-8"
        ) from None
    return text


def _answer(row: Row, layout: Layout) -> str | dict[str, Any] | None:
    """The gold answer as text, tests of a program as they are, None where there is neither."""
    if layout.read_answer and any(row[column] is None for column in layout.columns):
        return None
    value = layout.read_answer(row) if layout.read_answer else filters.field(row, layout.answer)
    if isinstance(value, dict):
        return value or None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):  # what JSON writes as NaN, and a table for an empty cell
        return None
    text = str(value).encode(errors="replace").decode()
    if layout.answer_pattern is not None:
        found = list(re.finditer(layout.answer_pattern, text))
        text = (found[-1][1] or "") if found else ""
    return text.strip() or None


def refuse_fields(source: str, spec: object) -> None:
    """Raise UserError where ``spec`` asks for anything of a generated source that only rows of a data set have."""
    for name in OF_ROWS:
        if getattr(spec, name) is not None:
            raise UserError(
                f"data.{name}: is for files and data sets, and the problems of {source} are generated, without fields; "
                "remove it"
            )


def _generated(spec: DataSpec) -> LoadedData:
    """Problems that are made, whose two splits have none in common."""
    count = GENERATED_PROBLEMS if spec.limit is None else spec.limit
    apart = round(count * spec.held_out)
    problems = generate(spec.source, spec.task, count - apart, spec.seed, "train")
    held_out = generate(spec.source, spec.task, apart, spec.seed, "held_out")
    return LoadedData(tuple(problems), tuple(held_out), LoadReport(read=count, kept=count))


def generate(source: str, task: TaskSpec, count: int, seed: int, split: tasks.Split) -> list[Problem]:
    """``count`` problems of one of the sources in GENERATED; raises UserError where there are not so many."""
    if source == word_problems.SOURCE:
        return word_problems.problems(count, seed, split)
    return tasks.problems(task, count, seed, split)


def _divide(kept: Sequence[Problem], spec: DataSpec, report: LoadReport) -> LoadedData:
    """Choose ``limit`` problems and put the held-out share apart."""
    count = len(kept) if spec.limit is None else min(spec.limit, len(kept))
    chosen = np.random.default_rng([spec.seed, 0]).permutation(len(kept))[:count]
    apart = round(count * spec.held_out)
    held_out, problems = (tuple(kept[i] for i in np.sort(part)) for part in (chosen[:apart], chosen[apart:]))
    return LoadedData(problems, held_out, report)
