"""Callbacks of the training loop, for displays and trackers. Subclasses override the ones they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delta_cli.runs.folder import JsonObject


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
    """An observer that ignores everything."""

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
        """To whoever asked."""
        self._begin_phase(name)


class ObserverGroup(Observer):
    """Passes every call on to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.begin(title, steps, first, machine)

    def phase(self, name: str, total: int = 0) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.phase(name, total)

    def advance(self, responses: int, tokens: int) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.advance(responses, tokens)

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.step(record, examples)

    def evaluation(self, record: JsonObject) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.evaluation(record)

    def notice(self, notice: Notice) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.notice(notice)

    def end(self) -> None:
        """Pass on to each observer."""
        for observer in self._observers:
            observer.end()
