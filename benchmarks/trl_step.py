"""What DelTA adds to a step of TRL's GRPOTrainer: time in turns with the plain trainer, and memory for the features.

    python benchmarks/trl_step.py --out benchmarks/results/trl_step.json

Both train the same random Qwen3 on the same prompts, with responses of the same known lengths and the
same reward; see step.py. A step is a generation batch with its updates:

- ``TRL scores``: four updates on a generation batch, so TRL computes its log-probabilities and
  DelTA takes the features from that forward;
- ``TRL does not``: one update on it, by accumulation, so DelTA makes the forward itself.

Three trainers take turns in one process: TRL's, TRL's once more, and the one with DelTA, in an order that rotates from
round to round. Seconds are processor time over all threads (only one trainer works at a time), which depends less on
other work of the machine; a ratio is the median over rounds. The ratio of TRL's second trainer to its first shows the
accuracy of the measurement. ``inside`` is the share of a step that is spent in DelTA's own code.
Peak memory is that of a fresh process that takes two generation batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import in_fresh_process, median_ratio, peak_memory, show, write
from lengths import scheduled_generate
from reward import reward
from step import dataset, trl_settings
from transformers import TrainerCallback
from trl import GRPOTrainer
from workload import Workload

from backends.torch.features import TorchFeatures
from delta_cli.integrations.trl import DelTAMixin, with_delta
from delta_cli.integrations.trl.scoring import FeatureScorer

MODES = {"TRL scores": (1, 4), "TRL does not": (4, 4)}  # gradient_accumulation_steps, steps_per_generation
NAMES = ("TRL", "TRL again", "DelTA")


class Turns:
    """Which trainer works: one at a time, round after round, the order rotating."""

    def __init__(self, names: Sequence[str], rounds: int) -> None:
        self.rounds = rounds
        self._order = [names[(place + shift) % len(names)] for shift in range(rounds) for place in range(len(names))]
        self._go = {name: threading.Semaphore(0) for name in names}
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.inside: dict[str, list[float]] = {name: [] for name in names}
        self._started = 0.0

    def begin(self) -> None:
        """The first turn of all, or the next after one is done; none is left at the end."""
        if self._order:
            self._go[self._order.pop(0)].release()

    def wait(self, name: str) -> None:
        """Until it is this trainer's turn; then the clock starts."""
        self._go[name].acquire()
        self._started, INSIDE.seconds = time.process_time(), 0.0

    def done(self, name: str) -> None:
        """A generation batch is done: the next one's turn."""
        self.seconds[name].append(time.process_time() - self._started)
        self.inside[name].append(INSIDE.seconds / self.seconds[name][-1])
        self.begin()
        if len(self.seconds[name]) < self.rounds:
            self.wait(name)


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
    """Hands the turn over after every generation batch of ``every`` optimizer steps."""

    def __init__(self, name: str, turns: Turns, every: int) -> None:
        self._name, self._turns, self._every = name, turns, every

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first turn."""
        self._turns.wait(self._name)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """After ``every`` optimizer steps."""
        if state.global_step % self._every == 0:
            self._turns.done(self._name)


def grade(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [reward(text, None) + at % 2 for at, text in enumerate(completions)]


def make(name: str, mode: str, workload: Workload, model: Path, turns: Turns) -> Any:
    """A trainer that works in its turns."""
    accumulate, steps = MODES[mode]
    every = steps // accumulate  # optimizer steps of a generation batch
    args = trl_settings(workload, model, turns.rounds)
    args.gradient_accumulation_steps, args.steps_per_generation = accumulate, steps
    args.max_steps = turns.rounds * every
    args.output_dir = str(model / f"{name} {mode}")
    cls = with_delta(GRPOTrainer) if name == "DelTA" else GRPOTrainer
    callbacks = [Batches(name, turns, every)]
    trainer = cls(str(model), grade, args=args, train_dataset=dataset(workload), callbacks=callbacks)
    trainer.eos_token_ids = [workload.stop]
    trainer.model.generate = scheduled_generate(trainer.model.generate, workload.lengths, workload.stop)
    return trainer


def train(names: Sequence[str], mode: str, workload: Workload, rounds: int) -> Turns:
    """So many generation batches of each of the trainers, in turns."""
    turns = Turns(names, rounds)
    with TemporaryDirectory() as scratch:
        model = workload.write(Path(scratch))
        trainers = [make(name, mode, workload, model, turns) for name in names]
        threads = [threading.Thread(target=trainer.train, daemon=True) for trainer in trainers]
        for thread in threads:
            thread.start()
        turns.begin()
        for thread in threads:
            thread.join()
    return turns


def measure(mode: str, workload: Workload, rounds: int) -> dict[str, Any]:
    """Seconds of the trainers' generation batches, the first of each left out, and their peak memory."""
    turns = train(NAMES, mode, workload, rounds + 1)
    seconds = {name: values[1:] for name, values in turns.seconds.items()}
    passed = workload.as_options()
    memory = {name: in_fresh_process(__file__, "--memory", name, mode, *passed) for name in ("TRL", "DelTA")}
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": median_ratio(seconds["DelTA"], seconds["TRL"]),
        "control": median_ratio(seconds["TRL again"], seconds["TRL"]),
        "inside": statistics.median(turns.inside["DelTA"][1:]),
        "rounds": seconds,
        "peak_memory": memory,
        "feature_bytes": int(workload.lengths.sum()) * workload.hidden * 4,
    }


def main() -> None:
    """Measure both modes, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    workload, args = Workload.from_arguments(parser)
    if args.memory:
        name, mode = args.memory
        train([name], mode, workload, 2)
        print(json.dumps(peak_memory()))
        return
    INSIDE.clock(DelTAMixin, "_delta_credit")
    INSIDE.clock(FeatureScorer, "_rows")
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
                "TRL to TRL": f"{row['control']:.3f}",
                "inside (%)": f"{100 * row['inside']:.2f}",
                "more memory (MB)": f"{(row['peak_memory']['DelTA'] - row['peak_memory']['TRL']) / 1e6:.1f}",
                "features (MB)": f"{row['feature_bytes'] / 1e6:.1f}",
            }
            for mode, row in results.items()
        ],
    )
    write(args.out, {"benchmark": "trl_step", "workload": asdict(workload), "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
