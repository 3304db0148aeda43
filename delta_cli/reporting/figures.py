"""Figures of one or several runs, drawn with matplotlib, for the report and as files for a paper."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_cli.reporting import token_cloud
from delta_cli.reporting.length_by_outcome import lengths_by_outcome
from delta_cli.runs.metrics import METRICS, PHASES
from delta_cli.runs.records import RecordedRun
from delta_cli.text import visible

# Okabe and Ito's colours, which can be told apart with every common colour blindness. Runs also differ in dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#010203"  # axes and text: almost black, so that a page can replace it with the colour of its own text
WIDTH = 5.2  # inches
LONGEST_NAME = 28  # characters of a run's name in a figure
LINE, WIDER = 1.5, 1.8  # points: width of a line, and what it gets wider for each line that covers it
NEAR = 0.01  # share of the range of a figure's values; closer lines cannot be told apart
REWARD = "reward_"  # prefix of the metrics of single rewards
SMOOTHED = 40  # from this many steps on, a running mean is drawn over the single steps

Series = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Chart:
    """A figure: file name, title, caption and drawing function."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any, Sequence[RecordedRun]], None]  # on matplotlib axes
    height: float = 2.6  # inches


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The figures for which these runs have data; none before the first step."""
    if not any(run.metrics for run in runs):
        return []
    found = [
        Chart("reward", "Reward", _meaning("reward_mean"), _line("reward_mean")),
        *_rewards(runs),
        Chart(
            "accuracy",
            "Accuracy",
            "share correct: lines in training, marks with 95 % intervals on held-out problems",
            _accuracy,
        ),
        Chart("length", "Response length", _meaning("response_length_mean"), _line("response_length_mean")),
        *_outcomes(runs),
        *_episodes(runs),
        Chart("entropy", "Entropy", _meaning("entropy_mean"), _line("entropy_mean")),
        Chart("clip_fraction", "Clip fraction", _meaning("clip_fraction"), _line("clip_fraction")),
        Chart("kl_old", "KL to the rollout policy", _meaning("kl_old"), _line("kl_old")),
        Chart("grad_norm", "Gradient norm", _meaning("grad_norm"), _line("grad_norm")),
        Chart("speed", "Speed", _meaning("tokens_per_second"), _line("tokens_per_second")),
    ]
    for place, run in enumerate(runs):
        if any(record.get("coefficient_p50") is not None for record in run.metrics):
            which = f": {visible(run.name)}" if len(runs) > 1 else ""
            caption = "median, middle 50 % and middle 90 % of the coefficients; means of both sides"
            found.append(Chart(f"coefficients_{place + 1}", f"Coefficients{which}", caption, _coefficients(run)))
            words = token_cloud.cloud(run)
            if words is not None:
                caption = (
                    f"mean coefficients up to step {words.step}: the larger a token, the further its mean from 1; "
                    "⁺ in responses with A > 0, ⁻ in those with A < 0"
                )
                draw = token_cloud.drawing(words, (COLOURS[1], COLOURS[0]))
                found.append(Chart(f"words_{place + 1}", f"Tokens amplified and damped{which}", caption, draw, 2.9))
    height = 1.1 + 0.35 * len(runs)
    found.append(Chart("phases", "Time by phase", "mean seconds of a step, without evaluations", _phases, height))
    return found


class Drawing:
    """A figure that is laid out once and then written to a page and to files."""

    def __init__(self, chart: Chart, runs: Sequence[RecordedRun]) -> None:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._chart = chart
        with self._style():
            self.figure = Figure(figsize=(WIDTH, chart.height))
            axes = self.figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(chart.title, loc="left", fontweight="bold")
            chart.draw(axes, runs)
            # Not the figure's own engine, which would repeat the layout for each file; it takes longer than drawing.
            ConstrainedLayoutEngine().execute(self.figure)

    def svg(self) -> str:
        """The figure for a page: transparent, with axes and text in the colour of the page's text."""
        buffer = io.StringIO()
        self._save(buffer, "svg", transparent=True)
        drawing = buffer.getvalue()
        return drawing[drawing.index("<svg") :].replace(INK, "currentColor")

    def write_files(self, folder: Path) -> list[Path]:
        """Write the figure as PNG and SVG on white; returns both files."""
        files = [folder / f"{self._chart.name}.{form}" for form in ("png", "svg")]
        for file in files:
            self._save(file, file.suffix[1:], transparent=False)
        return files

    def _save(self, target: Any, form: str, transparent: bool) -> None:
        metadata = {"Date": None} if form == "svg" else None
        with self._style():
            self.figure.savefig(target, format=form, dpi=200, transparent=transparent, metadata=metadata)

    def _style(self) -> AbstractContextManager[None]:
        import matplotlib as mpl

        style = {
            "svg.fonttype": "none",
            "svg.hashsalt": self._chart.name,  # ids differ between the figures of a page but not between two reports
            "font.size": 9.0,
            "font.family": "sans-serif",
            "text.parse_math": False,  # run names are not formulas
        }
        style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
        return mpl.rc_context(style)  # type: ignore[arg-type]


def _meaning(name: str) -> str:
    metric = METRICS[name]
    return metric.meaning + (f"; healthy: {metric.healthy}" if metric.healthy else "")


def _unit(name: str) -> str:
    return METRICS[name].unit


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _style(place: int) -> dict[str, Any]:
    return {"color": _colour(place), "linestyle": DASHES[place % len(DASHES)]}


def _series(run: RecordedRun, name: str) -> Series:
    """Steps and values of a metric; NaN if a value is missing."""
    values = [record.get(name) for record in run.metrics]
    known = [float(value) if isinstance(value, int | float) else math.nan for value in values]
    return [record["step"] for record in run.metrics], known


def _smooth(values: list[float]) -> list[float]:
    """Running means of the finite values, over a twentieth of the run."""
    reach = max(len(values) // 40, 1)
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    means = ([value for value in window if math.isfinite(value)] for window in windows)
    return [sum(window) / len(window) if window else math.nan for window in means]


def _plot(axes: Any, runs: Sequence[RecordedRun], name: str) -> None:
    """Draw a metric of every run; a line that others cover is wider, so it is visible on both sides of them."""
    drawn = [_series(run, name) for run in runs]
    for place, (run, (steps, values)) in enumerate(zip(runs, drawn, strict=True)):
        if len(values) >= SMOOTHED:
            axes.plot(steps, values, color=_colour(place), alpha=0.25, linewidth=0.8)
            values = _smooth(values)
        width = LINE + WIDER * _covered(place, drawn)
        axes.plot(steps, values, label=_short(run.name), linewidth=width, **_style(place))


def _covered(place: int, drawn: Sequence[Series]) -> int:
    """How many lines that are drawn later coincide with this one."""
    return sum(_coincide(drawn[place], other, drawn) for other in drawn[place + 1 :])


def _coincide(one: Series, other: Series, drawn: Sequence[Series]) -> bool:
    """Whether two lines cannot be told apart, at the scale of all lines, in at least half of their steps."""
    known = [value for _, values in drawn for value in values if math.isfinite(value)]
    near = NEAR * (max(known, default=0.0) - min(known, default=0.0))
    first, second = (dict(zip(*series, strict=True)) for series in (one, other))
    gaps = [abs(first[step] - second[step]) for step in first.keys() & second.keys()]
    return bool(gaps) and 2 * sum(gap <= near for gap in gaps) >= len(gaps)


def _finish(axes: Any, runs: Sequence[RecordedRun], unit: str) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(axis="y", alpha=0.2, color=INK)
    if len(runs) > 1:
        _legend(axes)


def _legend(axes: Any) -> None:
    """Write the names below the axes in as many columns as fit; the figure grows by their rows."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(int(WIDTH / (0.6 + 0.07 * max(map(len, names)))), 1)  # inches: a handle, a letter
    rows = math.ceil(len(names) / columns)
    axes.figure.set_figheight(axes.figure.get_figheight() + 0.17 * rows)
    axes.figure.legend(handles, names, frameon=False, fontsize=8, ncols=columns, loc="outside lower center")


def _line(name: str) -> Callable[[Any, Sequence[RecordedRun]], None]:
    """A function that draws one metric of every run."""

    def draw(axes: Any, runs: Sequence[RecordedRun]) -> None:
        _plot(axes, runs, name)
        _finish(axes, runs, _unit(name))

    return draw


def _accuracy(axes: Any, runs: Sequence[RecordedRun]) -> None:
    from matplotlib.transforms import offset_copy

    _plot(axes, runs, "accuracy")
    for place, run in enumerate(runs):
        records = run.evaluations
        if records:
            middle = [record["accuracy"] for record in records]
            below = [max(record["accuracy"] - record["low"], 0) for record in records]
            above = [max(record["high"] - record["accuracy"], 0) for record in records]
            steps = [record["step"] for record in records]
            # Runs are evaluated at the same steps, so their marks are drawn side by side.
            beside = offset_copy(axes.transData, axes.figure, x=5 * (place - (len(runs) - 1) / 2), units="points")
            axes.errorbar(
                steps, middle, (below, above), fmt="o", color=_colour(place), transform=beside,
                markersize=3.5, capsize=2, elinewidth=1,
            )  # fmt: skip
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, runs, "share correct")


def _rewards(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The figure with each of several rewards, if a run has several: rewards differ by dashes, runs by colour."""
    names = sorted({name for run in runs for name in reward_names(run)})
    if not names:
        return []

    def draw(axes: Any, runs: Sequence[RecordedRun]) -> None:
        several = len(runs) > 1
        for number, name in enumerate(names):
            drawn = [_series(run, f"{REWARD}{name}") for run in runs]
            for place, (run, (steps, values)) in enumerate(zip(runs, drawn, strict=True)):
                if name in reward_names(run):
                    values = _smooth(values) if len(values) >= SMOOTHED else values
                    style = _style(number) | ({"color": _colour(place)} if several else {})
                    who = f"{_short(run.name)}, " if several else ""
                    width = LINE + WIDER * _covered(place, drawn)
                    axes.plot(steps, values, label=f"{who}{_short(name)}", linewidth=width, **style)
        _finish(axes, runs[:1], _unit("reward_mean"))
        _legend(axes)

    caption = "mean of each reward before its weight; the reward in the first figure is their weighted sum"
    return [Chart("rewards", "Rewards by kind", caption, draw)]


def reward_names(run: RecordedRun) -> list[str]:
    """The names of a run's rewards if it has several; otherwise empty."""
    found = dict.fromkeys(name for record in run.metrics for name in record)
    return [name.removeprefix(REWARD) for name in found if name.startswith(REWARD) and name not in METRICS]


def _outcomes(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The figure of response lengths by outcome, if responses are recorded."""
    found = [lengths_by_outcome(run) for run in runs]
    if not any(lengths.steps for lengths in found):
        return []

    def draw(axes: Any, runs: Sequence[RecordedRun]) -> None:
        right = [(lengths.steps, lengths.right) for lengths in found]
        wrong = [(lengths.steps, lengths.wrong) for lengths in found]
        for place, run in enumerate(runs):
            who = f"{_short(run.name)}, " if len(runs) > 1 else ""
            size = 4 + 2 * WIDER * max(_covered(place, right), _covered(place, wrong))
            style = {"color": _colour(place), "marker": MARKS[place % len(MARKS)], "markersize": size, "linewidth": 1}
            hollow = style | {"linestyle": "--", "markerfacecolor": "none"}
            axes.plot(*right[place], label=f"{who}right", **style)
            axes.plot(*wrong[place], label=f"{who}wrong", **hollow)
        _finish(axes, runs[:1], "tokens")
        _legend(axes)

    caption = "mean length of recorded responses: filled marks right, hollow marks wrong"
    return [Chart("length_outcome", "Response length by outcome", caption, draw)]


def _episodes(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The figures of episodes, if a run has an environment."""
    if not any("episode_turns_mean" in record for run in runs for record in run.metrics):
        return []
    titles = {
        "episode_turns_mean": "Turns of an episode",
        "environment_calls": "Calls of environments",
        "environment_failures": "Failed episodes",
        "environment_errors": "Failed calls",
        "seconds_environment_wait": "Waiting for environments",
    }
    return [Chart(name, title, _meaning(name), _line(name)) for name, title in titles.items()]


def _coefficients(run: RecordedRun) -> Callable[[Any, Sequence[RecordedRun]], None]:
    """A function that draws the distribution of one run's coefficients over its steps."""

    def draw(axes: Any, runs: Sequence[RecordedRun]) -> None:
        steps, median = _series(run, "coefficient_p50")
        for low, high, alpha in (("p05", "p95", 0.15), ("p25", "p75", 0.3)):
            edges = [_series(run, f"coefficient_{name}")[1] for name in (low, high)]
            axes.fill_between(steps, *edges, color=COLOURS[6], alpha=alpha, linewidth=0)
        axes.plot(steps, median, color=INK, linewidth=1, label="median")
        axes.plot(steps, _series(run, "coefficient_positive")[1], label="mean, A > 0", color=COLOURS[1], linewidth=1)
        axes.plot(
            steps,
            _series(run, "coefficient_negative")[1],
            label="mean, A < 0",
            color=COLOURS[0],
            linestyle="--",
            linewidth=1,
        )
        _finish(axes, [run], "coefficient")
        _legend(axes)

    return draw


def phase_means(run: RecordedRun) -> dict[str, float]:
    """Mean seconds of a step in each phase."""
    count = max(len(run.metrics), 1)
    return {phase: sum(record.get(f"seconds_{phase}", 0.0) for record in run.metrics) / count for phase in PHASES}


def _short(name: str) -> str:
    """A run's name, shortened to leave room for the axes."""
    name = visible(name)
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _phases(axes: Any, runs: Sequence[RecordedRun]) -> None:
    names = [_short(run.name) for run in runs]
    rows = range(len(runs))
    left = [0.0] * len(runs)
    hatches = ("", "///", "...", "xxx", "---", "\\\\\\")
    for place, phase in enumerate(phase for phase in PHASES if phase != "evaluate"):
        width = [phase_means(run)[phase] for run in runs]
        axes.barh(
            rows, width, left=left, label=phase, height=0.6,
            color=_colour(place), hatch=hatches[place], edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        left = [start + more for start, more in zip(left, width, strict=True)]
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    _legend(axes)
