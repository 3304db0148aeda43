"""What DelTA adds to a step of TRL's GRPOTrainer: time in turns with the plain trainer, and memory for the features.

    python benchmarks/trl_step.py --out benchmarks/results/trl_step.json

Both train the same random Qwen3 on the same prompts, with responses of the same known lengths and the
same reward; see step.py. A step is a generation batch with its updates:

- ``TRL scores``: four updates on a generation batch, so TRL computes its log-probabilities and
  DelTA takes the features from that forward;
- ``TRL does not``: one update on it, by accumulation, so DelTA makes the forward itself.

Seconds are of the processor (all threads of the process; only one trainer works at a time), so that
other work on the machine counts less; the ratio is the median over rounds. ``inside`` is the share of
the step that is spent in DelTA's own code, clocked there, and the number to read: two plain trainers in
turns do not measure a ratio of 1 (1.12 on a busy machine, where the second in turn was the slower).
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import median_ratio, show, write
from lengths import scheduled_generate
from reward import reward
from step import dataset, trl_settings
from transformers import TrainerCallback
from trl import GRPOTrainer
from workload import Workload

from backends.torch.features import TorchFeatures
from delta_cli.integrations.trl import DelTAMixin, with_delta
from delta_cli.integrations.trl.scoring import Scorer

MODES = {"TRL scores": (1, 4), "TRL does not": (4, 4)}  # gradient_accumulation_steps, steps_per_generation


class Turn:
    """One trainer's turn to work: the other waits."""

    def __init__(self, batches: int) -> None:
        self.go, self.other = threading.Semaphore(0), self
        self.batches, self.seconds, self.inside = batches, list[float](), list[float]()

    def wait(self) -> None:
        """Until the other's generation batch is done; then the clock starts."""
        self.go.acquire()
        self.started, INSIDE.seconds = time.process_time(), 0.0

    def done(self) -> None:
        """A generation batch is done: the other's turn."""
        self.seconds.append(time.process_time() - self.started)
        self.inside.append(INSIDE.seconds / self.seconds[-1])
        self.other.go.release()
        if len(self.seconds) < self.batches:
            self.wait()


class Inside:
    """Seconds of the processor inside some methods, the outermost of them at a time."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def clock(self, owner: Any, name: str) -> None:
        """Have ``owner.name`` clocked from now on."""
        method = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            begun, self._depth = time.process_time(), self._depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begun

        setattr(owner, name, clocked)


INSIDE = Inside()


class Batches(TrainerCallback):  # type: ignore[misc]
    """Hands the turn over after every generation batch."""

    def __init__(self, turn: Turn, every: int) -> None:
        self._turn, self._every = turn, every

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first turn."""
        self._turn.wait()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """After ``every`` optimizer steps."""
        if state.global_step % self._every == 0:
            self._turn.done()


def grade(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [reward(text, None) + at % 2 for at, text in enumerate(completions)]


def make(kind: str, mode: str, workload: Workload, model: Path, turn: Turn) -> Any:
    """A trainer of a kind that works in its turns."""
    accumulate, steps = MODES[mode]
    every = steps // accumulate  # optimizer steps of a generation batch
    args = trl_settings(workload, model, turn.batches)
    args.gradient_accumulation_steps, args.steps_per_generation = accumulate, steps
    args.max_steps = turn.batches * every
    args.output_dir = str(model / f"{kind} {mode}")
    cls = with_delta(GRPOTrainer) if kind == "DelTA" else GRPOTrainer
    trainer = cls(str(model), grade, args=args, train_dataset=dataset(workload), callbacks=[Batches(turn, every)])
    trainer.eos_token_ids = [workload.stop]
    trainer.model.generate = scheduled_generate(trainer.model.generate, workload.lengths, workload.stop)
    return trainer


def measure(mode: str, workload: Workload, rounds: int) -> dict[str, Any]:
    """Seconds of both trainers' generation batches, taken in turns."""
    with TemporaryDirectory() as scratch:
        model = workload.write(Path(scratch))
        turns = {kind: Turn(rounds + 1) for kind in ("TRL", "DelTA")}
        turns["TRL"].other, turns["DelTA"].other = turns["DelTA"], turns["TRL"]
        trainers = [make(kind, mode, workload, model, turn) for kind, turn in turns.items()]
        threads = [threading.Thread(target=trainer.train, daemon=True) for trainer in trainers]
        for thread in threads:
            thread.start()
        turns["TRL"].go.release()
        for thread in threads:
            thread.join()
    seconds = {kind: turn.seconds[1:] for kind, turn in turns.items()}
    return {
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "ratio": median_ratio(seconds["DelTA"], seconds["TRL"]),
        "inside": statistics.median(turns["DelTA"].inside[1:]),
        "rounds": seconds,
        "feature_bytes": int(workload.lengths.sum()) * workload.hidden * 4,
    }


def main() -> None:
    """Measure both modes, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Workload):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()
    workload = Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)})
    INSIDE.clock(DelTAMixin, "_delta_credit")
    INSIDE.clock(Scorer, "_rows")
    INSIDE.clock(TorchFeatures, "put")
    results = {mode: measure(mode, workload, args.rounds) for mode in MODES}
    show(
        "a generation batch of TRL's GRPOTrainer and its updates",
        [
            {
                "": mode,
                "TRL (s)": f"{row['seconds']['TRL']:.2f}",
                "with DelTA (s)": f"{row['seconds']['DelTA']:.2f}",
                "ratio": f"{row['ratio']:.3f}",
                "inside (%)": f"{100 * row['inside']:.2f}",
                "features (MB)": f"{row['feature_bytes'] / 1e6:.1f}",
            }
            for mode, row in results.items()
        ],
    )
    write(args.out, {"benchmark": "trl_step", "workload": asdict(workload), "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
