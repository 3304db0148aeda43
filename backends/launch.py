"""Several processes of one run on this machine: started together, watched, ended together.

What torchrun does for PyTorch and mlx.launch for MLX, with the same variables. Two things differ: a stop that
is asked for may take as long as the step needs to come to a safe point (torchrun kills after 30 seconds), and
where one process ends the others follow within seconds, whatever they are waiting for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from backends.process import usable_cores

LAUNCHER = "DELTA_LAUNCHER"  # the process that started this one, and ends when it ends
FAILURE = "DELTA_FAILURE"  # a file that the first process to fail creates, so that one alone reports
GRACE = 5.0  # seconds that the others have to end themselves once one has failed

_MLX = ("mlx",)


def launch(backend: str, processes: int, arguments: Sequence[str]) -> int:
    """Run ``python -m delta_cli`` with ``arguments`` as so many ranks and wait; the exit code of the first that failed.

    0 where all ended well; 128 + the signal where all stopped because one was sent here.
    """
    with tempfile.TemporaryDirectory(prefix="delta-") as scratch:
        common = os.environ | {
            LAUNCHER: str(os.getpid()),
            FAILURE: str(Path(scratch) / "failed"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // processes)),
        }
        ranks = mlx_ranks(processes, Path(scratch)) if backend in _MLX else torch_ranks(processes)
        command = [sys.executable, "-m", "delta_cli", *arguments]
        with ExitStack() as stack:
            # Groups of their own: what the terminal sends to its foreground group comes once, from here.
            children = [
                stack.enter_context(subprocess.Popen(command, env=common | rank, process_group=0)) for rank in ranks
            ]
            return _Watch(children, Path(common[FAILURE])).until_the_end()


def torch_ranks(processes: int) -> list[dict[str, str]]:
    """What each rank finds in its environment, as torchrun has it."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(1)[0])}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def mlx_ranks(processes: int, scratch: Path) -> list[dict[str, str]]:
    """What each rank finds in its environment, as mlx.launch has it for a ring."""
    hosts = scratch / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(processes)]), encoding="utf-8")
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(processes)]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class _Watch:
    """The ranks while they run: signals are passed on, and none outlives another's failure."""

    def __init__(self, children: Sequence[subprocess.Popen[bytes]], failure: Path) -> None:
        self._children = children
        self._failure = failure
        self._asked = 0  # the signal that was sent here
        self._failed: tuple[float, int] | None = None  # when, with which exit code
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)

    def until_the_end(self) -> int:
        """Wait for every rank; the exit code of the first that failed, or of all."""
        while [child for child in self._children if child.poll() is None]:  # a list: every one has to be polled
            self._look()
            time.sleep(0.05)
        self._look()
        if self._failed:
            return self._failed[1]
        return 128 + self._asked if any(child.returncode for child in self._children) else 0

    def _look(self) -> None:
        now = time.monotonic()
        for rank, child in enumerate(self._children):
            if self._failed is None and child.returncode not in (None, 0, 128 + self._asked):
                self._failed = now, child.returncode if child.returncode > 0 else 128 - child.returncode
                self._explain(rank, child.returncode)
        if self._failed and now > self._failed[0] + GRACE:
            for child in self._children:
                if child.poll() is None:
                    child.kill()

    def _explain(self, rank: int, code: int) -> None:
        """Say why, where a rank could not say so itself."""
        if code < 0 and not self._failure.exists():
            self._failure.touch()
            name = signal.Signals(-code).name
            line = f"delta: rank {rank} was ended by {name}; the run goes on from its last checkpoint with --resume\n"
            os.write(2, line.encode())

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)
