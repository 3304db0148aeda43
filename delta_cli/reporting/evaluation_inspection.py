"""``delta inspect`` of an evaluation: its responses, wrong ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.text import Text

from delta_cli.errors import UserError
from delta_cli.evaluation.response_file import ResponseFile, ResponseLine
from delta_cli.evaluation.results import FILE, EvaluationResult
from delta_cli.text import count, percent, visible

PROBLEMS = 10  # shown as text
SHOWN = 600  # characters of a response, its end


@dataclass(frozen=True)
class EvaluatedProblem:
    """The responses to one problem of an evaluation, wrong ones first."""

    benchmark: str
    id: str
    responses: tuple[ResponseLine, ...]

    @property
    def right(self) -> float:
        """The share of right responses."""
        return sum(each.correct for each in self.responses) / len(self.responses)


@dataclass(frozen=True)
class EvaluationInspection:
    """The problems of an evaluation, those with the fewest right responses first."""

    evaluation: EvaluationResult
    problems: tuple[EvaluatedProblem, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """Every problem with its responses."""
        return [
            {**asdict(each), "responses": [response.model_dump(exclude={"key"}) for response in each.responses]}
            for each in self.problems
        ]


def is_evaluation(path: Path) -> bool:
    """Whether the path is the folder or the file of an evaluation."""
    return path.name == FILE or (path / FILE).is_file()


def inspect_evaluation(path: Path, problem: str | None = None) -> EvaluationInspection:
    """Read an evaluation's responses; ``problem`` keeps one by its id or words of its question.

    Raises UserError if the evaluation cannot be read or no problem is like that.
    """
    folder = path.parent if path.name == FILE else path
    evaluation = EvaluationResult.read(folder)
    problems = []
    for benchmark in evaluation.benchmarks:
        file = folder / evaluation.responses / f"{quote(benchmark.name, safe=' +')}.jsonl"
        by_id: dict[str, dict[int, ResponseLine]] = {}
        for line in ResponseFile.lines(file):
            if line.problem in benchmark.outcomes:
                by_id.setdefault(line.problem, {})[line.sample] = line
        for name, found in by_id.items():
            ordered = sorted(found.values(), key=lambda each: (each.correct, each.sample))
            problems.append(EvaluatedProblem(benchmark.name, name, tuple(ordered)))
    if problem is not None:
        problems = [each for each in problems if each.id == problem or problem in each.responses[0].question]
        if not problems:
            raise UserError(f"--problem {problem}: no problem of {folder} has this id or these words")
    return EvaluationInspection(evaluation, tuple(sorted(problems, key=lambda each: each.right)))


def render(found: EvaluationInspection) -> Iterator[Text]:
    """The evaluation as text: what was measured, then problems and responses."""
    evaluation = found.evaluation
    wrong = sum(each.right < 1 for each in found.problems)
    yield Text(
        f"{evaluation.suite}, {visible(evaluation.label)}: {percent(evaluation.average.avg.mean)} right; "
        f"{wrong} of {count(len(found.problems), 'problem')} with a wrong response"
    )
    for each in found.problems[:PROBLEMS]:
        first = each.responses[0]
        yield Text(
            f"\nproblem {visible(each.id)} ({visible(each.benchmark)}), {percent(each.right)} right", style="bold"
        )
        yield Text(f"  {visible(first.question)}")
        yield Text(f"  gold: {visible(first.gold)}")
        for response in each.responses:
            yield _response(response)
    if len(found.problems) > PROBLEMS:
        more = len(found.problems) - PROBLEMS
        yield Text(f"\n{count(more, 'more problem')}: --problem TEXT shows one, --format json prints all", style="dim")


def _response(response: ResponseLine) -> Text:
    mark, style = ("✓", "green") if response.correct else ("✗", "red")
    notes = [count(response.tokens, "token"), *(["cut at the limit"] if response.truncated else [])]
    notes += [f"answer {visible(response.answer)}"] if response.answer is not None else []
    notes += [visible(response.failure, " ")] if response.failure else []
    text = response.text if len(response.text) <= SHOWN else f"… {response.text[-SHOWN:]}"
    line = Text(f"  {mark} ", style=f"bold {style}").append(", ".join(notes), style="not bold dim")
    return line.append(f"\n    {visible(text)}", style="not bold not dim default")
