"""Which problems a run trains on: the section ``[data]``, and what it shares with the benchmarks of a suite."""

from __future__ import annotations

from typing import Literal

from backends.settings import Section, key

USUAL_TEMPLATES = {"arithmetic": "chat", "word_problems": "two_shot"}  # any other source: paper


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


class DataSection(ProblemSource):
    """The problems that are trained on, and their prompt."""

    held_out: float = key(0.05, "share kept for evaluation and never trained on", ge=0, lt=1)
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
        """The prompt template, or the source's usual one if the recipe names none."""
        return self.template or USUAL_TEMPLATES.get(self.source, "paper")
