"""Following a run: callbacks of the training loop for displays and trackers, and a clock for the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from delta_cli.errors import StopRequested
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.metrics import PHASES


@dataclass(frozen=True)
class Example:
    """A response of the last batch, for display."""

    question: str
    response: str
    correct: bool
    reward: float


@dataclass(frozen=True)
class Notice:
    """A warning for the user: what happened, what it means, what to do."""

    name: str  # of the tripwire; each name fires once per run
    text: str


class Observer:
    """An observer that ignores everything; subclasses override the calls they need."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """A run of ``steps`` steps starts after step ``first`` (0: new); ``machine`` names backend and threads."""

    def phase(self, name: str, total: int = 0) -> None:
        """A phase starts (rollout, reward, score, update, evaluate, save), with ``total`` responses to come."""

    def advance(self, responses: int, tokens: int) -> None:
        """The phase has completed this many responses and tokens so far."""

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        """A step is done: its metrics, and one right and one wrong response if the batch has them."""

    def evaluation(self, record: JsonObject) -> None:
        """An evaluation on held-out problems is done."""

    def notice(self, notice: Notice) -> None:
        """A tripwire fired for the first time."""

    def end(self) -> None:
        """The run is over; always the last call."""


class PhaseObserver(Observer):
    """Hands on the name of each phase as it begins."""

    def __init__(self, begin_phase: Callable[[str], None]) -> None:
        self._begin_phase = begin_phase

    def phase(self, name: str, total: int = 0) -> None:
        self._begin_phase(name)


class ObserverGroup(Observer):
    """Passes every call on to several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        for name in (name for name in vars(Observer) if not name.startswith("_")):
            setattr(self, name, partial(_call_each, [getattr(observer, name) for observer in observers]))


def _call_each(functions: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for function in functions:
        function(*arguments)


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
