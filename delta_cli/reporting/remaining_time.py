"""How fast a run goes and when it will be done."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_cli.runs.folder import JsonObject

RECENT = 20  # steps whose mean time is expected of those to come


@dataclass
class RemainingTime:
    """Steps done, and the time left at the recent pace."""

    steps: int = 0
    done: int = 0
    seconds: list[float] = field(default_factory=list)  # of each step seen

    def begin(self, steps: int, first: int) -> None:
        """A run of ``steps`` steps goes on from ``first``."""
        self.steps, self.done = steps, first

    def step(self, record: JsonObject) -> None:
        """A step is done."""
        self.done = record["step"]
        self.seconds.append(record.get("seconds", 0.0))

    @property
    def left(self) -> float | None:
        """Seconds to the end, counted from the last step; None before the first and after the last."""
        recent = self.seconds[-RECENT:]
        if not recent or self.done >= self.steps:
            return None
        return (self.steps - self.done) * sum(recent) / len(recent)
