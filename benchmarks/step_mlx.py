"""A whole training step on MLX against mlx-lm-lora's GRPO, and what it takes with checkpointing.

    pip install --no-deps mlx-lm-lora==5.10.2
    python benchmarks/step_mlx.py --out benchmarks/results/step_mlx.json
    python benchmarks/step_mlx.py --prompt 64 --response 64 --out benchmarks/results/step_mlx_shared.json
    python benchmarks/step_mlx.py --count --out benchmarks/results/step_mlx_products.json

Both train the same random Qwen3 (float32) on the same prompts; every response has the same length. A step is a batch of
rollouts and one update on it. mlx-lm-lora does no scoring: it takes the policy as it is for the one before. It draws
and differentiates as many responses at a time as there are prompts, which is what its own trainer asks for. Its KL term
is off, its clip symmetric, its optimizer MLX's AdamW. Rewards differ within every group on both sides.

Steps are taken in turns: one of theirs, then one of ours each way. ``--count`` counts the operations of the matrix
products of one step each instead: on other hardware the seconds differ, the products do not.
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import median_ratio, show, write
from products import counted_products
from workload import PHASES, Steps, Workload

from backends import registry
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.training.setup import make_grader
from delta_cli.training.update import Updater

SMALL = {"vocabulary": 512, "hidden": 128, "layers": 4, "response": 48, "mini_batches": 1}
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "delta": {"preset": "delta"},
    "delta, as drawn": {"preset": "delta", "score": "rollout"},
    "delta, checkpointing": {"preset": "delta", "checkpointing": True},
}


def ours(
    workload: Workload,
    model: Path,
    stack: ExitStack,
    preset: str,
    score: str = "recompute",
    checkpointing: bool = False,
) -> Steps:
    """Steps of this project, whose responses run to the limit."""
    recipe = workload.recipe(model, preset, score)
    tokenizer = Tokenizer.load(str(model))
    tokenizer.eos_ids = ()
    grader = stack.enter_context(make_grader(recipe))
    settings = backend_settings(recipe)
    engine = registry.create("mlx", replace(settings, model=settings.model.but(gradient_checkpointing=checkpointing)))
    stack.callback(engine.close)
    return Steps(workload, RolloutWorker(engine, tokenizer, grader, "plain"), Updater(recipe, engine))


def theirs(workload: Workload, model: Path, rounds: int, between: Callable[[], object]) -> list[float]:
    """Seconds of each of mlx-lm-lora's steps; ``between`` runs after each."""
    from mlx.optimizers import AdamW
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.utils import load
    from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, train_grpo

    policy, tokenizer = load(str(model))
    policy.unfreeze()
    tokenizer._eos_token_ids = set()
    taken: list[float] = []

    class Turns(TrainingCallback):  # type: ignore[misc]
        """A step of theirs is done: it is clocked by themselves, and their clock starts again after this."""

        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            taken.append(1 / train_info["iterations_per_second"])
            between()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]

    train_grpo(
        policy,
        None,
        tokenizer,
        AdamW(learning_rate=workload.learning_rate, weight_decay=workload.weight_decay),
        [(tokenizer.encode(text), [0], text, "") for text in workload.questions()],
        reward_funcs=[reward],
        args=GRPOTrainingArgs(
            batch_size=workload.prompts,
            iters=rounds,
            steps_per_report=1,
            steps_per_save=rounds + 1,
            adapter_file=str(model / "theirs.safetensors"),
            group_size=workload.responses,
            beta=0.0,
            epsilon=0.2,
            max_completion_length=workload.response,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        ),
        training_callback=Turns(),
        end_answer_token="",
    )
    return taken


def measure(workload: Workload, rounds: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each trainer's steps, the first round left out."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        model = workload.write(Path(scratch))
        ways = {name: ours(workload, model, stack, **way) for name, way in WAYS.items()}

        def turn() -> None:
            for step in ways.values():
                step()

        wholes = {"mlx-lm-lora": theirs(workload, model, rounds + 1, turn)[1:]}
        taken = {name: step.seconds[1:] for name, step in ways.items()}
    wholes |= {name: [sum(row.values()) for row in rows] for name, rows in taken.items()}
    return {
        name: {
            "seconds": {phase: statistics.median(row[phase] for row in taken[name]) for phase in PHASES}
            if name in taken
            else {},
            "step": statistics.median(rows),
            "rounds": rows,
            "speedup": median_ratio(wholes["mlx-lm-lora"], rows),
        }
        for name, rows in wholes.items()
    }


def count(workload: Workload) -> dict[str, dict[str, Any]]:
    """The operations of the matrix products of one step of each trainer."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        model = workload.write(Path(scratch))
        steps: dict[str, Callable[[], Any]] = {"mlx-lm-lora": lambda: theirs(workload, model, 1, lambda: None)}
        steps |= {name: ours(workload, model, stack, **way) for name, way in WAYS.items()}
        found = {}
        for name, step in steps.items():
            with counted_products() as products:
                step()
            found[name] = products.operations
    return {name: {"products": each, "fewer": found["mlx-lm-lora"] / each} for name, each in found.items()}


def counts_table(result: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each trainer."""
    return [
        {"trainer": name, "operations": f"{row['products'] / 1e9:.1f}e9", "fewer": f"{row['fewer']:.2f}×"}
        for name, row in result.items()
    ]


def table(result: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each trainer."""
    return [
        {
            "trainer": name,
            **{phase: f"{row['seconds'][phase]:.2f}" if row["seconds"] else "" for phase in PHASES},
            "step (s)": f"{row['step']:.2f}",
            "faster": f"{row['speedup']:.2f}×",
        }
        for name, row in result.items()
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", action="store_true", help="count the products of a step instead of timing steps")
    parser.add_argument("--out", help="where to write the JSON")
    workload, args = Workload.from_arguments(parser, **SMALL)
    result = count(workload) if args.count else measure(workload, args.rounds)
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(workload).items())
    show(f"one training step on MLX: {sizes}", counts_table(result) if args.count else table(result))
    rounds = {} if args.count else {"rounds": args.rounds}
    write(args.out, {"benchmark": "step_mlx", "workload": asdict(workload), **rounds, "results": result})


if __name__ == "__main__":
    main()
