"""Which problems a run trains on: the section ``[data]``, and what it shares with the benchmarks of a suite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from backends.settings import Section, key

USUAL_TEMPLATES = {"arithmetic": "chat", "word_problems": "two_shot"}  # any other source: paper
NAME = re.compile(r"[a-z][a-z0-9_]*")


class Arithmetic(Section):
    """Generated sums or products whose solutions are written out step by step."""

    operation: Literal["add", "multiply"] = key("add", "arithmetic: what the problems ask for")
    digits: int = key(2, "arithmetic: digits of each operand", ge=1, le=9)
    filler: int = key(
        0, "arithmetic: dashes before each step, formatting that right and wrong responses share", ge=0, le=64
    )


class ProblemSource(Arithmetic):
    """Where problems come from. An absent field is the data set's own, from the table of known data sets."""

    source: str = key(
        "arithmetic",
        'a data set on the hub, a .jsonl, .json, .csv or .parquet file, or generated: "arithmetic", "word_problems"',
        min_length=1,
    )
    config: str | None = key(None, "configuration of a hub data set")
    split: str | None = key(None, "split of a hub data set; absent: the data set's own, or train")
    question: str | None = key(None, "field that holds the question; absent: the data set's own, or question")
    answer: str | None = key(None, "field that holds the gold answer; absent: the data set's own, or answer")
    layout: str | None = key(None, "known data set of which the source is a copy, so that its fields are known")
    answer_pattern: str | None = key(
        None, "regular expression that finds the gold answer in its field: the first group of the last match"
    )
    columns: tuple[str, ...] = key(
        (),
        "further columns of the data: {NAME} in a template and problem.columns[NAME] in a reward of your own hold them",
        strict=False,
    )
    filter: str | None = key(None, 'keep only rows that meet this condition, e.g. "difficulty >= 5"')
    limit: int | None = key(
        None, "use at most this many problems; absent: all, or 5000 generated ones", "problems", ge=1
    )


class MixedSource(ProblemSource):
    """One of several sources of problems."""

    weight: float = key(1.0, "share of the prompts, in proportion to the other weights", gt=0, le=1e6)


class DataSection(ProblemSource):
    """The problems that are trained on, and their prompt."""

    sources: dict[str, MixedSource] = key(
        {},
        "several sources: tables [data.sources.NAME] with weight, and the keys above that say where problems come from",
    )
    held_out: float = key(0.05, "share kept for evaluation and never trained on", ge=0, lt=1)
    pass_rate_file: str | None = key(
        None,
        "pass rates of the problems, from `delta data rate`: a .jsonl file of question and pass_rate, or the responses "
        "that `delta eval` keeps",
        min_length=1,
    )
    pass_rate_min: float = key(0.0, "train only on problems with at least this pass rate in the file", ge=0, le=1)
    pass_rate_max: float = key(1.0, "train only on problems with at most this pass rate in the file", ge=0, le=1)
    curriculum: Literal["none", "pass_rate"] = key(
        "none",
        "order of the prompts; none: shuffled epochs; pass_rate: drawn in proportion to p · (1 − p), where p is the "
        "share of right responses when the problem was last drawn, and 1/2 at first",
    )
    curriculum_exploration: float = key(
        0.25,
        "pass_rate: share of the prompts that come from shuffled epochs instead, so that every problem comes again",
        gt=0,
        le=1,
    )
    template: str | None = key(
        None,
        "prompt template: paper, chat, chat_boxed, plain, two_shot, or text with {question}; absent: chat for "
        "arithmetic, two_shot for word_problems, otherwise paper",
    )
    system: str | None = key(None, "system message at the start of the chat, for the templates chat and chat_boxed")
    thinking: bool | None = key(
        None, "value of the chat template's switch enable_thinking; absent: the template's default"
    )

    @property
    def prompt_template(self) -> str:
        """The prompt template, or the usual one of all sources if the recipe names none."""
        usual = {USUAL_TEMPLATES.get(each.source, "paper") for each in (self.sources.values() or (self,))}
        return self.template or (usual.pop() if len(usual) == 1 else "paper")

    @property
    def filters_pass_rates(self) -> bool:
        """Whether problems outside a range of pass rates are left out."""
        return (self.pass_rate_min, self.pass_rate_max) != (0.0, 1.0)

    @property
    def exploration(self) -> float:
        """The share of the prompts that come from shuffled epochs."""
        return 1.0 if self.curriculum == "none" else self.curriculum_exploration

    @property
    def title(self) -> str:
        """What the problems are called in messages: the source, or the names of several."""
        return " + ".join(self.sources) or self.source

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each of several sources, by its name; empty if there is one source."""
        return {name: source.weight for name, source in self.sources.items()}

    def parts(self) -> Sequence[tuple[str, DataSection]]:
        """Each of several sources as a section of its own."""
        shared = {
            name: getattr(self, name) for name in DataSection.model_fields if name not in MixedSource.model_fields
        }
        return [
            (name, DataSection(**(shared | {"sources": {}} | source.model_dump(exclude={"weight"}))))
            for name, source in self.sources.items()
        ]

    @model_validator(mode="after")
    def _one_source_or_several(self) -> Self:
        if self.pass_rate_min > self.pass_rate_max:
            raise ValueError(f"data.pass_rate_min = {self.pass_rate_min:g} is above data.pass_rate_max")
        if self.filters_pass_rates and self.pass_rate_file is None:
            raise ValueError(
                "data.pass_rate_min and data.pass_rate_max need data.pass_rate_file; `delta data rate` writes one, and "
                "data.filter compares with a column of the data"
            )
        for name in self.sources:
            if not NAME.fullmatch(name):
                raise ValueError(f"data.sources.{name}: use small letters, digits and _ in the name of a source")
        named = {column for source in self.sources.values() for column in source.columns}
        for name, source in self.sources.items():
            if absent := [each for each in sorted(named - {*source.columns}) if f"{{{each}}}" in (self.template or "")]:
                raise ValueError(
                    f"data.template names {{{absent[0]}}}, which data.sources.{name} does not load; add it to "
                    f"data.sources.{name}.columns"
                )
        for name, field in ProblemSource.model_fields.items():
            if self.sources and (value := getattr(self, name)) != field.default:
                first = next(iter(self.sources))
                raise ValueError(
                    f"data.{name} = {value!r} is for a single source; write it in the tables of the sources, such as "
                    f"[data.sources.{first}]"
                )
        return self
