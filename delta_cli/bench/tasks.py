"""The tasks of the bench: what a run on each changes in the quickstart's recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from delta_cli import assets
from delta_cli.assets import TINY_BASE
from delta_cli.bench.arms import HINT
from delta_cli.bench.letters import CHAIN_HINT
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.shipped import FOLDER

QUICKSTART = FOLDER / "quickstart.toml"
COMMON = (
    "reward.workers=1",
    "run.threads=1",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "checkpoint.every=1000000",
    "checkpoint.rollouts_every=0",
)


@dataclass(frozen=True)
class Task:
    """A task of the bench."""

    name: str
    title: str
    changes: tuple[str, ...]
    model: str | None = None  # the option of the command that names its model; None: the shipped one
    hint: str = "{question} The answer is {answer}."  # for credits with a second forward pass

    def recipe(self, *changes: str) -> Recipe:
        """The recipe of a run with further changes."""
        hinted = (change.replace(HINT, self.hint) for change in changes)
        return load_recipe(QUICKSTART, [*COMMON, *self.changes, *hinted])


_SHORT = ("run.steps=24", "rollout.prompts=16", "rollout.responses=8", "evaluation.samples=2")

_WORDS = (
    "data.source=word_problems",
    "data.template=two_shot",
    "run.steps=30",
    "rollout.prompts=12",
    "rollout.responses=8",
    "rollout.max_tokens=24",
    'rollout.stop=["\\n"]',
    "reward.kind=number",
    "update.learning_rate=1e-5",
    "update.mini_batches=2",
    "update.micro_batch_tokens=2048",
    "update.head_chunk_tokens=256",
    "evaluation.temperature=0.6",
)


def _letters(name: str, *changes: str) -> tuple[str, ...]:
    """A task of ``letters.py``, whose base benchmarks/make_bench_base.py makes."""
    return (
        f"model.path={Path(assets.__file__).parent / f'{name}-base'}",
        "reward.kind=custom",
        f"reward.custom_file={Path(__file__).parent / 'letters.py'}",
        f"reward.custom_function={name}_reward",
        "update.mini_batches=1",
        "update.learning_rate=2e-4",
        "evaluation.problems=60",
        *changes,
    )


_FORK = _letters(
    "fork", "rollout.prompts=4", "rollout.responses=4", "rollout.max_tokens=90", "run.steps=24", "evaluation.samples=2"
)
_CHAIN = _letters(
    "chain",
    "rollout.prompts=2",
    "rollout.responses=8",
    "rollout.max_tokens=200",
    "run.steps=16",
    "evaluation.samples=1",
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", "the quickstart's additions, responses of 20 tokens", (f"model.path={TINY_BASE}", *_SHORT)),
        Task("noisy", "the quickstart's additions, 20 % of rewards flipped", (*_SHORT, "reward.flip=0.2")),
        Task(
            "sparse",
            "additions of 5 digits from a base that solves 10 %",
            ("data.digits=5", "rollout.max_tokens=80", "update.learning_rate=2e-4", *_SHORT),
            model="--sparse-base",
        ),
        Task("fork", "one free letter among sixty decides; 16 responses a step", _FORK),
        Task("chain", "six of 186 letters decide, 48 are free; 16 responses a step", _CHAIN, hint=CHAIN_HINT),
        Task("words", "SmolLM2-135M on word problems", _WORDS, model="--smollm2"),
    )
}


def find_tasks(names: list[str], models: dict[str, Path | None]) -> list[Task]:
    """The tasks of these names with the models that the user gave.

    Raises UserError for an unknown name, or a task without its model.
    """
    found = []
    for name in names:
        if name not in TASKS:
            raise UserError(f"--task {name}: there is no such task; choose from {', '.join(TASKS)}")
        task = TASKS[name]
        if task.model is not None:
            folder = models.get(task.model)
            if folder is None:
                raise UserError(f"--task {name}: needs a model; give its folder with {task.model}")
            if not (folder / "config.json").is_file():
                raise UserError(f"{task.model} {folder}: holds no model (no config.json); give a model's folder")
            task = replace(task, changes=(f"model.path={folder.resolve()}", *task.changes))
        found.append(task)
    return found
