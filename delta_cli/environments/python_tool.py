"""The tool ``python``: runs a model's code in the sandbox, in one process for each episode, so that variables stay."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from delta_cli.environments.schema import ToolSchema
from delta_cli.environments.turn import ToolError
from delta_cli.rewards.code.sandbox import ProcessLimits, SandboxRun, find_sandbox

MOST_BYTES = 2**20  # of an answer
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints. Variables stay from call to call.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code; print what you want to see"}},
            "required": ["code"],
        },
    },
}
# What runs in the sandbox. It answers with what the code printed, and the value of a last line that is an expression.
PROGRAM = """
import ast, contextlib, io, traceback
_variables = {"__name__": "__main__"}
def _run(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<python>", "exec"), _variables)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<python>", "eval"), _variables)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            print("".join(traceback.format_exception_only(error)).strip())
    return out.getvalue()[:200000]
"""


class PythonTool:
    """Python in the sandbox for one episode; the process starts with the first call and again after a time-out."""

    def __init__(self, seconds: float, allow_unsandboxed: bool = False) -> None:
        self._seconds = seconds
        self._sandbox = find_sandbox(allow_unsandboxed)
        self._run: SandboxRun | None = None
        self._link: socket.socket | None = None
        self._function: Any = None

    def call(self, code: Any) -> str:
        """What the code prints. Raises ToolError if it takes too long or its process ends."""
        if not isinstance(code, str):
            raise ToolError("python: code is not text")
        try:
            if self._link is None:
                self._start()
            deadline = time.monotonic() + self._seconds
            asked = {"do": "call", "object": self._function, "arguments": [code], "keywords": {"dict": []}}
            self._send(asked)
            found = self._receive(deadline).get("value")
        except TimeoutError:
            self.close()
            raise ToolError(f"python: longer than {self._seconds:g} s; all variables are lost") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
            self.close()
            raise ToolError("python: the process ended; all variables are lost") from None
        return found if isinstance(found, str) else ""

    def close(self) -> None:
        """End the process."""
        if self._link is not None:
            self._link.close()
        if self._run is not None:
            self._run.__exit__(None, None, None)
        self._link = self._run = None

    def _start(self) -> None:
        self._run = SandboxRun(self._sandbox).__enter__()
        self._link, theirs = socket.socketpair()
        with theirs:
            job = {"mode": "serve", "code": PROGRAM, "link": theirs.fileno()}
            self._run.start(job, ProcessLimits(int(60 + 4 * self._seconds)), fds=(theirs.fileno(),))
        names = self._receive(time.monotonic() + 30)["names"]
        self._function = names["_run"]["object"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._link is not None
        self._link.settimeout(self._seconds)
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next line of JSON; the sandbox's side is hostile, so it is bounded and checked."""
        assert self._link is not None
        line = b""
        while not line.endswith(b"\n"):
            self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._link.recv(65536)
            if not part or len(line) > MOST_BYTES:
                raise EOFError
            line += part
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
