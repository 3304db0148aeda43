"""The live display and the lines that stand in for it."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from delta_cli.reporting import console as console_module
from delta_cli.reporting.console import DisplayMode, PlainObserver, console_observer
from delta_cli.reporting.live_display import LiveObserver, ResizableLive
from delta_cli.runs.observer import Example, Notice, Observer
from tests.reporting.synthetic import HOSTILE, metrics

EVALUATION = {"step": 0, "accuracy": 0.41, "low": 0.33, "high": 0.5, "problems": 128, "samples": 1}


def play(observer: Observer, steps: int = 3) -> None:
    """The calls of a short run."""
    observer.notice(Notice("damaged_checkpoint", "said before the beginning"))
    observer.begin("runs/a", steps, 0)
    observer.phase("evaluate", 128)
    observer.advance(128, 0)
    observer.evaluation(EVALUATION)
    for step in range(1, steps + 1):
        observer.phase("rollout", 512)
        observer.advance(100, 3000)
        observer.phase("update")
        observer.step(
            metrics(step, step / steps),
            [Example("47+38=?", "7+8=15 \\boxed{85}", True, 1.0), Example("1+1=?", HOSTILE, False, 0.0)],
        )
        observer.notice(Notice("groups_equal", f"step {step}: something\nwith {HOSTILE}"))
    observer.phase("rollout", 512)
    observer.advance(256, 7000)


def drawn(width: int) -> list[str]:
    """The picture in the middle of a run, line by line, without styles."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, height=50)
    observer = LiveObserver(console)
    play(observer)
    buffer.seek(0)
    buffer.truncate()
    console.print(observer.picture())
    observer.end()
    return buffer.getvalue().partition("╯")[0].splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_picture_fits_and_says_everything(width: int) -> None:
    """In narrow and wide terminals alike: progress, accuracy, reward, speed, memory, loss explained, examples."""
    lines = drawn(width)
    assert max(map(cell_len, lines)) <= width
    flat = "".join(line.strip("│ ") + " " for line in lines)
    wanted = ["step", "rollout", "256/512", "accuracy", "100.0%", "reward", "held out", "41.0%", "tokens/s", "entropy"]
    wanted += ["512 MB", "grad norm", "✓ right", "✗ wrong", "▁", "█", "loss"]
    assert [word for word in wanted if word not in flat] == []
    if width >= 60:
        assert "0 at the first update on a batch" in flat


def test_model_text_does_not_steer_the_terminal() -> None:
    """Control characters in a response are written out: the only escapes are those of the display itself."""
    buffer = io.StringIO()
    observer = console_observer("live", Console(file=buffer, force_terminal=True, width=100, height=40))
    play(observer)
    time.sleep(0.5)  # at least one picture
    observer.end()
    observer.end()
    output = buffer.getvalue()
    assert r"\x1b]0;owned\x07" in output
    assert "\x1b]0;" not in output
    assert "\x07" not in output
    assert "\u202e" not in output


def test_plain_lines() -> None:
    """One line a step, one an evaluation, one a notice; nothing that moves a cursor."""
    buffer = io.StringIO()
    observer = console_observer("auto", Console(file=buffer))
    assert isinstance(observer, PlainObserver)
    play(observer)
    observer.end()
    lines = buffer.getvalue().splitlines()
    assert len(lines) == 1 + 1 + 1 + 1 + 3 + 3
    assert "evaluating on held-out problems: 128 responses" in lines
    lines.remove("evaluating on held-out problems: 128 responses")
    assert lines[3].startswith("step 1/3  reward  0.333  accuracy  33.3%")
    assert lines[3].endswith("2.0 s  left 0:04")
    assert "held-out accuracy after step 0: 41.0% (33.0% to 50.0%) on 128 problems" in lines
    assert "\x1b" not in buffer.getvalue()


def test_a_long_phase_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is printed after half a minute of silence, and none before."""
    now = [1000.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    buffer = io.StringIO()
    observer = PlainObserver(buffer)
    observer.begin("run", 3, 0)
    observer.phase("rollout", 512)
    for seconds in (10, 25, 31, 40, 62):
        now[0] = 1000.0 + seconds
        observer.advance(8 * seconds, 100)
    now[0] += 31
    observer.phase("update")
    lines = buffer.getvalue().splitlines()
    assert lines[1:3] == ["  … rollout  248/512 responses  100 tokens", "  … rollout  496/512 responses  100 tokens"]
    assert lines[3].startswith("  … update  ")
    assert len(lines) == 4


@pytest.mark.parametrize("sign", ["JPY_PARENT_PID", None])
def test_a_notebook_gets_plain_lines(sign: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a command that a cell starts: its output is a terminal that keeps every cursor movement."""
    console = Console(file=Terminal(), force_terminal=True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if sign:
        monkeypatch.setenv(sign, "1")
    assert isinstance(console_observer("auto", console), PlainObserver if sign else LiveObserver)


def test_a_narrower_terminal_is_cleared_of_the_wrapped_rows() -> None:
    """Lines of 80 columns fill two rows each once the terminal has 50; all rows are erased before the next picture."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40)
    live = ResizableLive(console=console, get_renderable=lambda: Text("x" * 80 + "\n" + "y" * 80), auto_refresh=False)
    live.start(refresh=True)
    console.width = 50
    console.file = io.StringIO()
    live.refresh()
    live.stop()
    assert console.file.getvalue().split("x")[0].count("\x1b[1A") == 3


def test_a_refresh_waits_until_a_line_above_is_written() -> None:
    """Else it could draw a picture of another height after the rows to erase were counted for the line."""
    live = ResizableLive(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False)
    refreshed = threading.Event()
    thread = threading.Thread(target=lambda: (live.refresh(), refreshed.set()))
    waited = []

    class Line:
        def __rich_console__(self, *_: object) -> Iterator[Text]:
            thread.start()
            waited.append(not refreshed.wait(0.2))
            yield Text("a line")

    with live:
        live.print_above(Line())
        thread.join()
    assert waited == [True]
    assert refreshed.is_set()


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Notices alone, on stderr."""
    play(console_observer("quiet"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 4


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of stdout is an object that names its event, even if a number is not finite."""
    observer = console_observer("json")
    play(observer)
    observer.step(metrics(4) | {"loss": float("nan")}, [])

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in capsys.readouterr().out.splitlines()]
    assert {line["event"] for line in lines} == {"begin", "step", "evaluation", "notice"}
    assert lines[-1]["loss"] is None
    assert [line["reward_mean"] for line in lines if line["event"] == "step"][:3] == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_display_is_cheap() -> None:
    """Drawing three pictures a second stays below 2 % of a core; what the loop calls below 20 µs."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=50)
    observer = LiveObserver(console)
    play(observer, steps=60)
    pictures = 30
    start = time.process_time()
    for _ in range(pictures):
        console.print(observer.picture())
    drawing = (time.process_time() - start) / pictures
    start = time.process_time()
    for count in range(1000):
        observer.advance(count, count)
    advancing = (time.process_time() - start) / 1000
    observer.end()
    assert drawing * 3 < 0.02
    assert advancing < 20e-6


@pytest.mark.parametrize("mode", ["auto", "live", "plain", "quiet", "json"])
def test_every_mode_hears_a_run(mode: DisplayMode) -> None:
    """Every mode accepts a run that ends before its first step, and a second end."""
    observer = console_observer(mode, Console(file=io.StringIO()))
    observer.begin("runs/a", 5, 2)
    observer.end()
    observer.end()
