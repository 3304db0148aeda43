"""Start several processes of one run on this machine, watch them, and end them together.

This is what torchrun does for PyTorch and mlx.launch for MLX, with the same environment variables. Two things differ.
A run that is asked to stop may take as long as a step needs to reach a safe point, while torchrun kills it after 30
seconds. And once one process has failed, the others end within seconds, whatever they are waiting for.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from backends.process import FAILURE, claim_failure, is_stopped, usable_cores

if TYPE_CHECKING:
    from backends.settings import Parallel  # imports pydantic, which `delta --help` need not wait for

LAUNCHER = "DELTA_LAUNCHER"  # variable with the process id of the launcher: a rank ends if its launcher is gone
LOOKS_PER_SECOND = 20
REPORT_AFTER = 60.0  # seconds after which a line says that a rank is stopped
GRACE = 5.0  # seconds that the other ranks have to end by themselves once one has failed
ASKED_GRACE = 2.0  # the same if a person had asked the run to stop
STOPPED_GRACE = 6.0  # seconds that a rank may be stopped once a person has asked the run to stop

_MLX = ("mlx",)


def launch(
    backend: str, parallel: Parallel, arguments: Sequence[str], on_failure: Callable[[str], None] = lambda reason: None
) -> int:
    """Run ``python -m delta_cli`` with ``arguments`` as several ranks, wait for them, and return an exit code.

    That is the code of the first rank that failed, 128 + the number of a signal that stopped all of them, or 0.
    ``on_failure`` is called with the reason if a rank was killed and could not give one itself.
    """
    processes = parallel.processes
    with tempfile.TemporaryDirectory(prefix="delta-") as scratch:
        common = os.environ | {
            LAUNCHER: str(os.getpid()),
            FAILURE: str(Path(scratch) / "failed"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // processes)),
        }
        ranks = mlx_ranks(processes, Path(scratch)) if backend in _MLX else torch_ranks(processes)
        command = [sys.executable, "-m", "delta_cli", *arguments]
        with ExitStack() as stack:
            # Each in a process group of its own, so that Ctrl-C reaches it only through this process.
            children = [
                stack.enter_context(subprocess.Popen(command, env=common | rank, process_group=0)) for rank in ranks
            ]
            return _Supervisor(children, common[FAILURE], parallel.timeout, on_failure).until_the_end()


def torch_ranks(processes: int) -> list[dict[str, str]]:
    """The environment variables of each rank, as torchrun sets them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(1)[0])}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def mlx_ranks(processes: int, scratch: Path) -> list[dict[str, str]]:
    """The environment variables of each rank, as mlx.launch sets them for a ring."""
    hosts = scratch / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(processes)]), encoding="utf-8")
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(processes)]


def _free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class _Supervisor:
    """Passes signals on to the ranks, and ends those that outlive a failure, a second signal or their timeout."""

    def __init__(
        self,
        children: Sequence[subprocess.Popen[bytes]],
        failure: str,
        timeout: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self._children = children
        self._failure = failure
        self._timeout = timeout
        self._on_failure = on_failure
        self._asked: list[int] = []  # the signals that were sent here
        self._first_asked = math.inf
        self._as_asked = {0}  # exit codes of ranks that end because they were asked to
        self._failed: int | None = None  # the exit code of the first rank that failed
        self._looks = 0
        self._deadline = math.inf  # when ranks that are still there are killed
        self._stopped: dict[int, float] = {}  # since when a rank has been stopped by SIGSTOP
        self._reported: set[int] = set()  # stopped ranks that a line has named
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)

    def until_the_end(self) -> int:
        """Wait for every rank; the exit code of the first that failed, or of all."""
        while [child for child in self._children if child.poll() is None]:  # a list: every one has to be polled
            self._look()
            time.sleep(1 / LOOKS_PER_SECOND)
        self._look()
        asked = self._asked[-1] if self._asked else 0
        if self._failed is not None and not (asked and self._failed == 128 + signal.SIGKILL):
            return self._failed
        return 128 + asked if any(child.returncode for child in self._children) else 0

    def _look(self) -> None:
        now = time.monotonic()
        self._looks += 1
        for rank, child in enumerate(self._children):
            if child.returncode is None:
                if not self._looks % LOOKS_PER_SECOND:
                    self._look_whether_stopped(rank, child, now)
            elif self._failed is None and child.returncode not in self._as_asked:
                code = child.returncode
                self._failed = code if code > 0 else 128 - code
                self._end_by(now + (ASKED_GRACE if self._asked else GRACE))
                if code < 0 and not self._asked:
                    self._explain(f"rank {rank} was ended by {signal.Signals(-code).name}")
        if now > self._deadline:
            for child in self._children:
                if child.poll() is None:
                    child.kill()

    def _look_whether_stopped(self, rank: int, child: subprocess.Popen[bytes], now: float) -> None:
        """A rank that is stopped before it has joined the others has no peers that could notice."""
        if not is_stopped(child.pid):
            self._stopped.pop(rank, None)
            return
        seconds = now - self._stopped.setdefault(rank, now)
        if seconds > REPORT_AFTER and rank not in self._reported:
            self._reported.add(rank)
            os.write(2, f"delta: process {child.pid}, rank {rank}, is stopped; continue it with kill -CONT\n".encode())
        # The ranks' own watchdogs come first: they know the phase.
        asked_long_ago = bool(self._asked) and seconds > STOPPED_GRACE and now > self._first_asked + STOPPED_GRACE
        if asked_long_ago or seconds > self._timeout + GRACE:
            self._explain(f"rank {rank} has been stopped for {seconds:.0f} s and cannot end")
            self._failed = self._failed or 2
            self._end_by(now)

    def _end_by(self, deadline: float) -> None:
        self._deadline = min(self._deadline, deadline)

    def _explain(self, reason: str) -> None:
        """Say why, if no rank could say so itself."""
        if claim_failure(reason, file=self._failure):
            os.write(2, f"delta: {reason}; the run goes on from its last checkpoint with --resume\n".encode())
            self._on_failure(reason)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the ranks to stop where nothing is lost, the second one ends them.

        Ctrl-C reaches them as SIGTERM, which also ends a rank that is still importing, without a traceback.
        """
        now = time.monotonic()
        self._first_asked = min(self._first_asked, now)
        self._asked.append(number)
        self._as_asked |= {128 + _passed_on(number), -_passed_on(number)}
        if len(self._asked) > 1:
            self._end_by(now + ASKED_GRACE)
        for child in self._children:
            if child.poll() is None:
                child.send_signal(_passed_on(number))


def _passed_on(number: int) -> int:
    """The signal that ranks get for one that was sent here."""
    return signal.SIGTERM if number == signal.SIGINT else number
