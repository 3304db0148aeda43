"""What the loop tells whoever watches it. Subclasses override what they care for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delta_cli.runs.folder import JsonObject


@dataclass(frozen=True)
class Example:
    """A response of the last batch, to look at."""

    question: str
    response: str
    correct: bool
    reward: float


@dataclass(frozen=True)
class Notice:
    """Something a person should know: what happened, what it means, what to do."""

    name: str  # of the tripwire; one notice a name and run
    text: str


class Observer:
    """Hears of a run; does nothing."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """A run of ``steps`` steps goes on from step ``first``, 0 when it is new, on a backend with so many threads."""

    def phase(self, name: str, total: int = 0) -> None:
        """A phase begins (rollout, reward, score, update, evaluate, save) and will see ``total`` responses."""

    def advance(self, responses: int, tokens: int) -> None:
        """So many responses and tokens of the phase are there, in all."""

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        """A step is done: its line of metrics, and a right and a wrong response where there are such."""

    def evaluation(self, record: JsonObject) -> None:
        """An evaluation on held-out problems is done."""

    def notice(self, notice: Notice) -> None:
        """A tripwire fired for the first time."""

    def end(self) -> None:
        """Nothing more will come; always called."""


class Several(Observer):
    """Several observers that all hear of one run."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """To each."""
        for observer in self._observers:
            observer.begin(title, steps, first, machine)

    def phase(self, name: str, total: int = 0) -> None:
        """To each."""
        for observer in self._observers:
            observer.phase(name, total)

    def advance(self, responses: int, tokens: int) -> None:
        """To each."""
        for observer in self._observers:
            observer.advance(responses, tokens)

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        """To each."""
        for observer in self._observers:
            observer.step(record, examples)

    def evaluation(self, record: JsonObject) -> None:
        """To each."""
        for observer in self._observers:
            observer.evaluation(record)

    def notice(self, notice: Notice) -> None:
        """To each."""
        for observer in self._observers:
            observer.notice(notice)

    def end(self) -> None:
        """To each."""
        for observer in self._observers:
            observer.end()
