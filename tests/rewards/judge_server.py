"""An OpenAI-compatible endpoint on loopback that scores by a rule, and fails in every way that a test asks for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = (
    *("status 500", "status 502", "status 503", "status 429", "status 408"),
    *("garbage", "empty", "half", "not an object", "no choices", "no content", "null content", "number content"),
    *("duplicated body", "no score", "score of words", "score above", "score below", "not a number"),
    *("hang up", "reset", "slow", "trickle", "gone before the body", "wrong length"),
    *("html", "binary", "list of errors", "usage of words", "huge number"),
)
assert len(FAULTS) == 30
SLOW = 2.5  # seconds that slow answers take


def score_of(prompt: str) -> int:
    """What the judge thinks: the number of letters a in the response, at most 10."""
    return min(prompt.rpartition("Response:")[2].count("a"), 10)


@dataclass
class JudgeServer:
    """What was asked, and what still goes wrong."""

    faults: list[str] = field(default_factory=list)  # of the next requests, one each
    always: str = ""  # of all requests
    prompts: list[str] = field(default_factory=list)  # of requests that got a good answer
    keys: set[str] = field(default_factory=set)
    url: str = ""
    most_at_once: int = 0
    pause: float = 0.0  # seconds before each answer

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.present = 0

    def next_fault(self) -> str:
        with self.lock:
            return self.always or (self.faults.pop() if self.faults else "")


def good(content: Any) -> bytes:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return json.dumps({"choices": [{"index": 0, "message": message}], "usage": usage}).encode()


BODIES: dict[str, bytes] = {
    "garbage": b"}{ nonsense",
    "empty": b"",
    "half": good("Score: 3")[:30],
    "not an object": b"[1, 2, 3]",
    "no choices": b'{"choices": []}',
    "no content": b'{"choices": [{"message": {}}]}',
    "null content": good(None),
    "number content": good(7),
    "duplicated body": good("Score: 3") * 2,
    "no score": good("I would rather not say."),
    "score of words": good("Score: seven"),
    "score above": good("Score: 11"),
    "score below": good("Score: 1.2.3"),
    "not a number": good("Score: ..."),
    "html": b"<html><body>502 Bad Gateway</body></html>",
    "binary": bytes(range(256)),
    "list of errors": b'[{"error": "overloaded"}]',
    "usage of words": b'{"choices": [{"message": {"content": "Score: 3"}}], "usage": {"prompt_tokens": "many"}}',
    "huge number": good("Score: 9" + "9" * 400),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        state: JudgeServer = self.server.state
        with suppress(BrokenPipeError, ConnectionResetError):
            self._answer(state)

    def _answer(self, state: JudgeServer) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"]
        with state.lock:
            state.present += 1
            state.most_at_once = max(state.most_at_once, state.present)
        time.sleep(state.pause)
        with state.lock:
            state.present -= 1
        fault = state.next_fault()
        if fault.startswith("status"):
            return self._send(b'{"error": {"message": "injected"}}', int(fault.split()[1]))
        if fault in BODIES:
            return self._send(BODIES[fault])
        if fault:
            return self._break(fault)
        with state.lock:
            state.prompts.append(prompt)
            state.keys.add(self.headers.get("Authorization") or "")
        return self._send(good(f"Thinking.\nscore: 0\nScore: {score_of(prompt)}"))

    def _break(self, fault: str) -> None:
        """Failures of the connection."""
        if fault == "slow":
            time.sleep(SLOW)
        elif fault == "trickle":
            self._head(200, 10_000)
            for _ in range(10):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(SLOW / 10)
        elif fault == "gone before the body":
            self._head(200, 1000)
        elif fault == "wrong length":
            self._head(200, 1000)
            self.wfile.write(good("Score: 3"))
        elif fault == "reset":
            self.wfile.write(b"HTTP/1.1 ")
        self.close_connection = True

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, body: bytes, status: int = 200) -> None:
        self._head(status, len(body))
        self.wfile.write(body)


class JudgeHttp(ThreadingHTTPServer):
    request_queue_size = 128  # more than the requests of any judge at a time, so that none is refused


@contextmanager
def judging() -> Iterator[JudgeServer]:
    """A server that judges while the block runs."""
    http = JudgeHttp(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state = JudgeServer()
    http.state = state  # type: ignore[attr-defined]
    state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
