"""Runs that record where the values of a recipe arrive: the settings that are made and the calls of the backend."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backends import registry
from backends.collective import SOLO
from backends.fake.backend import FakeEngine
from backends.interface import RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from delta_cli.credit import CoefficientSettings, MiniBatch, Surrogate, coefficients
from delta_cli.data.load_report import LoadedData
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader
from delta_cli.runs.folder import RunFolder
from tests.harness import Watcher, train


@dataclass
class Seen:
    """What happened in a run: the records that were made, and the backend's calls with their phase."""

    made: dict[type, list[Any]] = field(default_factory=lambda: defaultdict(list))
    rewards: list[Reward] = field(default_factory=list)  # of every grader
    rollouts: list[tuple[str, int, Sampling]] = field(default_factory=list)  # phase, prompts, sampling
    scored: list[tuple[Sequences, Any]] = field(default_factory=list)  # with the proxy
    rates: list[float] = field(default_factory=list)
    grouped: int = 0  # calls that computed a contrast within groups
    phase: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)  # metrics of each step
    notices: list[str] = field(default_factory=list)
    folder: RunFolder = field(default_factory=lambda: RunFolder(Path()))

    def the(self, kind: type, name: str) -> Any:
        """The value that all records of a kind have in a field; the name may have dots."""
        found = []
        for record in self.made[kind]:
            for part in name.split("."):
                record = getattr(record, part)
            found.append(record)
        return one(found)

    def samplings(self, phase: str) -> list[Sampling]:
        """The sampling settings of a phase."""
        return [sampling for name, _, sampling in self.rollouts if name == phase]


def one(values: list[Any]) -> Any:
    """The value that all of them equal."""
    assert values
    assert all(value == values[0] for value in values), values
    return values[0]


def watch(seen: Seen, patch: pytest.MonkeyPatch) -> None:
    """Record everything that is made or called. The backend is always the fake one."""
    for kind in (LoadedData, EvaluationSettings, CoefficientSettings, MiniBatch, Surrogate):
        patch.setattr(
            kind, "__init__", noting(kind.__init__, lambda self, *_, **__: seen.made[type(self)].append(self))
        )

    def graded(_: Any, reward: Reward, *__: Any) -> None:
        seen.rewards.append(reward)

    patch.setattr(Grader, "__init__", noting(Grader.__init__, graded))

    def create(name: str, settings: BackendSettings, collective: Any = SOLO) -> FakeEngine:
        seen.made[BackendSettings].append(settings)
        plain = BackendSettings.of(
            settings.model.path,
            micro_batch_tokens=settings.memory.micro_batch_tokens,
            seed=settings.seed,
            keep_reference=settings.keep_reference,
        )
        return FakeEngine(plain, name)

    def drawn(_: Any, request: RolloutRequest, *__: Any) -> None:
        seen.rollouts.append((seen.phase, len(request.prompts), request.sampling))

    patch.setattr(registry, "create", create)
    patch.setattr(FakeEngine, "rollout", noting(FakeEngine.rollout, drawn))
    patch.setattr(
        FakeEngine, "score", noting(FakeEngine.score, lambda _, s, proxy=None: seen.scored.append((s, proxy)))
    )
    patch.setattr(FakeEngine, "step", noting(FakeEngine.step, lambda _, rate, *__, **___: seen.rates.append(rate)))

    def grouped(*_: Any) -> None:
        seen.grouped += 1

    patch.setattr(coefficients, "_contrast_groups", noting(coefficients._contrast_groups, grouped))


def noting(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """The function, followed by a call of ``note`` with the same arguments."""

    def noted(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        note(*given, **named)
        return result

    return noted


def run(folder: Path, values: Mapping[str, Any]) -> Seen:
    """Train with these keys only and return what happened."""
    seen = Seen(folder=RunFolder(folder))
    watcher = Watcher(lambda phase: setattr(seen, "phase", phase))
    with pytest.MonkeyPatch.context() as patch:
        recipe = recipe_of(values)
        watch(seen, patch)
        train(recipe, folder, observer=watcher)
    seen.records, seen.notices = watcher.records, [notice.text for notice in watcher.notices]
    return seen


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    return load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in values.items()])
