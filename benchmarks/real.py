"""A step of a real language model: seconds by phase, tokens a second, memory, share of the peak; and TRL's.

    make models/smollm2-135m/config.json
    python benchmarks/real.py --out benchmarks/results/real.json

Both train SmolLM2-135M on the recipe's word problems, the same prompts with responses of the same number
of tokens, in fresh processes with the same threads. Every response has 16 tokens: no token ends one.
What TRL is set to is in step.py; its steps have the recipe's two updates and the loss of grpo, ours
delta's credit on top. ``--ours`` leaves TRL out, which takes most of the time.

The arithmetic of a step is counted, not measured: 2 floating-point operations for each weight and token
of a forward, and three times that for a forward with its backward; a prompt once for all its responses.
The peak is the best of a few matrix products in float32 on the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import in_fresh_process, peak_memory, show, write

from backends import registry
from delta_cli.data import word_problems
from delta_cli.data.prompts import encode_prompt, render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.rewards.responses import RolloutWorker
from delta_cli.training.clock import Clock
from delta_cli.training.rollouts import roll
from delta_cli.training.setup import backend_settings, make_grader
from delta_cli.training.update import Updater

ROOT = Path(__file__).parents[1]
PHASES = ("rollout", "reward", "score", "credit", "update")
LENGTH = 16  # tokens of every response
PRODUCT = (2048, 576, 1536)  # tokens × hidden × intermediate: the model's own largest


def recipe_of(model: str, prompts: int) -> Recipe:
    """The recipe's step with so many prompts; rewards that differ in every group."""
    reward = Path(__file__).with_name("reward.py")
    changes = (f"model.path={model}", f"rollout.prompts={prompts}", f"rollout.max_tokens={LENGTH}", "rollout.stop=[]")
    own = ("reward.kind=custom", f"reward.custom_file={reward}")
    return load_recipe(ROOT / "recipes" / "smollm2_135m.toml", [*changes, *own])


def ours(model: str, prompts: int, rounds: int) -> dict[str, Any]:
    """Seconds of the phases of our steps, their median, and the most memory."""
    recipe = recipe_of(model, prompts)
    tokenizer = Tokenizer.load(model)
    tokenizer.eos_ids = ()  # nothing ends a response but the limit
    problems = word_problems.problems(prompts, 0)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with make_grader(recipe) as grader:
        engine = registry.create("cpu", backend_settings(recipe))
        worker = RolloutWorker(engine, tokenizer, grader, "two_shot")
        updater = Updater(recipe, engine)
        for number in range(rounds):
            clock = Clock()
            with clock.phase("rollout"):
                waiting = roll(worker, problems, recipe.rollout, number)
            with clock.phase("reward"):
                batch = waiting.result()
            with clock.phase("score"):
                scored = updater.score(batch)
            with clock.phase("credit"):
                credit = updater.credit(batch, scored, number)
            with clock.phase("update"):
                updater.update(batch, credit, number)
            assert (batch.sequences.lengths == LENGTH).all()
            for phase in PHASES:
                seconds[phase].append(clock.seconds[phase])
        prompt_tokens = sum(len(encode_prompt(problem, "two_shot", tokenizer)) for problem in problems)
        parameters = engine.parameters
        engine.close()
    median = {phase: statistics.median(values) for phase, values in seconds.items()}
    whole = sum(median.values())
    tokens = prompts * recipe.rollout.responses * LENGTH
    own = prompt_tokens + tokens
    operations = 2 * parameters * own * (1 + 1 + 3)  # drawn, scored, and a forward with its backward
    return {
        "seconds": median | {"step": whole},
        "peak_bytes": peak_memory(),
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "operations": operations,
        "operations_per_second": operations / whole,
    }


def alternating(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ in every group."""
    return [float(at % 2) for at in range(len(completions))]


def trl(model: str, prompts: int, rounds: int) -> dict[str, Any]:
    """Seconds of TRL's steps and its most memory."""
    from datasets import Dataset
    from step import trl_settings
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from workload import Workload

    recipe, tokenizer = recipe_of(model, prompts), Tokenizer.load(model)
    responses, updates = recipe.rollout.responses, recipe.update.mini_batches
    workload = Workload(49152, prompts=prompts, responses=responses, response=LENGTH, mini_batches=updates)
    texts = [render("two_shot", each.question, tokenizer) for each in word_problems.problems(prompts, 0)]
    taken: list[float] = []

    class Clocked(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % updates == 0:
                taken.append(time.perf_counter() - self.started)
                self.started = time.perf_counter()

    with TemporaryDirectory() as scratch:
        args = trl_settings(workload, Path(scratch), rounds)
        trainer = GRPOTrainer(
            model,
            alternating,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts * rounds]),
            callbacks=[Clocked()],
        )
        trainer.train()
    return {"seconds": {"step": statistics.median(taken)}, "peak_bytes": peak_memory()}


def peak_of_products() -> float:
    """Floating-point operations a second of the best of a few matrix products."""
    import torch

    rows, inner, columns = PRODUCT
    first, second = torch.randn(rows, inner), torch.randn(inner, columns)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        first @ second
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best


def main() -> None:
    """Measure both, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="steps of ours")
    parser.add_argument("--trl-rounds", type=int, default=1, help="of TRL's, which take minutes each")
    parser.add_argument("--ours", action="store_true", help="leave TRL out")
    parser.add_argument("--out")
    parser.add_argument("--only", choices=("ours", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.only:
        run, rounds = (ours, args.rounds) if args.only == "ours" else (trl, args.trl_rounds)
        print(json.dumps(run(args.model, args.prompts, rounds)))
        return
    passed = ["--model", args.model, "--prompts", str(args.prompts)]
    passed += ["--rounds", str(args.rounds), "--trl-rounds", str(args.trl_rounds)]
    names = ("ours",) if args.ours else ("ours", "trl")
    found = {name: in_fresh_process(__file__, *passed, "--only", name) for name in names}
    peak = peak_of_products()
    found["ours"]["share_of_peak"] = found["ours"]["operations_per_second"] / peak
    rows = [
        {
            "": name,
            **{phase: f"{each['seconds'].get(phase, float('nan')):.2f}" for phase in (*PHASES, "step")},
            "peak (GB)": f"{each['peak_bytes'] / 1e9:.2f}",
        }
        for name, each in found.items()
    ]
    show(f"seconds of a step, {args.prompts} prompts of 8 responses", rows)
    result = {"benchmark": "real", "prompts": args.prompts, "peak_operations_per_second": peak, "results": found}
    if "trl" in found:
        result["times_as_fast"] = found["trl"]["seconds"]["step"] / found["ours"]["seconds"]["step"]
        result["times_the_memory"] = found["ours"]["peak_bytes"] / found["trl"]["peak_bytes"]
        print(f"{result['times_as_fast']:.1f} times as fast, {result['times_the_memory']:.2f} of the memory")
    print(f"{100 * found['ours']['share_of_peak']:.0f} % of the {peak / 1e9:.0f} GFLOP/s of a matrix product")
    write(args.out, result)


if __name__ == "__main__":
    main()
