"""How long each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from delta_cli.errors import StopRequested
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.metrics import PHASES


@dataclass
class PhaseClock:
    """Seconds spent in each phase of a step."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    started: float = field(default_factory=time.perf_counter)
    dropped: str = ""  # the phase that a stop request interrupted

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase."""
        start = time.perf_counter()
        try:
            yield
        except StopRequested:
            self.dropped = name
            raise
        finally:
            self.seconds[name] += time.perf_counter() - start

    def add(self, other: PhaseClock) -> None:
        """Add the times of another clock, phase by phase."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    def record(self) -> JsonObject:
        """The times for metrics.jsonl; resets the clock."""
        now = time.perf_counter()
        found = {"seconds": now - self.started} | {f"seconds_{name}": self.seconds[name] for name in PHASES}
        self.seconds, self.started = dict.fromkeys(PHASES, 0.0), now
        return found
