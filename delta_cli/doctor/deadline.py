"""How long the doctor may run the model, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeadlineExceeded(Exception):
    """The time for running the model is over."""


class Deadline:
    """The time for running the model; ``say`` announces what begins."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self.seconds, self.say = seconds, say
        self._start = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left; negative when the time is over."""
        return self.seconds - (time.monotonic() - self._start)

    def check(self) -> None:
        """Raise DeadlineExceeded when the time is over."""
        if self.left <= 0:
            raise DeadlineExceeded
