"""Who is found to keep the others waiting, and how a rank that hangs ends the run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.watchdog import RankStatus, Sighting, find_suspect

NOW = 1000.0


def seen(rank: int, *, heard: float = 0.0, moved: float = 0.0, waiting: bool = False, calls: int = 7) -> Sighting:
    """What a rank is known to do, and how many seconds ago it was heard of and moved last."""
    return Sighting(RankStatus(rank, "update", waiting, calls, 0, "here"), NOW - heard, NOW - moved)


@pytest.mark.parametrize(
    ("sightings", "rank", "seconds", "silent"),
    [
        pytest.param([seen(0, moved=50, waiting=True), seen(1, heard=40, moved=45)], 1, 40, True, id="stopped"),
        pytest.param([seen(0, moved=50), seen(1, heard=40, moved=45)], 1, 40, True, id="stopped, nobody waits yet"),
        pytest.param([seen(0, moved=50, waiting=True), seen(1, moved=30)], 1, 30, False, id="stuck"),
        pytest.param([seen(0, moved=50, waiting=True), seen(1, moved=1)], 1, 1, False, id="slow"),
        pytest.param([seen(0, moved=90), seen(1, moved=3)], 0, 3, False, id="a long call, and nobody waits"),
        pytest.param(
            [seen(0, moved=90, waiting=True, calls=9), seen(1, moved=80, waiting=True)], 1, 80, False, id="out of step"
        ),
        pytest.param([seen(0, heard=40), seen(1, heard=60), seen(2)], 1, 60, True, id="two of three"),
    ],
)
def test_the_rank_that_keeps_the_others_waiting(
    sightings: list[Sighting], rank: int, seconds: float, silent: bool
) -> None:
    suspect = find_suspect(sightings, NOW)
    assert suspect is not None
    assert (suspect.status.rank, suspect.silent) == (rank, silent)
    assert suspect.seconds == pytest.approx(seconds)
    words = "has not answered" if silent else "has not moved"
    assert str(suspect) == f"rank {rank} {words} for {seconds:.0f} s in phase update, at here"


RANK = """
import os, signal, sys, time
from pathlib import Path
from backends.settings import Parallel
from backends import watchdog

watchdog.INTERVAL, watchdog.SILENT_AFTER = 0.1, 0.5

class Files:
    def __init__(self):
        self.rank, self.folder = int(sys.argv[1]), Path(sys.argv[2])
    def gather(self, item):
        (self.folder / f"part-{self.rank}").write_text(repr(item))
        (self.folder / f"part-{self.rank}").rename(self.folder / f"ready-{self.rank}")
        files = [self.folder / f"ready-{rank}" for rank in range(2)]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [eval(file.read_text()) for file in files]

signal.signal(signal.SIGTERM, lambda number, frame: None)
ranks = Files()
guard = watchdog.Watchdog(ranks.rank, 2)
guard.limits = Parallel(timeout=float(sys.argv[3]))
guard.phase = "update"
guard.start(ranks)
(ranks.folder / f"watched-{ranks.rank}").touch()
if ranks.rank == 0:
    with guard.waiting():
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "how",
    ["stuck", pytest.param("stopped", marks=pytest.mark.long), pytest.param("asked to end", marks=pytest.mark.long)],
)
def test_a_rank_that_hangs_ends_the_others(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still and answers, or is stopped; or it is stopped, and somebody asks the others to end."""
    timeout = "100" if how == "asked to end" else "1"
    monkeypatch.setenv("DELTA_FAILURE", str(tmp_path / "failed"))
    command = [sys.executable, "-c", RANK]
    with (
        subprocess.Popen([*command, "0", str(tmp_path), timeout], stderr=subprocess.PIPE, text=True) as waiting,
        subprocess.Popen([*command, "1", str(tmp_path), timeout], stderr=subprocess.PIPE, text=True) as hanging,
    ):
        while not all((tmp_path / f"watched-{rank}").exists() for rank in range(2)):
            assert waiting.poll() is hanging.poll() is None
            time.sleep(0.02)
        if how != "stuck":
            time.sleep(0.3)  # so that each has heard of the other
            hanging.send_signal(signal.SIGSTOP)
        if how == "asked to end":
            waiting.send_signal(signal.SIGTERM)
        said = waiting.communicate(timeout=20)[1]
        hanging.kill()
        said += hanging.communicate()[1]  # one of the two has said it
    assert waiting.returncode == 2
    what = "has not moved" if how == "stuck" else "has not answered"
    why = "and would not have stopped" if how == "asked to end" else "longer than parallel.timeout = 1 s"
    assert said.startswith(f"delta: rank 1 {what} for ")
    assert why in said
    assert "phase update" in said
    assert (tmp_path / "failed").read_text().startswith("rank 1 ")
