"""A whole training step, rollout to update, against TRL's GRPOTrainer, phase by phase.

    pip install 'trl==1.16.0'
    python benchmarks/step.py --out benchmarks/results/step.json
    python benchmarks/step.py --spread 1 --out benchmarks/results/step_equal.json
    python benchmarks/step.py --unmixed 0.5 --out benchmarks/results/step_half.json
    python benchmarks/step.py --vocabulary 151936 --hidden 256 --layers 4 --out benchmarks/results/step_vocabulary.json

Both train the same random Qwen3 on the same prompts with the same reward, and responses of the same lengths: spread
over a factor of 8, or all equal (``--spread 1``), where nothing is lost to padding; this project computes a prompt
once for all its responses, which matters where it is long. All is float32, on the CPU, in one process with the same
threads; ``--backend cuda`` and ``--dtype bfloat16`` choose otherwise, and memory is then that of the GPU.
``--unmixed`` is the share of prompts whose responses all get one reward. A step is a batch of rollouts and
``mini_batches`` updates on it. What TRL was set to, so that both do the same work:

- ``steps_per_generation`` updates for each generation, each on one whole batch of the device
  (no gradient accumulation), which makes TRL recompute log-probabilities first, as this project does;
- loss grpo, one iteration, no reference model, symmetric clip: the preset ``grpo`` here;
- no gradient checkpointing, no mixed precision, no logging, no checkpoints; fused AdamW with the
  same weight decay and gradient clip;
- transformers' ``generate``: vLLM does not run here, and continuous batching is for CUDA.

Steps are taken in turns: one of TRL, then one of this project each way: what is learned from scored and updated on
(``delta``); the same with every response (``delta, every response``), which is what the first saves; and with
update.old_logprobs = "rollout" (``delta, as drawn``), which saves the forward of scoring. Peak memory is that
of a fresh process that takes two steps, everything included but the processes that grade; what the
imports alone hold is given beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import device_peak, in_fresh_process, median_ratio, resident, show, write
from lengths import scheduled_generate
from reward import reward
from workload import PHASES, EveryResponse, Workload, steps

WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "delta": {"preset": "delta"},
    "delta, every response": {"preset": "delta", "updates": EveryResponse},
    "delta, as drawn": {"preset": "delta", "score": "rollout"},
}
TRL_PHASES = {  # what TRL's own profiling calls them
    "GRPOTrainer.transformers.generate": "rollout",
    "GRPOTrainer._calculate_rewards": "reward",
    "GRPOTrainer._prepare_inputs": "prepare",  # rollout, reward and score, and what lies between them
}


def run_trl(workload: Workload, model: Path, rounds: int, between: Callable[[], object]) -> list[dict[str, float]]:
    """Seconds of the phases and the whole of each of TRL's ``rounds`` steps; ``between`` runs after each."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    taken: dict[str, float] = defaultdict(float)
    result: list[dict[str, float]] = []

    def note(context: ProfilingContext, seconds: float) -> None:
        taken[TRL_PHASES.get(context.name, "inside")] += seconds

    class Turns(TrainerCallback):  # type: ignore[misc]
        """Steps of both in turns: TRL's loop waits in a callback while ``between`` runs."""

        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % workload.mini_batches:
                return
            whole = time.perf_counter() - self.started
            phases = {"rollout": taken["rollout"], "reward": taken["reward"]}
            phases["score"] = taken["prepare"] - sum(phases.values())
            phases["update"] = whole - taken["prepare"]
            result.append({**phases, "step": whole})
            taken.clear()
            between()
            self.started = time.perf_counter()

    def grade(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if equal else reward(text, None) for text, equal in zip(completions, workload.equal, strict=True)]

    note_before, ProfilingContext._log_metrics = ProfilingContext._log_metrics, note
    try:
        trainer = GRPOTrainer(
            str(model),
            grade,
            args=trl_settings(workload, model, rounds),
            train_dataset=dataset(workload),
            callbacks=[Turns()],
        )
        trainer.eos_token_ids = [workload.stop]
        trainer.model.generate = scheduled_generate(trainer.model.generate, workload.lengths, workload.stop)
        trainer.train()
    finally:
        ProfilingContext._log_metrics = note_before
    return result


def trl_settings(workload: Workload, model: Path, rounds: int) -> Any:
    """TRL's settings for the same work."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(model / "trl"),
        use_cpu=workload.backend == "cpu",
        bf16=workload.dtype == "bfloat16",
        max_steps=rounds * workload.mini_batches,
        per_device_train_batch_size=workload.prompts * workload.responses // workload.mini_batches,
        steps_per_generation=workload.mini_batches,
        gradient_accumulation_steps=1,
        num_generations=workload.responses,
        num_iterations=1,
        max_completion_length=workload.response,
        generation_kwargs={"eos_token_id": workload.stop + 1},  # see scheduled_generate
        loss_type="grpo",
        epsilon=0.2,
        beta=0.0,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=workload.weight_decay,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def dataset(workload: Workload) -> Any:
    """The workload's prompts as TRL reads them."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": text} for text in workload.questions()])


def measure(workload: Workload, rounds: int, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Median seconds of the phases of each trainer's steps, the first round left out."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        model = workload.write(Path(scratch))
        ours = {name: stack.enter_context(steps(workload, model, **WAYS[name])) for name in ways}

        def turn() -> None:
            for step in ours.values():
                step()

        taken = {"TRL": run_trl(workload, model, rounds + 1, turn)} | {name: s.seconds for name, s in ours.items()}
    result: dict[str, dict[str, Any]] = {}
    for name, rows in taken.items():
        rows = rows[1:]
        wholes = [row.get("step", sum(row.values())) for row in rows]
        phases = {phase: statistics.median(row[phase] for row in rows) for phase in PHASES if phase in rows[0]}
        result[name] = {"seconds": phases, "step": statistics.median(wholes), "rounds": wholes}
    for row in result.values():
        row["speedup"] = median_ratio(result["TRL"]["rounds"], row["rounds"])
    return result


def memory(name: str, workload: Workload) -> dict[str, int]:
    """Peak bytes of two steps, and what the imports hold; run in a process of its own."""
    with TemporaryDirectory() as scratch:
        model = workload.write(Path(scratch))
        if name == "TRL":
            import trl

            assert trl.GRPOTrainer  # which is imported when it is first named
            before = resident()
            run_trl(workload, model, 2, lambda: None)
        else:
            import backends.torch  # noqa: F401

            before = resident()
            with steps(workload, model, **WAYS[name]) as step:
                step()
                step()
    return {"imports": before, "peak": device_peak(workload.backend)}


def table(result: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each trainer."""
    trl = result["TRL"]
    return [
        {
            "trainer": name,
            **{phase: f"{row['seconds'].get(phase, 0.0):.2f}" for phase in PHASES},
            "step (s)": f"{row['step']:.2f}",
            "faster": f"{row['speedup']:.2f}×",
        }
        | (
            {
                "peak MB": f"{row['memory']['peak'] / 1e6:.0f}",
                "of TRL's": f"{row['memory']['peak'] / trl['memory']['peak']:.2f}",
            }
            if "memory" in row
            else {}
        )
        for name, row in result.items()
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--memory", choices=("TRL", *WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="of this project")
    workload, args = Workload.from_arguments(parser, spread=8)
    if args.memory:
        print(json.dumps(memory(args.memory, workload)))
        return
    result = measure(workload, args.rounds, args.ways)
    for name, row in result.items():
        if not args.no_memory:
            row["memory"] = in_fresh_process(__file__, "--memory", name, *workload.as_options())
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(workload).items())
    show(f"one training step: {sizes}", table(result))
    write(args.out, {"benchmark": "step", "workload": asdict(workload), "rounds": args.rounds, "results": result})


if __name__ == "__main__":
    main()
