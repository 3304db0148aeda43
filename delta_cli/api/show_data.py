"""The rows of a data file or of a recipe as the model gets them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delta_cli.assets import model_path
from delta_cli.data import sources
from delta_cli.data.columns import find_columns
from delta_cli.data.load_report import LEFT_OUT, LoadReport
from delta_cli.data.loading import load_problems
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import CHAT, dropped_turns, encode_prompt, render_problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe, parse_recipe
from delta_cli.training.setup import given_problems, load_tokenizer

SAMPLE = 200  # rows that tell which column is which


@dataclass(frozen=True)
class ShownProblem:
    """A problem as the model gets it."""

    id: str
    held_out: bool
    prompt: str
    tokens: int | None  # of the prompt; None without a tokenizer
    answer: Any


@dataclass(frozen=True)
class ShownData:
    """The problems of a source, and the rows that are not problems."""

    problems: tuple[ShownProblem, ...]
    report: LoadReport
    notice: str = ""  # what the prompt template leaves out

    @property
    def left_out(self) -> list[tuple[str, str]]:
        """The first rows left out for each reason: where each is, and why."""
        return [(row.where, LEFT_OUT[row.reason]) for row in self.report.left_out]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "problems": [asdict(each) for each in self.problems],
            "left_out": [{"where": where, "why": why} for where, why in self.left_out],
            "report": str(self.report),
        }


def show_data(source: str, model: str | None, overrides: tuple[str, ...] = ()) -> ShownData:
    """The problems of a recipe, or of a data file whose columns are then guessed as ``delta init`` does.

    ``model`` gives the tokenizer and the chat template; a recipe names its own. Without one, prompts are text and not
    counted. Raises UserError if the source cannot be read.
    """
    is_data = source.endswith(sources.SUFFIXES)
    recipe = _recipe_for(source, overrides) if is_data else load_recipe(Path(source), overrides)
    chosen = model if is_data or model else recipe.model.path
    tokenizer = None
    if chosen is not None:
        changed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model_path(chosen)})})
        tokenizer = load_tokenizer(changed)
    longest = recipe.rollout.max_prompt_tokens if recipe.rollout.long_prompts == "drop" and not is_data else None
    loaded = load_problems(recipe.data, recipe.run.seed, tokenizer, longest, given_problems(recipe))
    held_out = {problem.id for problem in loaded.held_out}
    template = recipe.data.prompt_template
    if tokenizer is None and template in CHAT:
        template = "plain"
    everything = sorted((*loaded.problems, *loaded.held_out), key=lambda each: _order(each.id))
    shown = tuple(_shown(problem, problem.id in held_out, template, tokenizer) for problem in everything)
    return ShownData(shown, loaded.report, dropped_turns(recipe.data.prompt_template, everything))


def _recipe_for(file: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe that only names a data file and its columns."""
    found = find_columns(file, sources.first_rows(file, SAMPLE))
    data = {"source": file, "question": found.question, "answer": found.answer, "template": "chat", "held_out": 0.0}
    if found.pattern:
        data["answer_pattern"] = found.pattern
    if overrides:
        raise UserError(f"--set {overrides[0]}: changes a recipe, and {file} is a data file; give the recipe instead")
    return parse_recipe({"data": data}, file)


def _shown(problem: Problem, held_out: bool, template: str, tokenizer: Tokenizer | None) -> ShownProblem:
    if tokenizer is None:
        return ShownProblem(problem.id, held_out, problem.question, None, problem.answer)
    tokens = encode_prompt(problem, template, tokenizer)
    return ShownProblem(problem.id, held_out, render_problem(template, problem, tokenizer), len(tokens), problem.answer)


def _order(name: str) -> tuple[int, str]:
    """Ids that are numbers in the order of the numbers, the others after them."""
    return (int(name), "") if name.isdigit() else (2**62, name)
