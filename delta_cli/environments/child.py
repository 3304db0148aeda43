"""The process that loads the user's code once, and the copies of it that each run the environment of one episode.

A request is a length and JSON, and so is its answer. Whatever the code prints goes nowhere.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from delta_cli.environments.turn import ToolError
from delta_cli.environments.user_code import UserEnvironment, failure_of, load, schemas
from delta_cli.errors import UserError, typed_line

MOST_CHARACTERS = 200_000  # of a text that leaves the process; the rest would be cut anyway
MOST_BYTES = 2**25  # of a message
ORPHAN_SECONDS = 2  # how much longer than its limit a call runs if nobody is left to kill it


def main(link: socket.socket) -> None:
    """Load the code that the first message names, then start a copy of this process for each socket that arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    asked = receive(link)
    try:
        environment = load(asked["file"]) if asked["file"] else None
        functions = [load(name) for name in asked["tools"]]
        found = {"tools": schemas(environment, functions) if asked["kind"] == "tools" else []}
        if asked["kind"] == "text" and not callable(getattr(environment, "step", None)):
            raise UserError(f"{asked['file']} has no method step(text)")
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        send(link, {"failure": failure_of(error)})
        return
    send(link, found)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    while True:
        byte, numbers, _, _ = socket.recv_fds(link, 1, 1)
        if not byte:
            return
        if os.fork() == 0:
            link.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                serve(socket.socket(fileno=numbers[0]), lambda: UserEnvironment(environment, functions))
            finally:
                os._exit(0)
        os.close(numbers[0])


def serve(link: socket.socket, make: Any) -> None:
    """Answer requests about one episode until the other side closes."""
    send(link, {"process": os.getpid()})
    episode: UserEnvironment | None = None
    while True:
        try:
            asked = receive(link)
        except EOFError:
            return
        signal.alarm(math.ceil(asked["seconds"]) + ORPHAN_SECONDS)
        try:
            episode = episode or make()
            found = answer(episode, asked)
        except ToolError as error:
            found = {"told": str(error)}
        except BaseException as error:
            found = {"raised": typed_line(error)}
        signal.alarm(0)
        send(link, found)


def answer(episode: UserEnvironment, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a request asks for."""
    if asked["do"] == "reset":
        begun = episode.reset(asked["row"])
        return {"text": None if begun is None else begun[:MOST_CHARACTERS]}
    if asked["do"] == "step":
        turn = episode.step(asked["text"])
        return {"text": turn.text[:MOST_CHARACTERS], "done": turn.done, "reward": turn.reward}
    if asked["do"] == "call":
        return {"text": episode.call(asked["name"], asked["arguments"])[:MOST_CHARACTERS]}
    return {"reward": episode.reward()}


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    link.sendall(len(body).to_bytes(8, "big") + body)


def receive(link: socket.socket, deadline: float | None = None) -> Any:
    """The next message. Raises EOFError if the other side is gone, ValueError for nonsense.

    With a ``deadline`` of the monotonic clock also TimeoutError.
    """
    size = int.from_bytes(_read(link, 8, deadline), "big")
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read(link, size, deadline))


def _read(link: socket.socket, size: int, deadline: float | None) -> bytes:
    parts, left = [], size
    while left:
        if deadline is not None:
            link.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = link.recv(min(left, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
