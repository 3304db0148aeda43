"""How fast a run goes and how much time is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_cli.runs.folder import JsonObject

RECENT = 20  # steps whose mean time predicts the remaining ones


@dataclass
class RemainingTime:
    """Counts steps and predicts the time left from the recent ones."""

    steps: int = 0  # of the whole run
    done: int = 0
    seconds: list[float] = field(default_factory=list)  # of each step seen

    def begin(self, steps: int, first: int) -> None:
        """A run of ``steps`` steps starts, or resumes after step ``first``."""
        self.steps, self.done = steps, first

    def step(self, record: JsonObject) -> None:
        """A step is done; ``record`` is its line of metrics."""
        self.done = record["step"]
        self.seconds.append(record.get("seconds", 0.0))

    @property
    def left(self) -> float | None:
        """Seconds from the end of the last step to the end of the run; None before the first step and at the end."""
        recent = self.seconds[-RECENT:]
        if not recent or self.done >= self.steps:
            return None
        return (self.steps - self.done) * sum(recent) / len(recent)
