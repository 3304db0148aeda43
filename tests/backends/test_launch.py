"""Ranks on this machine: signals are passed on, and no rank outlives the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISE = """
import subprocess, sys
from backends import launch
launch.GRACE = launch.ASKED_GRACE = 0.3
launch.STOPPED_GRACE = 0.6
folder, *codes = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, "-c", code, folder], process_group=0) for code in codes]
supervisor = launch._Supervisor(ranks, folder + "/failed", {timeout}, lambda reason: print(reason, flush=True))
print("began", flush=True)
code = supervisor.until_the_end()
print([rank.returncode for rank in ranks], flush=True)
sys.exit(code)
"""
LISTENS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, {handler})
pathlib.Path(sys.argv[1], f"listens-{{os.getpid()}}").touch()
time.sleep(60)
"""
ENDS = LISTENS.format(handler="lambda *_: sys.exit(143)")
DEAF = LISTENS.format(handler="signal.SIG_IGN")
STOPS_ITSELF = DEAF.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)")
KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
IMPORTS = "import time; time.sleep(60)"
FAILS = "import sys; sys.exit(5)"


@pytest.mark.parametrize(
    ("ranks", "signals", "code", "ended", "said"),
    [
        pytest.param([FAILS, DEAF], 0, 5, [5, -9], "", id="one fails, the other is deaf"),
        pytest.param([DEAF, KILLS_ITSELF], 0, 137, [-9, -9], "rank 1 was ended by SIGKILL", id="one is killed"),
        pytest.param([ENDS, ENDS], 1, 130, [143, 143], "", id="asked once"),
        pytest.param([ENDS, IMPORTS], 1, 130, [143, -15], "", id="asked before a rank could listen"),
        pytest.param([ENDS, DEAF], 2, 130, [143, -9], "", id="asked twice, one is deaf"),
        pytest.param([DEAF, STOPS_ITSELF], 1, 2, [-9, -9], "rank 1 has been stopped for 1 s", id="one is stopped"),
        pytest.param([DEAF, STOPS_ITSELF], 0, 2, [-9, -9], "rank 1 has been stopped for 1 s", id="stopped too long"),
    ],
)
def test_the_end_of_several_ranks(
    ranks: list[str], signals: int, code: int, ended: list[int], said: str, tmp_path: Path
) -> None:
    program = SUPERVISE.format(timeout=0.5 if "too long" in str(ranks) or not signals else 100.0)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), *ranks],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "began\n"
        while signals and len([*tmp_path.glob("listens-*")]) < sum(rank.startswith(LISTENS[:20]) for rank in ranks):
            time.sleep(0.02)
        for _ in range(signals):
            supervisor.send_signal(signal.SIGINT)
            time.sleep(0.1)
        out, errors = supervisor.communicate(timeout=20)
    assert supervisor.returncode == code, errors
    reason, _, codes = out.rstrip().rpartition("\n")
    assert codes == str(ended)
    assert reason.startswith(said)
    if said:
        assert f"delta: {said}" in errors
        assert (tmp_path / "failed").read_text() == reason + "\n"
