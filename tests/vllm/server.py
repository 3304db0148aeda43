"""A server that speaks vLLM's calls on the numpy backend, and fails in every way that a test asks for.

Run as a module it stands in for ``python -m vllm.entrypoints.openai.api_server``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from backends import registry
from backends.interface import Engine, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from delta_cli.data.tokenizer import Tokenizer

COMPLETIONS, RELOAD, PAUSE, RESUME = "/v1/completions", "/collective_rpc", "/pause", "/resume"
SET_LABEL, LABEL, METRICS = "/update_weight_version", "/weight_info", "/metrics"
TRANSFER = (
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
VERSION = "0.32.0"
STARTED = "default"  # vLLM 0.32's label for the weights it was started with (v1/engine/core.py)

JsonBody = dict[str, Any]


@dataclass
class Fault:
    """What goes wrong with calls of a route: the first ``times`` after ``after`` good ones."""

    route: str
    kind: str
    after: int = 0
    times: int = 1

    def strikes(self, route: str) -> bool:
        """Whether this call is one of them."""
        if route != self.route or self.times == 0:
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


@dataclass
class TestServer:
    """The state behind the routes."""

    __test__ = False  # no test class, whatever pytest thinks of its name

    model: str  # the folder it was started on
    faults: list[Fault] = field(default_factory=list)
    version: str = VERSION
    tempered: bool = True  # log-probabilities at the sampling temperature
    seen: list[str] = field(default_factory=list)  # routes, as they were called
    calls: list[tuple[str, str, JsonBody]] = field(default_factory=list)  # authorization, route and body of each

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.released = threading.Event()  # lets go of calls that hang
        self.paused = self.asleep = False
        self.label = STARTED
        self.made = 0.0  # tokens
        self.http: ThreadingHTTPServer | None = None
        self.before_token: Callable[[int], None] = lambda drawn: None  # of a response of so many tokens
        self.labels_drawn: set[str] = set()
        self.receiver: Any = None  # of weights that are sent to it
        self.engine = self._load(self.model)

    def _load(self, folder: str) -> Engine:
        return registry.create("fake", BackendSettings.of(folder))

    def restart(self) -> None:
        """As a supervisor does: on the weights it was started with."""
        self.engine, self.label = self._load(self.model), STARTED

    # --------------------------------------------------------------------------------- routes

    def answer(self, route: str, query: str, body: JsonBody) -> tuple[int, Any]:
        """Status and body."""
        if body.get("return_weight_versions"):
            from tests.vllm.in_flight import complete_by_token

            return 200, {"choices": [complete_by_token(self, body)]}
        with self.lock:
            self.seen.append(route + (f"?{query}" if "keep" in query or "running" in query else ""))
            if route in ("/health", PAUSE, RESUME, "/sleep", "/wake_up", "/reset_prefix_cache"):
                self.paused = {PAUSE: True, RESUME: False}.get(route, self.paused)
                self.asleep = {"/sleep": True, "/wake_up": False}.get(route, self.asleep)
                return 200, {"success": True}
            if route == "/version":
                return 200, {"version": self.version}
            if route == "/v1/models":
                return 200, {"data": [{"id": "served"}]}
            if route == LABEL:
                return 200, {"weight_version": self.label}
            if route == SET_LABEL:
                self.label = body["new_version"]
                return 200, {"success": True, "new_version": self.label}
            if route == METRICS:
                return 200, f'# HELP\nvllm:generation_tokens_total{{engine="0"}} {self.made}\n'.encode()
            if route == RELOAD:
                assert self.paused, "weights change while responses are drawn"
                assert body["method"] == "reload_weights"
                self.engine = self._load(body["kwargs"]["weights_path"])
                return 200, {"results": [None]}
            if route in TRANSFER:
                return 200, self._transfer(route, body)
            if route == COMPLETIONS:
                assert not self.paused
                assert not self.asleep
                return 200, {"choices": [self._complete(body)]}
            return 404, {"error": {"message": "Not Found"}}

    def _transfer(self, route: str, body: JsonBody) -> JsonBody:
        from tests.vllm.transfer import Receiver  # needs torch

        if route == "/get_world_size":
            return {"world_size": 1}
        assert self.paused, "weights change while responses are drawn"
        if route == "/init_weight_transfer_engine":
            copy = shutil.copytree(self.model, Path(tempfile.mkdtemp()) / "received")
            (copy / "config.json").write_text(
                json.dumps(json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": False})
            )
            self.receiver = Receiver(copy)
            self.receiver.join(body["init_info"])
        elif route == "/start_weight_update":
            self.receiver.start()
        elif route == "/update_weights":
            self.receiver.update(body["update_info"])
        else:
            self.engine = self._load(str(self.receiver.finish()))
        return {"message": "done"}

    def _complete(self, body: JsonBody) -> JsonBody:
        prompt = np.array(body["prompt"], np.int64)
        if body.get("prompt_logprobs") is not None:
            logprobs = self._score(prompt, 1.0)
            table = [{str(i): {"logprob": float(p)}} for i, p in zip(prompt[1:], logprobs, strict=True)]
            return {"prompt_logprobs": [None, *table], "token_ids": [0]}
        if body.get("stop"):
            assert body["skip_special_tokens"] is False, "strings in special tokens would not be seen"
        sampling = Sampling(
            body["max_tokens"],
            tuple(body.get("stop_token_ids", ())),
            body["temperature"],
            body.get("top_p", 1.0),
            top_k=body.get("top_k", 0),
            min_p=body.get("min_p", 0.0),
            seed=body.get("seed", 0),
            stop=Tokenizer.load(self.model).stop_text(tuple(body.get("stop", ()))),
        )
        drawn = self.engine.rollout(RolloutRequest((prompt,), sampling))
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        self.made += len(tokens)
        if not self.tempered:
            both = np.concatenate([prompt, drawn.tokens])
            logprobs = self._score(both, 1.0)[-len(tokens) :].tolist()
        likeliest = self.engine.rollout(RolloutRequest((prompt,), Sampling(1, (), 0.0)))
        scored = Sequences((prompt,), likeliest.tokens, likeliest.starts, body["temperature"] if self.tempered else 1.0)
        best = {"best": float(self.engine.score(scored).logprobs[0])}
        return {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": [best]},
            "finish_reason": "length" if drawn.truncated[0] else "stop",
        }

    def _score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        sequences = Sequences((ids[:1],), ids[1:], np.array([0, len(ids) - 1]), temperature)
        return np.asarray(self.engine.score(sequences).logprobs)


def _set(*path: Any, to: Any) -> Callable[[JsonBody], None]:
    """Put something in the place of a field of a choice; a callable is given what was there."""

    def spoil(choice: JsonBody) -> None:
        holder: Any = choice
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = to(holder[path[-1]]) if callable(to) else to

    return spoil


def _both(change: Callable[[list[Any]], list[Any]]) -> Callable[[JsonBody], None]:
    """Change tokens and log-probabilities alike."""

    def spoil(choice: JsonBody) -> None:
        choice["token_ids"] = change(choice["token_ids"])
        choice["logprobs"]["token_logprobs"] = change(choice["logprobs"]["token_logprobs"])

    return spoil


LOGPROBS, FIRST = ("logprobs", "token_logprobs"), ("logprobs", "token_logprobs", 0)
SPOILT: dict[str, Callable[[JsonBody], None]] = {  # what can be wrong with a choice
    "fewer tokens": _both(lambda values: values[:-1]),
    "no tokens": _both(lambda values: []),
    "more tokens": _both(lambda values: values * 40),
    "fewer logprobs": _set(*LOGPROBS, to=lambda values: values[:-1]),
    "no ids": lambda choice: choice.__delitem__("token_ids"),
    "no logprobs": _set("logprobs", to=None),
    "foreign id": _set("token_ids", 0, to=10**6),
    "huge id": _set("token_ids", 0, to=2**70),
    "negative id": _set("token_ids", 0, to=-1),
    "id in a list": _set("token_ids", 0, to=[7]),
    "id as text": _set("token_ids", 0, to="7"),
    "ids as text": _set("token_ids", to="7 8"),
    "positive logprob": _set(*FIRST, to=0.5),
    "not a number": _set(*FIRST, to=float("nan")),
    "impossible token": _set(*FIRST, to=-9999.0),
    "endless logprob": _set(*FIRST, to=-(10**400)),
    "logprob as text": _set(*FIRST, to="-1"),
    "logprob in a list": _set(*FIRST, to=[-1.0]),
    "no top logprobs": _set("logprobs", "top_logprobs", to=[]),
}


def spoilt(kind: str, answer: JsonBody) -> JsonBody:
    """An answer with something wrong in it."""
    choice = answer["choices"][0]
    if kind == "strange prompt logprobs" and "prompt_logprobs" in choice:
        choice["prompt_logprobs"][1] = {"seven": {"logprob": -1.0}}
    if not choice.get("logprobs"):  # the answer to a probe
        return answer
    if kind == "no choice":
        answer["choices"] = []
    elif kind == "two choices":
        answer["choices"] = [choice, choice]
    elif kind in SPOILT:
        SPOILT[kind](choice)
    return answer


def handler_of(server: TestServer) -> type[BaseHTTPRequestHandler]:
    """What answers the requests to a server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            parts = urlsplit(self.path)
            with server.lock:
                kind = next((fault.kind for fault in server.faults if fault.strikes(parts.path)), None)
            with suppress(BrokenPipeError, ConnectionResetError):
                self._answer(kind, parts.path, parts.query, json.loads(raw or b"{}"))

        def _answer(self, kind: str | None, route: str, query: str, body: JsonBody) -> None:
            if kind == "reset":
                self.connection.close()
                return
            if kind == "die":
                print("torch.OutOfMemoryError: out of memory", flush=True)
                os._exit(1)
            if kind == "slow":  # a token now and then
                for _ in range(15):
                    time.sleep(0.05)
                    server.made += 1
            if kind == "hang":
                server.released.wait()
                return
            if kind == "restart":  # gone for a moment, and back with the weights it was started on
                server.restart()
                self.connection.close()
                return
            if kind == "quiet restart":
                server.restart()
            if kind is not None and kind.startswith("status"):
                self._send(int(kind.split()[1]), {"error": {"message": " ".join(kind.split()[2:]) or "failed"}})
                return
            if kind == "ignores":  # says that all went well
                self._send(200, {"results": [None]})
                return
            server.calls.append((self.headers.get("Authorization", ""), route, body))
            status, found = server.answer(route, query, body)
            if kind == "not json":
                self._send(status, b"<html>busy</html>")
            elif kind == "deep json":
                self._send(status, b"[" * 10**5)
            elif kind == "a list":
                self._send(status, b"[]")
            elif kind in ("cut", "drip"):
                self._send(status, found, kind)
            elif kind is not None and status == 200:
                self._send(status, spoilt(kind, found))
            else:
                self._send(status, found)

        def _send(self, status: int, body: Any, kind: str = "") -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if kind == "cut":
                data = data[: len(data) // 2]
            if kind == "drip":
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    if server.released.wait(0.1):
                        return
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(model: Path, port: int = 0, **state: Any) -> Iterator[tuple[TestServer, str]]:
    """A server on a model folder, and its URL."""
    server = TestServer(str(model), **state)
    with listening(server, port) as url:
        yield server, url


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def listening(server: TestServer, port: int = 0) -> Iterator[str]:
    """The server's URL, while it listens."""
    http = _Http(("127.0.0.1", port), handler_of(server))
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        server.released.set()
        http.shutdown()
        http.server_close()
        thread.join()


def install(folder: Path) -> Path:
    """A package named vllm that is this server and its weight transfer, for PYTHONPATH."""
    find = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    modules = {"entrypoints/openai/api_server": find + "from tests.vllm.server import main\nmain(sys.argv[1:])\n"}
    names = (
        "plugins",
        *(f"distributed/weight_transfer/{name}" for name in ("base", "clients", "factory", "nccl_engine")),
    )
    modules |= dict.fromkeys(names, find + "from tests.vllm.transfer import *\n")
    for name, text in modules.items():
        module = folder / "vllm" / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    info = folder / f"vllm-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    return folder


def main(arguments: list[str]) -> None:
    """Serve until killed. ``--die-once FILE``: without that file, write it and end at the 13th completion."""
    named = dict(pairwise(arguments))
    # What it was started on stays as it is when newer weights are published into the folder.
    copy = shutil.copytree(named["--model"], Path(tempfile.mkdtemp()) / "model")
    server = TestServer(str(copy))
    marker = Path(named.get("--die-once", copy))
    if not marker.exists():
        marker.touch()
        server.faults.append(Fault(COMPLETIONS, "die", after=12))
    with listening(server, int(named["--port"])):
        threading.Event().wait()
