"""What a run prints: a dashboard in a terminal, otherwise plain lines, JSON, or notices only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import IO, Any, Literal

from rich.console import Console

from delta_cli.reporting.live_display import PHASE_LABELS, LiveObserver, PhaseProgress, phase_text
from delta_cli.reporting.remaining_time import RemainingTime
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.observer import Example, Notice, Observer
from delta_cli.text import count, duration, evaluation_line, number, percent, visible

SILENCE = 30.0  # seconds without a line after which plain output says how far the phase is
DisplayMode = Literal["auto", "live", "plain", "quiet", "json"]


def console_observer(mode: DisplayMode, console: Console | None = None) -> Observer:
    """The observer that prints a run in this mode.

    ``auto`` is ``live`` if stdout is a terminal that can move its cursor, and otherwise, as in notebooks, ``plain``.
    ``quiet`` prints only notices, on stderr. ``json`` prints each record as one line of JSON. ``console`` replaces
    stdout.
    """
    if mode == "quiet":
        return QuietObserver()
    if mode == "json":
        return JsonObserver()
    # A character missing from the terminal's encoding must not stop a run.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    console = console or Console()
    if mode == "auto":
        moves = console.file.isatty() and not console.is_dumb_terminal and not _in_notebook(console)
        mode = "live" if moves else "plain"
    return LiveObserver(console) if mode == "live" else PlainObserver(console.file)


def _in_notebook(console: Console) -> bool:
    """Whether a notebook shows the output: of its own process, or of a command that a cell starts in a terminal."""
    return console.is_jupyter or "JPY_PARENT_PID" in os.environ


class QuietObserver(Observer):
    """Prints only notices, on stderr."""

    def notice(self, notice: Notice) -> None:
        print(f"! {visible(notice.text, ' ')}", file=sys.stderr, flush=True)


class PlainObserver(Observer):
    """Prints a line for each step, each evaluation and each notice, and a sign of life every half minute."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._pace = RemainingTime()
        self._phase = PhaseProgress("")
        self._printed = time.monotonic()

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        self._pace.begin(steps, first)
        resumed = f", resumed after step {first}" if first else ""
        where = f" on {machine}" if machine else ""
        self._print(f"{visible(title)}: {count(steps, 'step')}{resumed}{where}")

    def phase(self, name: str, total: int = 0) -> None:
        """Announce an evaluation before the first step, and any phase that begins after a long silence."""
        self._phase = PhaseProgress(name, total)
        if name == "evaluate" and not self._pace.done:
            self._print(f"evaluating on held-out problems: {count(total, 'response')}")
        else:
            self._say_where()

    def advance(self, responses: int, tokens: int) -> None:
        """Print how far the phase is, after a long silence."""
        self._phase.responses, self._phase.tokens = responses, tokens
        self._say_where()

    def _say_where(self) -> None:
        if time.monotonic() - self._printed > SILENCE:
            label = PHASE_LABELS.get(self._phase.name, self._phase.name)
            self._print(f"  … {label}  {phase_text(self._phase)}")

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        self._pace.step(record)
        steps = str(self._pace.steps)
        left = "" if self._pace.left is None else f"  left {duration(self._pace.left)}"
        self._print(
            f"step {record['step']:>{len(steps)}}/{steps}  reward {number(record.get('reward_mean')):>6}  "
            f"accuracy {percent(record.get('accuracy')):>6}  length {number(record.get('response_length_mean')):>5}  "
            f"entropy {number(record.get('entropy_mean')):>6}  grad {number(record.get('grad_norm')):>6}  "
            f"{number(record.get('tokens_per_second')):>6} tokens/s  {record.get('seconds', 0.0):.1f} s{left}"
        )

    def evaluation(self, record: JsonObject) -> None:
        self._print(evaluation_line(record))

    def notice(self, notice: Notice) -> None:
        self._print(f"! {visible(notice.text, ' ')}")

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(line, file=self._file, flush=True)


class JsonObserver(Observer):
    """Prints every record as one line of JSON on stdout; ``event`` names its kind."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """``{"event": "begin", "run", "steps", "first", "machine"}``"""
        self._print("begin", {"run": title, "steps": steps, "first": first, "machine": machine})

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        """A line of metrics.jsonl."""
        self._print("step", record)

    def evaluation(self, record: JsonObject) -> None:
        """A line of evaluations.jsonl."""
        self._print("evaluation", record)

    def notice(self, notice: Notice) -> None:
        """``{"event": "notice", "name", "text"}``"""
        self._print("notice", {"name": notice.name, "text": notice.text})

    def _print(self, event: str, record: JsonObject) -> None:
        print(json.dumps({"event": event} | {name: _finite(value) for name, value in record.items()}), flush=True)


def _finite(value: Any) -> Any:
    """None for infinity and NaN, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
