"""How long the doctor may look at a model, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable


class TooSlow(Exception):
    """The time that the model may take is over."""


class Watch:
    """The time that looking at the model may take, and what is said of what is going on."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self.seconds, self.say = seconds, say
        self._start = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self.seconds - (time.monotonic() - self._start)

    def check(self) -> None:
        """Raise TooSlow when it is over."""
        if self.left <= 0:
            raise TooSlow
