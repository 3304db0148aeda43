"""The user's environments in processes of their own, one for each episode, which can be killed."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from delta_cli.environments.child import receive, send
from delta_cli.environments.schema import ToolSchema
from delta_cli.environments.turn import EpisodeFailure, Row, ToolError, Turn, finite
from delta_cli.errors import UserError

START_SECONDS = 60.0  # for the user's file to load
# Runs instead of the main module of whoever started it: a script without a main guard is not run again.
START = """
import pickle, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
sys.path[:] = pickle.loads(link.recv(size, socket.MSG_WAITALL))
from delta_cli.environments.child import main
main(link)
"""


class EnvironmentProcesses:
    """A process that has loaded the user's code; copies of it run the episodes.

    ``tools`` are the schemas of the tools that the code has. Raises UserError if the code does not load. With
    ``tells_errors`` the model reads what a tool or ``step`` raised; otherwise the episode fails.
    """

    def __init__(self, kind: str, file: str | None, tools: tuple[str, ...], seconds: float, tells_errors: bool) -> None:
        self.seconds, self.tells_errors = seconds, tells_errors
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        try:
            path = pickle.dumps(sys.path)
            self._link.sendall(len(path).to_bytes(8, "big") + path)
            self._link.settimeout(START_SECONDS)
            send(self._link, {"kind": kind, "file": file, "tools": tools})
            found = receive(self._link)
        except (OSError, EOFError, ValueError) as error:
            found = {"failure": "timeout" if isinstance(error, TimeoutError) else "its process ended while it loaded"}
        if "failure" in found:
            self.close()
            raise UserError(f"environment: {found['failure']}")
        self.tools: list[ToolSchema] = found["tools"]

    def session(self) -> ProcessSession:
        """A process for one episode."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._link, [b"."], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EpisodeFailure("the process that starts environments has ended") from None
        return ProcessSession(ours, self.seconds, self.tells_errors)

    def close(self) -> None:
        """End the process; those of open episodes end with their sockets."""
        self._link.close()
        self._process.kill()
        self._process.wait()


class ProcessSession:
    """The environment of one episode, in its own process. See ``turn.EpisodeSession``."""

    def __init__(self, link: socket.socket, seconds: float, tells_errors: bool) -> None:
        self._link, self._seconds, self._tells_errors = link, seconds, tells_errors
        self._process = 0

    def reset(self, row: Row) -> str | None:
        text = self._ask({"do": "reset", "row": dict(row)}).get("text")
        return text if text is None else _text(text)

    def step(self, text: str) -> Turn:
        """What ``step`` raised is the answer if the recipe says so."""
        try:
            found = self._ask({"do": "step", "text": text}, tells=True)
        except ToolError as error:
            return Turn(str(error))
        return Turn(_text(found.get("text")), found.get("done") is True, finite(found.get("reward")))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return _text(self._ask({"do": "call", "name": name, "arguments": dict(arguments)}, tells=True).get("text"))

    def reward(self) -> float | None:
        value = self._ask({"do": "reward"}).get("reward")
        return None if value is None else finite(value)

    def close(self) -> None:
        """Kill the process, and those that it has started."""
        if self._process:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process, signal.SIGKILL)
            self._process = 0
        self._link.close()

    def _ask(self, message: dict[str, Any], tells: bool = False) -> dict[str, Any]:
        try:
            if not self._process:
                self._link.settimeout(START_SECONDS)
                self._process = max(int(receive(self._link)["process"]), 2)
            found = self._exchange(message | {"seconds": self._seconds})
        except TimeoutError:
            self.close()
            raise EpisodeFailure(f"timeout: {message['do']} took longer than {self._seconds:g} s") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            self.close()
            raise EpisodeFailure(f"the environment's process ended in {message['do']}") from None
        if "told" in found and tells:
            raise ToolError(str(found["told"]))
        if "raised" in found or "told" in found:
            reason = str(found.get("raised", found.get("told")))
            if tells and self._tells_errors:
                raise ToolError(f"error: {reason}")
            raise EpisodeFailure(f"{message['do']} raised {reason}")
        return found

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._link.settimeout(self._seconds)
        send(self._link, message)
        found = receive(self._link, time.monotonic() + self._seconds)
        if not isinstance(found, dict):
            raise ValueError("not an answer")
        return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise EpisodeFailure(f"the environment answered with {type(value).__name__}, not text")
    return value
