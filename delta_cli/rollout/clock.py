"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from delta_cli.errors import StopRequested
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.metrics import PHASES


@dataclass
class Clock:
    """Seconds spent in each phase of a step."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    started: float = field(default_factory=time.perf_counter)
    dropped: str = ""  # the phase that a request to stop ended

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        try:
            yield
        except StopRequested:
            self.dropped = name
            raise
        finally:
            self.seconds[name] += time.perf_counter() - start

    def record(self) -> JsonObject:
        """For metrics.jsonl; the clock starts again."""
        now = time.perf_counter()
        found = {"seconds": now - self.started} | {f"seconds_{name}": self.seconds[name] for name in PHASES}
        self.seconds, self.started = dict.fromkeys(PHASES, 0.0), now
        return found
