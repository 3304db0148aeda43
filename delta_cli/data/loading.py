"""From the ``[data]`` section of a recipe to problems, with a count of the rows that were left out and why."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from delta_cli.data import arithmetic, filters, sources, word_problems
from delta_cli.data.dataset_layouts import LAYOUTS, DatasetLayout
from delta_cli.data.filters import Filter
from delta_cli.data.load_report import LEFT_OUT, LISTED, LeftOutRow, LoadedData, LoadReport
from delta_cli.data.pass_rate_filter import with_pass_rates
from delta_cli.data.problem import DataRow, DataSplit, Problem, question_key
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection, ProblemSource

GENERATED_PROBLEMS = 5000  # to train on, without data.limit
GENERATED_BENCHMARK = 256  # to evaluate on, without a limit
GENERATED = (arithmetic.SOURCE, word_problems.SOURCE)
SOURCE_KEY = re.compile(rf"(?<![\w./-])data\.({'|'.join(ProblemSource.model_fields)})(?!\.?[\w-])")  # not in a path
LAYOUT_KEYS = ("config", "split", "question", "answer", "answer_pattern", "filter")  # that replace the data set's own


def load_problems(
    data: DataSection,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    max_prompt_tokens: int | None = None,
    given: Sequence[Problem] | None = None,
) -> LoadedData:
    """Read, check and split the problems of a recipe. The same arguments give the same problems.

    ``seed`` chooses ``data.limit`` problems and the held-out ones among them. With a tokenizer, problems whose prompt
    has more than ``max_prompt_tokens`` are left out. ``given`` replaces the problems of the source. Last, problems to
    train on are left out by their pass rate; held-out ones are not. Raises UserError if the source cannot be read or no
    problem is left to train on.
    """
    loaded = _load(data, seed, tokenizer, max_prompt_tokens, given)
    return loaded if data.pass_rate_file is None else with_pass_rates(loaded, data, data.pass_rate_file)


def _load(
    data: DataSection,
    seed: int,
    tokenizer: Tokenizer | None,
    max_prompt_tokens: int | None,
    given: Sequence[Problem] | None = None,
) -> LoadedData:
    """The problems before those are left out whose pass rate is not wanted."""
    if given is not None:
        kept, report = list(given), LoadReport(len(given), len(given))
    elif data.sources:
        return _mixed(data, seed, tokenizer, max_prompt_tokens)
    elif data.source in GENERATED:
        refuse_dataset_keys(data)
        return _generated(data, seed)
    else:
        kept, report = _read(data)
    if tokenizer is not None and max_prompt_tokens is not None:
        fitting = _fitting(kept, data.prompt_template, tokenizer, max_prompt_tokens)
        left = {problem.id for problem in kept} - {problem.id for problem in fitting}
        rows = tuple(LeftOutRow(f"problem {each.id}", "too_long") for each in kept if each.id in left)[:LISTED]
        too_long = len(kept) - len(fitting)
        report = replace(report, kept=len(fitting), too_long=too_long, left_out=report.left_out + rows)
        kept = fitting
    report.refuse_empty(f"data.source: {data.source}")
    chosen = _choose(len(kept), data.limit, seed)
    count = _held_out(data, len(chosen))
    held_out, problems = (tuple(kept[i] for i in np.sort(part)) for part in (chosen[:count], chosen[count:]))
    return LoadedData(problems, held_out, report)


def _mixed(data: DataSection, seed: int, tokenizer: Tokenizer | None, max_prompt_tokens: int | None) -> LoadedData:
    """The problems of several sources; a problem that an earlier source has is left out of a later one.

    Ids begin with the name of the source, so that no two problems share one. Held-out problems of all sources are
    mixed, so that the first ones of them are a fair sample.
    """
    problems: list[Problem] = []
    held_out: list[tuple[float, Problem]] = []
    reports: list[LoadReport] = []
    seen: set[str] = set()
    for name, part in data.parts():
        try:
            loaded = _load(part, seed, tokenizer, max_prompt_tokens)
        except UserError as error:
            raise type(error)(_in_source(str(error), name)) from error
        train, apart = (_named(each, name, seen) for each in (loaded.problems, loaded.held_out))
        if not train:
            raise UserError(f"data.sources.{name}: no problem is left that an earlier source does not have")
        seen.update(question_key(each.question, each.turns) for each in (*train, *apart))
        problems += train
        held_out += [((i + 0.5) / len(apart), each) for i, each in enumerate(apart)]
        repeated = len(loaded.problems) + len(loaded.held_out) - len(train) - len(apart)
        kept, duplicated = loaded.report.kept - repeated, loaded.report.duplicated + repeated
        reports.append(replace(loaded.report, kept=kept, duplicated=duplicated))
    held_out.sort(key=lambda each: each[0])
    return LoadedData(tuple(problems), tuple(each for _, each in held_out), _total(reports))


def _in_source(message: str, name: str) -> str:
    """The message about a single source, with the keys of the one of several that has this name."""
    own = SOURCE_KEY.sub(rf"data.sources.{name}.\1", message)
    return own if own != message else f"data.sources.{name}: {message}"


def _named(problems: Sequence[Problem], name: str, seen: set[str]) -> list[Problem]:
    """Problems under the name of their source, without those that were ``seen``."""
    return [
        replace(each, id=f"{name}:{each.id}", source=name, kind=f"{name} {each.kind}".strip())
        for each in problems
        if question_key(each.question, each.turns) not in seen
    ]


def _total(reports: Sequence[LoadReport]) -> LoadReport:
    """The sum of the counts, and all rows left out."""
    counts = {name: sum(getattr(each, name) for each in reports) for name in ("read", "kept", *LEFT_OUT)}
    return LoadReport(**counts, left_out=tuple(row for each in reports for row in each.left_out))


def load_benchmark(source: ProblemSource, count: int | None, seed: int) -> Sequence[Problem]:
    """The problems of one benchmark, at most ``count``. Generated ones are those that no run trains on.

    Raises UserError if the source cannot be read.
    """
    if source.source in GENERATED:
        refuse_dataset_keys(source)
        return generate(source, count or GENERATED_BENCHMARK, 0, "held_out")
    kept, report = _read(source)
    report.refuse_empty(source.source)
    return tuple(kept[i] for i in np.sort(_choose(len(kept), count, seed)))


def generate(source: ProblemSource, count: int, seed: int, split: DataSplit) -> list[Problem]:
    """``count`` problems of a generated source. Raises UserError if the source has fewer."""
    if source.source == word_problems.SOURCE:
        return word_problems.problems(count, seed, split)
    return arithmetic.problems(source, count, seed, split)


def refuse_dataset_keys(source: ProblemSource) -> None:
    """Raise UserError if a key of data sets is set for a generated source, which has no rows and no fields."""
    for name in (*LAYOUT_KEYS, "layout", "columns"):
        if getattr(source, name) not in (None, ()):
            raise UserError(
                f"data.{name}: this key is for files and data sets; the problems of {source.source} are generated and "
                "have no fields; remove it"
            )


def _generated(data: DataSection, seed: int) -> LoadedData:
    """Generated problems. The two splits have no problem in common."""
    count = GENERATED_PROBLEMS if data.limit is None else data.limit
    apart = _held_out(data, count)
    problems = generate(data, count - apart, seed, "train")
    held_out = generate(data, apart, seed, "held_out")
    return LoadedData(tuple(problems), tuple(held_out), LoadReport(read=count, kept=count))


def _choose(total: int, limit: int | None, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A random choice of ``limit`` indices below ``total``, in random order."""
    return np.random.default_rng([seed, 0]).permutation(total)[: total if limit is None else limit]


def _held_out(data: DataSection, count: int) -> int:
    """How many of ``count`` problems are held out. Raises UserError if none is left to train on."""
    apart = round(count * data.held_out)
    if apart == count:
        raise UserError(
            f"data.held_out = {data.held_out:g} of {count} problems leaves none to train on; choose a smaller share"
        )
    return apart


def _read(source: ProblemSource) -> tuple[list[Problem], LoadReport]:
    """Every usable problem of a file or data set, in order."""
    layout = _layout_of(source)
    condition = Filter(layout.filter) if layout.filter else None
    rows = sources.rows(
        source.source, layout.config, layout.split, _columns(layout, condition) | set(source.columns), layout.files
    )
    return _collect(rows, source, layout, condition)


def _fitting(problems: Sequence[Problem], template: str, tokenizer: Tokenizer, limit: int) -> list[Problem]:
    """The problems whose prompt has at most ``limit`` tokens."""
    longest = limit * tokenizer.longest_token  # characters; a longer question cannot fit and is not encoded
    return [
        problem
        for problem in problems
        if len(problem.question) <= longest and len(encode_prompt(problem, template, tokenizer)) <= limit
    ]


def _layout_of(source: ProblemSource) -> DatasetLayout:
    """The data set's layout, with the recipe's own keys in place of its."""
    name = source.layout or source.source
    if source.layout and name not in LAYOUTS:
        raise UserError(f"data.layout: '{name}' is not a known data set; choose one of {', '.join(LAYOUTS)}")
    own = {key: value for key in LAYOUT_KEYS if (value := getattr(source, key)) is not None}
    layout = replace(LAYOUTS.get(name, DatasetLayout()), **own)
    if source.question is not None:
        layout = replace(layout, read_question=None)
    if source.answer is not None:
        layout = replace(layout, read_answer=None)
    if layout.answer_pattern is not None:
        _check_pattern(layout.answer_pattern)
    return layout


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"data.answer_pattern: {pattern!r} is not a regular expression: {error}") from error
    if groups == 0:
        raise UserError(f"data.answer_pattern: {pattern!r} has no group; put parentheses around the answer")


def _columns(layout: DatasetLayout, condition: Filter | None) -> set[str]:
    names = set(layout.columns)
    if layout.read_question is None:
        names.add(layout.question)
    if layout.read_answer is None:
        names.add(layout.answer)
    if layout.id is not None:
        names.add(layout.id)
    return {name.partition(".")[0] for name in names} | (condition.fields if condition else set())


def _collect(
    rows: sources.LocatedRows, source: ProblemSource, layout: DatasetLayout, condition: Filter | None
) -> tuple[list[Problem], LoadReport]:
    kept: dict[str, Problem] = {}  # by question, with the turns before it
    left_out: Counter[str] = Counter()
    listed: list[LeftOutRow] = []
    read = 0
    for where, row in rows:
        read += 1
        if condition is not None and not condition(row):
            reason = "filtered"
        elif not (question := _encodable(_question(row, layout), where)):
            reason = "empty"
        elif (answer := _answer(row, layout)) is None:
            reason = "without_gold"
        elif (key := question_key(question, turns := _earlier_turns(row, layout))) in kept:
            reason = "duplicated"
        else:
            own_id = row.get(layout.id) if layout.id else None
            columns = {name: row[name] for name in source.columns}
            number = str(read if own_id is None else own_id)
            kept[key] = Problem(number, question, answer, source.source, columns=columns, turns=turns)
            continue
        left_out[reason] += 1
        if left_out[reason] <= LISTED:
            listed.append(LeftOutRow(where, reason))
    return list(kept.values()), LoadReport(read, len(kept), **left_out, left_out=tuple(listed))


def _question(row: DataRow, layout: DatasetLayout) -> str:
    """The text of the question; for a chat, the content of its last turn. Empty if there is none."""
    if layout.read_question and any(row[column] is None for column in layout.columns):
        return ""
    value = layout.read_question(row) if layout.read_question else filters.field(row, layout.question)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value.strip() if isinstance(value, str) else ""


def _earlier_turns(row: DataRow, layout: DatasetLayout) -> tuple[Mapping[str, str], ...]:
    """The turns of a chat before its last one, as role and content; empty if the question is a text."""
    value = None if layout.read_question else filters.field(row, layout.question)
    if not isinstance(value, list):
        return ()
    turns = [turn for turn in value[:-1] if isinstance(turn, dict) and isinstance(turn.get("content"), str)]
    return tuple({"role": str(turn.get("role", "user")), "content": turn["content"]} for turn in turns)


def _encodable(text: str, where: str) -> str:
    """The text unchanged. Raises UserError that names the row if the text holds half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = f"U+{ord(text[error.start]):04X}"
        raise UserError(
            f"{where}: character {error.start + 1} of the question is half a character ({broken}); save the file as "
            "valid UTF-8"
        ) from None
    return text


def _answer(row: DataRow, layout: DatasetLayout) -> str | dict[str, Any] | None:
    """The gold answer as text, or a program's tests as they are. None if the row has neither."""
    if layout.read_answer and any(row[column] is None for column in layout.columns):
        return None
    value = layout.read_answer(row) if layout.read_answer else filters.field(row, layout.answer)
    if isinstance(value, dict):
        return value or None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):  # NaN is what tables hold in an empty cell
        return None
    text = str(value).encode(errors="replace").decode()
    if layout.answer_pattern is not None:
        found = list(re.finditer(layout.answer_pattern, text))
        text = (found[-1][1] or "") if found else ""
    return text.strip() or None
