"""A step of a real language model: seconds by phase, what is saved, memory, share of the peak; and TRL's.

    make models/smollm2-135m/config.json
    python benchmarks/real.py --out benchmarks/results/real.json
    python benchmarks/real.py --unmixed 0.5 --trl-rounds 0 --out benchmarks/results/real_unmixed.json

SmolLM2-135M on the prompts of recipes/smollm2_135m.toml, two solved word problems before each; every response has 16
tokens: none ends one. Two updates a step. Rewards are made up, so that a known share of the prompts teaches nothing.
The ways are those of step.py: every response scored and updated on; what is learned from; and that with scores as they
were drawn. One step of each in every round, in turns, on one model, with delta's credit.

TRL trains the same model on the same prompts and lengths, in a process of its own, after ours; what it is set to is in
step.py, its loss is that of grpo. Peak memory is that of either process.

``of peak`` is the arithmetic of scoring's forward (of updating, three times that) by its time: 2 operations for each
weight and token, a prompt once for all its responses, attention left out. The peak is the best of a few products of
matrices in the type of the compute, on the same threads or the GPU. There memory is what torch allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import device_peak, in_fresh_process, median_ratio, show, write
from workload import PHASES, EveryResponse, Workload, spread_out, timed_step

from backends import registry
from delta_cli.data import word_problems
from delta_cli.data.prompts import render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.training.setup import make_grader
from delta_cli.training.update import Updater

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_135m.toml"
LENGTH = 16  # tokens of every response
PRODUCT = (2048, 576, 1536)  # tokens × hidden × intermediate: the model's own largest
WAYS: dict[str, tuple[type[Updater], str]] = {
    "every response": (EveryResponse, "recompute"),
    "recompute": (Updater, "recompute"),
    "as drawn": (Updater, "rollout"),
}


def recipe_of(args: argparse.Namespace, score: str = "recompute") -> Recipe:
    """The recipe's step with so many prompts."""
    rollout = ("rollout.stop=[]", f"rollout.prompts={args.prompts}", f"rollout.max_tokens={LENGTH}")
    batch = f"rollout.batch={8 * args.prompts}"
    model = (f"model.path={args.model}", f"model.dtype={args.dtype}")
    tokens = f"update.micro_batch_tokens={args.micro_batch_tokens}"
    return load_recipe(RECIPE, [*model, *rollout, batch, tokens, f"update.old_logprobs={score}"])


@dataclass
class Way:
    """The steps of one way."""

    updater: Updater
    worker: RolloutWorker
    unmixed: float
    head: int  # numbers in the output matrix
    seconds: list[dict[str, float]] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)  # of one forward over what was updated on

    def step(self, number: int) -> None:
        """One step."""
        problems = word_problems.problems(self.updater.recipe.rollout.prompts, number)
        seconds, scored = timed_step(self.updater, self.worker, problems, number, self._rewarded)
        batch = scored.rollout
        assert (batch.sequences.lengths == LENGTH).all()
        seen = (scored.advantages != 0) | isinstance(self.updater, EveryResponse)
        tokens = float(batch.tokens_of_groups(seen).sum())
        trunk = self.updater.learner.parameters - self.head
        self.operations.append(2 * (trunk * tokens + self.head * float(batch.sequences.lengths[seen].sum())))
        self.seconds.append(seconds)

    def _rewarded(self, batch: RolloutBatch) -> RolloutBatch:
        """Every other response is right, but for the share of prompts where all are."""
        equal = np.repeat(spread_out(len(batch.problems), self.unmixed), batch.samples)
        rewards = np.where(equal, 1.0, np.arange(len(batch.texts)) % 2)
        verdicts = zip(batch.verdicts, rewards, strict=True)
        return replace(batch, verdicts=tuple(replace(v, reward=float(reward)) for v, reward in verdicts))


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each way's phases, a step before the first left out, and the most memory."""
    tokenizer = Tokenizer.load(args.model)
    tokenizer.eos_ids = ()  # nothing ends a response but the limit
    config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    recipe = recipe_of(args)
    with make_grader(recipe) as grader:
        engine = registry.create(args.backend, backend_settings(recipe))
        worker = RolloutWorker(engine, tokenizer, grader, "two_shot")
        head = engine.vocabulary * config["hidden_size"]
        ways = {
            name: Way(kind(recipe_of(args, score), engine), worker, args.unmixed, head)
            for name, (kind, score) in WAYS.items()
        }
        replace(ways["recompute"], seconds=[], operations=[]).step(0)  # allocates gradient and moments
        for number in range(1, args.rounds + 1):
            for way in ways.values():
                way.step(number)
        threads = engine.threads
        engine.close()
    top = peak_of_products(args.backend, args.dtype)
    wholes = {name: [sum(row.values()) for row in way.seconds] for name, way in ways.items()}
    found = {name: _numbers(way, wholes, wholes[name], top) for name, way in ways.items()}
    return {
        "ways": found,
        "threads": threads,
        "peak_operations_per_second": top,
        "peak_bytes": device_peak(args.backend),
    }


def _numbers(way: Way, wholes: dict[str, list[float]], own: list[float], top: float) -> dict[str, Any]:
    seconds = {phase: statistics.median(row[phase] for row in way.seconds) for phase in PHASES}
    operations = statistics.median(way.operations)
    scored = way.updater.recipe.update.old_logprobs == "recompute"
    return {
        "seconds": seconds,
        "step": statistics.median(own),
        "rounds": own,
        "faster": median_ratio(wholes["every response"], own),
        "of_peak": ({"score": operations / seconds["score"] / top} if scored else {})
        | {"update": 3 * operations / seconds["update"] / top},
    }


def trl(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of TRL's steps and its most memory."""
    from datasets import Dataset
    from step import trl_settings
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    recipe, tokenizer = recipe_of(args), Tokenizer.load(args.model)
    prompts, rounds = args.prompts, args.trl_rounds
    responses, updates = recipe.rollout.responses, recipe.update.mini_batches
    sizes = {"prompts": prompts, "responses": responses, "response": LENGTH, "mini_batches": updates}
    workload = Workload(49152, **sizes, backend=args.backend, dtype=args.dtype)
    texts = [render("two_shot", each.question, tokenizer) for each in word_problems.problems(prompts, 1)]
    taken: list[float] = []

    class Clocked(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % updates == 0:
                taken.append(time.perf_counter() - self.started)
                self.started = time.perf_counter()

    def alternating(completions: list[str], **_: Any) -> list[float]:
        return [float(at % 2) for at in range(len(completions))]

    with TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            args.model,
            alternating,
            args=trl_settings(workload, Path(scratch), rounds),
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts * rounds]),
            callbacks=[Clocked()],
        )
        trainer.train()
    warm = taken[1:] or taken
    return {"step": statistics.median(warm), "rounds": warm, "peak_bytes": device_peak(args.backend)}


def peak_of_products(device: str, dtype: str) -> float:
    """Floating-point operations a second of the best of a few matrix products."""
    import torch

    rows, inner, columns = PRODUCT
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    first, second = torch.randn(rows, inner, **options), torch.randn(inner, columns, **options)
    best, repeats = float("inf"), 100 if device == "cuda" else 1
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(repeats):
            product = first @ second
        product[0, 0].item()  # waits for the device
        best = min(best, (time.perf_counter() - start) / repeats)
    return 2 * rows * inner * columns / best


def rows_of(found: dict[str, Any]) -> list[dict[str, str]]:
    """The table: a row for each way, and TRL's."""
    rows = [
        {
            "": name,
            **{phase: f"{way['seconds'][phase]:.2f}" for phase in PHASES},
            "step (s)": f"{way['step']:.2f}",
            "faster": f"{way['faster']:.2f}×",
            "of peak": ", ".join(f"{what} {share:.0%}" for what, share in way["of_peak"].items()),
            "peak (GB)": f"{found['ours']['peak_bytes'] / 1e9:.1f}",
        }
        for name, way in found["ours"]["ways"].items()
    ]
    if "trl" in found:
        blank = dict.fromkeys((*PHASES, "faster", "of peak"), "")
        step, peak = found["trl"]["step"], found["trl"]["peak_bytes"]
        rows.append({**rows[0], **blank, "": "TRL", "step (s)": f"{step:.2f}", "peak (GB)": f"{peak / 1e9:.1f}"})
    return rows


def main() -> None:
    """Measure both, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--unmixed", type=float, default=0.0, help="share of prompts without anything to teach")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each of our ways")
    parser.add_argument("--trl-rounds", type=int, default=1, help="of TRL's, which take minutes each; 0 leaves it out")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="more for a GPU")
    parser.add_argument("--out")
    parser.add_argument("--only", choices=("ours", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.only == "ours":
        print(json.dumps(ours(args)))
        return
    if args.only == "trl":
        print(json.dumps(trl(args)))
        return
    given = {name: value for name, value in vars(args).items() if name not in ("out", "only")}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    names = ("ours", "trl") if args.trl_rounds else ("ours",)
    found = {name: in_fresh_process(__file__, *passed, "--only", name) for name in names}
    show(f"a step of SmolLM2-135M, {args.prompts} prompts of 8 responses, {args.unmixed:.0%} unmixed", rows_of(found))
    result = {"benchmark": "real", "prompts": args.prompts, "unmixed": args.unmixed, "results": found}
    if "trl" in found:
        result["times_as_fast"] = {
            name: found["trl"]["step"] / way["step"] for name, way in found["ours"]["ways"].items()
        }
        result["times_the_memory"] = found["ours"]["peak_bytes"] / found["trl"]["peak_bytes"]
        print(f"{result['times_as_fast']} times as fast, {result['times_the_memory']:.2f} of the memory")
    write(args.out, result)


if __name__ == "__main__":
    main()
