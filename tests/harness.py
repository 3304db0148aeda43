"""Small runs to train, stop, break and compare: a task a random model learns in a few steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_base import write_tokenizer
from safetensors import safe_open
from safetensors.numpy import load_file

from delta_cli.assets.random_model import write_qwen3
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.rewards.grader import Verdict
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines
from delta_cli.runs.observer import Notice, Observer
from delta_cli.training.setup import open_trainer
from delta_cli.training.trainer import Trainer

VOCABULARY = 258  # of the byte tokenizer: bytes, padding, end of sequence
CLOCKS = ("seconds", "tokens_per_second", "rollout_tokens_per_second", "peak_memory", "swapped")

# The reward is −length/100, so a model that draws its 258 tokens at random learns to end its responses.
SHORT = {
    "run.steps": 6,
    "data.limit": 48,
    "data.held_out": 0.25,
    "rollout.prompts": 4,
    "rollout.responses": 8,
    "rollout.max_tokens": 16,
    "reward.length_penalty": 10.0,
    "reward.workers": 1,  # each process needs half a second to start
    "update.learning_rate": 0.1,
    "update.mini_batches": 2,
    "evaluation.every": 2,
    "evaluation.problems": 6,
    "checkpoint.every": 2,
}


def write_model(folder: Path, hidden: int = 16, **shape: Any) -> Path:
    """Write a random Qwen3 with the byte tokenizer; ``shape`` is passed to ``write_qwen3``."""
    small: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    write_qwen3(folder, vocab_size=VOCABULARY, hidden=hidden, **(small | shape))
    write_tokenizer(folder)
    return folder


def make_recipe(model: Path, **changes: Any) -> Recipe:
    """The recipe SHORT for a model, with changes given as ``section__key=value``."""
    keys = SHORT | {"model.path": str(model)} | {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in keys.items() if value is not None])


class Watcher(Observer):
    """Records metrics and notices; ``on_phase`` is called when a phase begins."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.records: list[JsonObject] = []
        self.notices: list[Notice] = []
        self.on_phase = on_phase

    def phase(self, name: str, total: int = 0) -> None:
        self.on_phase(name)

    def step(self, record: JsonObject, examples: list[Any]) -> None:
        self.records.append(record)

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    @property
    def named(self) -> set[str]:
        return {notice.name for notice in self.notices}


def train(
    recipe: Recipe,
    folder: Path,
    backend: str = "fake",
    *,
    resume: bool = False,
    observer: Observer | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> Watcher:
    """Train to the last step and return the observer."""
    watcher = observer or Watcher()
    with open_trainer(recipe, backend, folder, watcher, stop_asked) as trainer:
        prepare(trainer)
        trainer.run(resume)
    assert isinstance(watcher, Watcher)
    return watcher


def lines(file: Path) -> list[JsonObject]:
    """The records of a .jsonl file without times and memory, which differ from run to run."""
    return [
        {name: value for name, value in record.items() if not name.startswith(CLOCKS)} for record in read_lines(file)
    ]


def contents(folder: Path, weights: bool = True) -> dict[str, Any]:
    """Everything in a run folder that an interruption must not change, by name."""
    run = RunFolder(folder)
    found: dict[str, Any] = {
        file.name: lines(file) if file.exists() else [] for file in (run.metrics, run.evaluations, run.notices)
    }
    found |= {file.name: list(read_lines(file)) for file in sorted(run.rollouts.glob("step-*"))}
    newest = max(run.checkpoints.glob("step-*"))
    found["state.json"] = (newest / "state.json").read_text()
    found["recipe.toml"] = (newest / "recipe.toml").read_text()
    if weights:
        for file in [*sorted(newest.glob("*.safetensors")), *sorted(run.model.glob("*.safetensors"))]:
            found |= {f"{file.parent.name}/{file.name}/{name}": value for name, value in tensors(file).items()}
    return found


def tensors(file: Path) -> dict[str, Any]:
    """The bytes of every tensor, and the metadata, by name: their order in the file may differ."""
    with safe_open(file, "numpy") as stored:
        found: dict[str, Any] = {name: stored.get_tensor(name).tobytes() for name in stored.keys()}  # noqa: SIM118
        return found | {"metadata": stored.metadata()}


def assert_same(first: Path, second: Path) -> None:
    """Two runs are equal bit for bit: weights, optimizer, metrics, evaluations, notices, rollouts, data order."""
    one, other = contents(first), contents(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value == other[name], name


def exported(folder: Path) -> dict[str, np.ndarray]:
    """The weights a run ended with."""
    return load_file(folder / "model" / "model.safetensors")


def drawn(folder: Path) -> list[Sequence[str]]:
    """Ids of the problems of each recorded step."""
    files = sorted((folder / "rollouts").glob("step-*"))
    return [list(dict.fromkeys(record["problem"] for record in read_lines(file))) for file in files]


class EarnedGrader:
    """A grader that passes on what the environment gave, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, bool, float | None]] = []

    def submit(
        self, text: str, problem: object, length: int, truncated: bool, earned: float | None, place: object = None
    ) -> Future[Verdict]:
        """A verdict of the reward that the environment gave; 1 is right."""
        self.asked.append((text, length, truncated, earned))
        found: Future[Verdict] = Future()
        found.set_result(Verdict(earned or 0.0, (earned or 0.0) >= 1, None))
        return found
