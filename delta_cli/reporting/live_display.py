"""The live display: a dashboard of a run, redrawn a few times a second.

The methods that the training loop calls only store numbers. The display's own thread draws them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from delta_cli.reporting.remaining_time import RemainingTime
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.observer import Example, Notice, Observer
from delta_cli.text import (
    duration,
    evaluation_line,
    memory,
    number,
    percent,
    sparkline,
    tail,
    visible,
)

REFRESH_PER_SECOND = 3
PHASE_LABELS = {
    "rollout": "rollout",
    "reward": "verifying",
    "score": "scoring",
    "update": "update",
    "evaluate": "evaluation",
    "save": "saving",
}
# Colours that every theme defines and that are visible on white and on black; grey is not always.
RIGHT, WRONG, BAR, QUIET, LOUD = "green", "red", "cyan", "dim", "not dim"


@dataclass
class PhaseProgress:
    """The phase of the step that the loop is in."""

    name: str
    total: int = 0  # responses it will process; 0 if unknown
    responses: int = 0
    tokens: int = 0
    expected: float = 0.0  # seconds it took in the step before
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self.started


class ResizableLive(Live):
    """A live display that leaves no debris: in a terminal that becomes narrower, and under lines printed above it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Correct the height of what is on the screen, of which a narrower terminal has wrapped lines."""
        shape, width = self._live_render._shape, self.console.width
        if shape is not None and shape[0] > width:
            self._live_render._shape = (width, shape[1] * -(-shape[0] // width))
        return super().process_renderables(renderables)

    def print_above(self, line: RenderableType) -> None:
        """Print a line above the display.

        The thread that refreshes waits meanwhile. Otherwise it could draw a picture of another height between the
        computation of how many rows to erase and the writing, and too many or too few rows would be erased.
        """
        with self._lock:
            self.console.print(line, highlight=False)


class LiveObserver(Observer):
    """Shows a dashboard that is redrawn in place; evaluations and notices scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = RemainingTime()
        self._title = ""
        self._phase: PhaseProgress | None = None
        self._last: JsonObject = {}
        self._history: dict[str, list[float]] = {"accuracy": [], "reward_mean": [], "held_out": []}
        self._evaluation: JsonObject = {}
        self._examples: dict[bool, Example] = {}  # the latest right and wrong one
        self._begun = self._stepped = time.monotonic()
        self._live: ResizableLive | None = None

    # ------------------------------------------------------------------------------ called by the loop

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        self._title = visible(title) + (f" on {machine}" if machine else "")
        self._pace.begin(steps, first)
        self._begun = self._stepped = time.monotonic()
        self._live = ResizableLive(
            console=self._console, get_renderable=self.picture, refresh_per_second=REFRESH_PER_SECOND
        )
        self._live.start()

    def phase(self, name: str, total: int = 0) -> None:
        self._phase = PhaseProgress(name, total, expected=self._last.get(f"seconds_{name}", 0.0))

    def advance(self, responses: int, tokens: int) -> None:
        if self._phase is not None:
            self._phase.responses, self._phase.tokens = responses, tokens

    def step(self, record: JsonObject, examples: list[Example]) -> None:
        self._pace.step(record)
        for name in ("accuracy", "reward_mean"):
            self._history[name].append(record[name])
        self._examples = self._examples | {example.correct: example for example in examples}
        self._last, self._stepped = record, time.monotonic()  # last, because the other thread may draw now

    def evaluation(self, record: JsonObject) -> None:
        """Store the held-out accuracy and print it above the dashboard."""
        self._history["held_out"].append(record["accuracy"])
        self._evaluation = record
        self._above(Text(evaluation_line(record)))

    def notice(self, notice: Notice) -> None:
        self._above(Text("! ", style=f"bold {WRONG}").append(visible(notice.text, " "), style="not bold default"))

    def end(self) -> None:
        """Stop drawing; the last dashboard stays on the screen."""
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _above(self, line: Text) -> None:
        if self._live is None:
            self._console.print(line, highlight=False)
        else:
            self._live.print_above(line)

    # ------------------------------------------------------------------------------ the dashboard

    def picture(self) -> RenderableType:
        """The dashboard as it is now."""
        width = min(self._console.width, 120)
        inside = width - 4
        parts: list[RenderableType] = [self._progress(inside)]
        if self._last or self._evaluation:
            parts += [Text(), self._curves(inside), Text(), self._numbers(inside)]
        examples = self._examples
        if examples:
            parts += [Text(), *(self._example(examples[key], inside) for key in sorted(examples, reverse=True))]
        title = Text(tail(self._title, inside - 4), style="bold not dim")
        return Panel(Group(*parts), title=title, title_align="left", border_style=QUIET, width=width, padding=(0, 1))

    def _progress(self, width: int) -> Table:
        """The progress bars of the run and of the phase."""
        now = time.monotonic()
        left = self._pace.left
        time_text = duration(now - self._begun)
        if left is not None:
            time_text += f", {duration(max(left - (now - self._stepped), 0))} left"
        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=10, no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        bar = max(min(width // 3, width - 38), 6)
        steps = max(self._pace.steps, 1)
        done = f"{self._pace.done}/{self._pace.steps}  {time_text}"
        table.add_row(Text("step", style="bold"), _bar(self._pace.done, steps, bar), done)
        phase = self._phase
        if phase is None:
            return table
        share = _share(phase)
        drawn = _bar(share, 1, bar) if share is not None else Text("·" * bar, style=QUIET)
        table.add_row(PHASE_LABELS.get(phase.name, phase.name), drawn, phase_text(phase))
        return table

    def _curves(self, width: int) -> Table:
        """Accuracy, reward and held-out accuracy over the steps, as sparklines."""
        table = Table.grid(padding=(0, 1))
        table.add_column(width=10, no_wrap=True)
        table.add_column(width=6, justify="right", style="bold")
        table.add_column(no_wrap=True, overflow="crop")
        room = max(width - 19, 1)
        if self._last:
            accuracy = self._history["accuracy"]
            table.add_row("accuracy", percent(accuracy[-1]), _spark(sparkline(accuracy, room, 0, 1)))
            reward = self._history["reward_mean"]
            table.add_row("reward", number(reward[-1]), _spark(sparkline(reward, room)))
        if self._evaluation:
            held_out = self._history["held_out"]
            note = f" step {self._evaluation['step']}"
            line = _spark(sparkline(held_out, room - len(note), 0, 1)).append(note, style=QUIET)
            table.add_row("held out", percent(held_out[-1]), line)
        return table

    def _numbers(self, width: int) -> Text:
        """The other numbers of the step, as many on a line as fit."""
        last = self._last
        if not last:
            return Text()
        shown = {
            "tokens/s": number(last.get("tokens_per_second")),
            "length": number(last.get("response_length_mean")),
            "entropy": number(last.get("entropy_mean")),
            "grad norm": number(last.get("grad_norm")),
            "clipped": percent(last.get("clip_fraction")),
            "memory": memory(last.get("peak_memory")),
        }
        parts = [Text(f"{name} ", style=QUIET).append(value, style=LOUD) for name, value in shown.items()]
        loss = Text("loss ", style=QUIET).append(number(last.get("loss")), style=LOUD)
        parts.append(loss.append(" (0 at the first update on a batch, by construction)", style=QUIET))
        return _flow(parts, width)

    def _example(self, example: Example, width: int) -> Text:
        """The end of a response in at most two lines, after its question or below it if both do not fit on one line."""
        mark, style = ("✓ right", RIGHT) if example.correct else ("✗ wrong", WRONG)
        # Cut before escaping, because a response may have a hundred thousand characters.
        question, response = visible(example.question[:width]), visible(example.response[-4 * width :])
        line = Text(f"{mark}  ", style=f"bold {style}")
        line.append(_head(question, width - 10), style="not bold default dim")
        room = width - line.cell_len - 2
        separator = "  " if len(response) <= room else "\n"
        return line.append(separator).append(tail(response, 2 * width - 2), style="not bold default")


def _share(phase: PhaseProgress) -> float | None:
    """The share of a phase that is done, counted, or estimated from its time in the step before; None if unknown."""
    if phase.total:
        return phase.responses / phase.total
    return min(phase.seconds / phase.expected, 0.99) if phase.expected > 0 else None


def phase_text(phase: PhaseProgress) -> str:
    """How far a phase is, in words."""
    if not phase.total:
        return duration(phase.seconds)
    tokens = f"  {phase.tokens:,} tokens" if phase.tokens else ""
    return f"{phase.responses}/{phase.total} responses{tokens}"


def _bar(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total, done, width=width, style=QUIET, complete_style=BAR, finished_style=BAR)


def _spark(blocks: str) -> Text:
    return Text(blocks, style=BAR)


def _head(text: str, cells: int) -> str:
    return text if len(text) <= cells else text[: max(cells - 1, 1)] + "…"


def _flow(parts: list[Text], width: int) -> Text:
    """The parts with two spaces between them; a part that does not fit starts a new line."""
    flowed, used = Text(), 0
    for part in parts:
        if used and used + 2 + part.cell_len > width:
            flowed.append("\n")
            used = 0
        elif used:
            flowed.append("  ")
            used += 2
        flowed.append_text(part)
        used += part.cell_len
    return flowed
