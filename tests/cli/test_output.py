"""A closed output does not stop a run, and control characters in names never reach the terminal."""

from __future__ import annotations

import errno
import os
import signal
import sys
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from backends.errors import BackendError
from delta_cli.cli import main
from delta_cli.cli.error_exit import exit_with_error, machine_error
from delta_cli.cli.lossy_output import LossyStream, lossy_output
from delta_cli.cli.say import say
from delta_cli.recipe import load_recipe, to_toml
from delta_cli.reporting.run_list import RunTable, find_runs
from delta_cli.runs.status import read_status

NAME = "a\x1b[31mred\x9b2J\u202egnp"  # colours, clears the screen, reverses what follows
STEERING = {"Cc", "Cf"}


def steering(text: str) -> set[str]:
    return {char for char in text if char != "\n" and unicodedata.category(char) in STEERING}


def test_a_stream_whose_reader_has_gone_drops_what_is_written() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as plain:
        stream = LossyStream(plain)
        for _ in range(3):
            assert stream.write("lost\n") == 5
            stream.flush()


def test_a_stream_on_a_full_disk_drops_what_is_written() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as plain:
        stream = LossyStream(plain)
        stream.write("x" * 100_000)
        stream.flush()


def test_a_stream_that_was_closed_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with lossy_output():
        print("lost", flush=True)
    assert sys.stdout is None


def test_a_run_whose_output_is_lost_ends_as_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["run.steps=1", "rollout.prompts=4", "data.limit=60", "evaluation.problems=2", "rollout.max_tokens=8"]
    settings = [part for change in changes for part in ("--set", change)]
    run = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["delta", "train", "--backend", "fake", "--run-dir", run, *settings])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own handlers stay
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w", buffering=1) as gone,
        redirect_stdout(gone),
        redirect_stderr(gone),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code == 0
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "done"


def test_names_of_runs_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(load_recipe(None, [f"model.path={NAME}"])))
    (folder / "metrics.jsonl").write_text("no json\n")
    console = Console(file=StringIO(), width=200, color_system=None)
    console.print(RunTable(find_runs(tmp_path)))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert r"\x1b[31mred\x9b2J\u202egnp" in printed
    assert not steering(printed)


def test_lines_and_errors_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one {NAME}\ntwo")
    with pytest.raises(SystemExit):
        exit_with_error(BackendError(f"{NAME}: is not a model"))
    printed = capsys.readouterr()
    assert not steering(printed.out + printed.err)
    assert printed.out.count("\n") == 2
    assert printed.err.startswith("delta: a\\x1b[31mred")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (MemoryError(), "out of memory; make rollout.batch"),
        (RuntimeError("can't start new thread"), "no further thread"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "x: the system refuses: Too many open files; raise"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "change the permissions"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5), "give a shorter one"),
    ],
)
def test_what_the_machine_refuses_is_one_line(error: Exception, part: str) -> None:
    found = machine_error(error)
    assert found is not None
    assert part in str(found)
    assert "\n" not in str(found)


def test_mistakes_of_the_program_keep_their_traceback() -> None:
    for error in (ValueError("x"), KeyError("x"), RuntimeError("x"), BrokenPipeError(errno.EPIPE, "x"), OSError("x")):
        assert machine_error(error) is None
