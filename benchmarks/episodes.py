"""What episodes cost: drawing over turns against drawing the same number of tokens in one turn, on a local engine.

    python benchmarks/episodes.py --out benchmarks/results/episodes.json

A turn has 40 tokens and an answer 20. Environments answer at once, or every tenth call takes a second. Processor time
is measured beside the clock, because it depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import show, write

from backends import registry
from backends.interface import Ids, RolloutRequest, Sampling
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3

TURN, ANSWER, TURNS = 40, 20, 4
LENGTH = TURNS * (TURN + ANSWER)
PROMPTS, SAMPLES, VOCABULARY = 8, 8, 2000
SLOW_SECONDS = 1.0


class EveryTurn:
    """Ends a turn after TURN tokens, in place of a stop string."""

    strings = ("turn",)

    def completed_by(self, tokens: Ids | Sequence[int]) -> bool:
        return len(tokens) == TURN


@dataclass
class Answers:
    """Answers each turn with ANSWER ids; every tenth call after SLOW_SECONDS if ``slow``."""

    slow: bool
    calls: int = 0
    due: list[tuple[float, int, list[int]]] = field(default_factory=list)

    def turn_ended(self, row: int, region: Ids) -> None:
        self.calls += 1
        late = SLOW_SECONDS if self.slow and self.calls % 10 == 0 else 0.0
        ids = [] if len(region) + ANSWER >= LENGTH else [3 + (row + place) % 90 for place in range(ANSWER)]
        heapq.heappush(self.due, (time.monotonic() + late, row, ids))

    def answers(self, wait: bool) -> list[tuple[int, Ids | None]]:
        if wait and self.due:
            time.sleep(min(max(self.due[0][0] - time.monotonic(), 0), 0.2))
        found = []
        while self.due and self.due[0][0] <= time.monotonic():
            _, row, ids = heapq.heappop(self.due)
            found.append((row, np.array(ids, np.int64) if ids else None))
        return found

    def restart(self, row: int) -> None:
        raise AssertionError("a local engine draws nothing again")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        shape: dict[str, Any] = {"layers": 4, "head_dim": 32, "intermediate": 3 * options.hidden}
        write_qwen3(folder, vocab_size=VOCABULARY, hidden=options.hidden, scale=0.05, **shape)
        (folder / "tokenizer.json").write_text("{}")
        engine = registry.create(options.backend, BackendSettings.of(str(folder)))
        prompts = tuple(np.random.default_rng(0).integers(1, VOCABULARY, 64) for _ in range(PROMPTS))

        def draw(slow: bool | None) -> None:
            turns = None if slow is None else Answers(slow)
            length = LENGTH - ANSWER  # an episode ends with a turn of the model
            sampling = Sampling(length if turns is None else LENGTH, (), samples=SAMPLES, stop=turns and EveryTurn())
            found = engine.rollout(RolloutRequest(prompts, sampling, turns=turns))
            whole = found.tokens if found.regions is None else found.regions.ids
            assert len(whole) == PROMPTS * SAMPLES * length

        ways: dict[str, Callable[[], None]] = {
            "one turn": lambda: draw(None),
            "episodes": lambda: draw(False),
            "every tenth call takes a second": lambda: draw(True),
        }
        clock: dict[str, list[float]] = {name: [] for name in ways}
        processor: dict[str, list[float]] = {name: [] for name in ways}
        for round_number in range(options.rounds + 1):
            for name, run in ways.items():
                start, busy = time.perf_counter(), time.process_time()
                run()
                if round_number:  # the first one warms up
                    clock[name].append(time.perf_counter() - start)
                    processor[name].append(time.process_time() - busy)
        engine.close()
    results = {name: {"seconds": median(clock[name]), "processor_seconds": median(processor[name])} for name in ways}
    base = results["one turn"]
    rows = [
        {
            "way": name,
            "seconds": f"{each['seconds']:.2f}",
            "of one turn": f"{each['seconds'] / base['seconds']:.2f}",
            "processor seconds": f"{each['processor_seconds']:.2f}",
            "of one turn's": f"{each['processor_seconds'] / base['processor_seconds']:.2f}",
        }
        for name, each in results.items()
    ]
    show(f"{PROMPTS * SAMPLES} responses of {LENGTH - ANSWER} tokens, {TURNS} turns, {options.backend}", rows)
    write(options.out, {"responses": PROMPTS * SAMPLES, "tokens": LENGTH - ANSWER, "turns": TURNS, "ways": results})


if __name__ == "__main__":
    main()
