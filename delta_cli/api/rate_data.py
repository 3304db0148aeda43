"""The pass rate of every problem that a recipe trains on, measured with its model or with a run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from backends.arrays import Doubles
from delta_cli.api.evaluate import EvaluationRequest, Say, engine_section, evaluate
from delta_cli.data.pass_rates import FILE, write_pass_rates
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.evaluation.evaluate import Benchmark
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.runs.checkpoint_reference import CheckpointReference, base_model, find_checkpoint
from delta_cli.runs.folder import RunFolder, writing
from delta_cli.training.setup import evaluation_settings, load_data, load_tokenizer

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the classes that are counted


@dataclass(frozen=True)
class RatedData:
    """The problems to train on, the share of right responses to each, and the file that holds them."""

    problems: Sequence[Problem]
    pass_rates: Doubles  # [P]
    samples: int
    file: Path

    def classes(self) -> dict[str, int]:
        """How many problems are never solved, always solved, and in the classes between."""
        rates = self.pass_rates
        between = {
            f"{low:g} to {high:g}": int(((rates > low) & (rates <= high) & (rates < 1)).sum())
            for low, high in pairwise(EDGES)
        }
        return {"never solved": int((rates == 0).sum())} | between | {"always solved": int((rates == 1).sum())}

    def kept(self, low: float, high: float) -> int:
        """How many problems have a rate between ``low`` and ``high``."""
        return int(((self.pass_rates >= low) & (self.pass_rates <= high)).sum())


def rate_data(
    source: str,
    samples: int,
    backend: str = "auto",
    overrides: tuple[str, ...] = (),
    out: Path | None = None,
    quiet: bool = False,
    say: Say = lambda line: None,
) -> RatedData:
    """Draw and grade responses to each problem as training does, and write pass_rates.jsonl.

    ``source`` is a recipe, whose model is measured, or a run, whose last checkpoint is. After an interruption, the same
    call goes on. Raises UserError, among others if ``out`` holds another evaluation.
    """
    reference = _reference(source, overrides, say)
    assert reference.recipe is not None
    recipe = _unfiltered(reference.recipe)
    problems = load_data(recipe, load_tokenizer(recipe)).problems
    request = EvaluationRequest(
        replace(reference, recipe=recipe),
        f"pass_rates-{Path(source).stem}",
        _as_in_training(recipe, samples),
        [Benchmark("train", problems)],
        is_suite=False,
        limit=None,
    )
    place = out or Path("evaluations") / request.title
    found, folder = evaluate(
        request, backend, engine_section(reference, None), out=out, place=place, quiet=quiet, say=say
    )
    rates = found.benchmarks[0].correct(problem.id for problem in problems).mean(axis=1, dtype=np.float64)
    with writing(folder / FILE):
        write_pass_rates(folder / FILE, problems, rates)
    return RatedData(problems, rates, samples, folder / FILE)


def _reference(source: str, overrides: tuple[str, ...], say: Say) -> CheckpointReference:
    if RunFolder(Path(source)).started:
        if overrides:
            raise UserError(f"--set {overrides[0]}: changes a recipe, and {source} is a run; leave it out")
        found = find_checkpoint(source, None, say)
        assert found.recipe is not None
        return found
    return base_model(load_recipe(Path(source), overrides), source)


def _unfiltered(recipe: Recipe) -> Recipe:
    """The recipe with all its problems, whatever pass rates were measured before."""
    data = recipe.data.but(pass_rate_file=None, pass_rate_min=0.0, pass_rate_max=1.0)
    return recipe.model_copy(update={"data": data})


def _as_in_training(recipe: Recipe, samples: int) -> EvaluationSettings:
    """Sampling with the temperature and length of the recipe's rollouts, from the whole distribution."""
    rollout = recipe.rollout
    changes = {"samples": samples, "temperature": rollout.temperature, "max_tokens": rollout.max_tokens}
    own = evaluation_settings(recipe).model_dump() | changes | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return EvaluationSettings(**own)
