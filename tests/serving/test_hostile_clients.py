"""Whatever a client sends or does, it gets an error of one line or none, and other clients are served."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import Completions, Engine, OnFinished, RolloutRequest
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.serving.http_server import BODY_BYTES, HEAD_BYTES

from .server import CHAT, COMPLETIONS, GENERATE, Client, serving

GOOD: dict[str, Any] = {"token_ids": [20, 21], "sampling_params": {"max_tokens": 4, "seed": 0}}
POST = f"POST {GENERATE} HTTP/1.1\r\nContent-Type: application/json\r\n".encode()


def good(**params: Any) -> dict[str, Any]:
    return GOOD | {"sampling_params": GOOD["sampling_params"] | params}


def chat(content: object, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], **fields}


WRONG: list[tuple[str, object, str | None, str]] = [
    (GENERATE, b"", None, "not a JSON object"),
    (GENERATE, b"\xff\xfe{", None, "not a JSON object"),
    (GENERATE, b"[" * 10_000, None, "not a JSON object"),
    (GENERATE, [1, 2], None, "not a JSON object"),
    (GENERATE, {"sampling_params": {}}, "token_ids", "missing"),
    (GENERATE, GOOD | {"token_ids": []}, "token_ids", "at least 1"),
    (GENERATE, GOOD | {"token_ids": [1, -1]}, "token_ids[1]", "greater than or equal to 0"),
    (GENERATE, GOOD | {"token_ids": [1, True]}, "token_ids[1]", "integer"),
    (GENERATE, GOOD | {"token_ids": [1, 258]}, "token_ids", "258 is not in the model's vocabulary of 258"),
    (GENERATE, GOOD | {"token_ids": [1] * 128}, "token_ids", "128 tokens, and the model reads 128"),
    (GENERATE, GOOD | {"token_ids": "12"}, "token_ids", "array"),
    (GENERATE, GOOD | {"stream": True}, "stream", "supports only False"),
    (GENERATE, GOOD | {"tokens": 1}, "tokens", "does not know this field"),
    (GENERATE, GOOD | {"features": {"mm_hashes": {}}}, "features", "leaving it out"),
    (GENERATE, good(max_tokens=65), "sampling_params.max_tokens", "limit of 64"),
    (GENERATE, good(max_tokens=0), "sampling_params.max_tokens", "greater than or equal to 1"),
    (GENERATE, good() | {"token_ids": [1] * 125}, "sampling_params.max_tokens", "3 tokens that a prompt of 125 leaves"),
    (GENERATE, good(temperature=-1), "sampling_params.temperature", "-1"),
    (GENERATE, good(temperature=1e-9), "sampling_params.temperature", "at least 0.01"),
    (GENERATE, good(temperature="hot"), "sampling_params.temperature", "'hot'"),
    (GENERATE, b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}', "sampling_params.temperature", "finite"),
    (GENERATE, good(top_p=0), "sampling_params.top_p", "greater than 0"),
    (GENERATE, good(n=10**9), "sampling_params.n", "less than or equal to 128"),
    (GENERATE, good(n=2, temperature=0), "sampling_params.n", "same response"),
    (GENERATE, good(seed=2**64), "sampling_params.seed", "less than"),
    (GENERATE, good(stop=""), "sampling_params.stop", "1 to 256"),
    (GENERATE, good(stop=["x"] * 17), "sampling_params.stop", "at most 16"),
    (GENERATE, good(logprobs=5), "sampling_params.logprobs", "less than or equal to 1"),
    (GENERATE, good(repetition_penalty=1.1), "sampling_params.repetition_penalty", "supports only 1, not 1.1"),
    (GENERATE, good(min_tokens=3), "sampling_params.min_tokens", "supports only 0"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": []}, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": [[1], [2**70]]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": "1+" * 200}, "prompt", "the model reads 128"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "supports only False"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "supports only 1"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, chat("a", role="god"), "messages[0].role", "'god'"),
    (CHAT, chat([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content", ""),
    (CHAT, chat("a", tools=[{"type": "function"}]), "tools", "supports only []"),
    (CHAT, chat("a", max_tokens=3, max_completion_tokens=4), None, "max_tokens and max_completion_tokens differ"),
    (CHAT, chat("a", response_format={"type": "json_object"}), "response_format", "supports only"),
]


@pytest.mark.parametrize(("path", "body", "field", "why"), WRONG, ids=range(len(WRONG)))
def test_wrong_input_is_an_error_that_names_the_field(
    client: Client, path: str, body: object, field: str | None, why: str
) -> None:
    error = client.refused(path, body)
    assert (error["param"] or "").startswith(field or "")
    assert why in error["message"]
    assert len(error["message"]) < 400


def test_refusals_that_have_a_status_of_their_own(client: Client) -> None:
    assert "no model 'x' here, only 'tiny'" in client.refused(GENERATE, GOOD | {"model": "x"}, 404)["message"]
    assert "/v1/models" in client.refused("/v2", {}, 404)["message"]
    for path, method, right in ((GENERATE, "GET", "POST"), ("/health", "POST", "GET"), (CHAT, "DELETE", "POST")):
        status, answer = client.ask(path, {}, method=method)
        assert (status, f"takes {right}, not {method}" in answer["error"]["message"]) == (405, True)
    status, _ = client.ask(GENERATE, GOOD, headers={"Content-Type": "text/plain"})
    assert status == 415


RAW = [
    (b"\x00\x01\x02\r\n\r\n", 400),
    (b"GET /health\r\n\r\n", 400),
    (b"GET health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", 400),
    (b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nA: " + b"x" * HEAD_BYTES * 4, 431),
    (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + b"Content-Length: 1e3\r\n\r\n", 400),
    (POST + "Content-Length: ٣\r\n\r\n".encode(), 400),
    (POST + f"Content-Length: {BODY_BYTES + 1}\r\n\r\n".encode(), 413),
    (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
]


@pytest.mark.parametrize(("sent", "status"), RAW, ids=range(len(RAW)))
def test_what_is_not_a_request_is_refused(client: Client, sent: bytes, status: int) -> None:
    head, _, body = client.raw(sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"]


def test_a_client_that_waits_for_continue_gets_it(client: Client) -> None:
    body = json.dumps(GOOD).encode()
    with client.connect() as connection:
        connection.sendall(POST + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_slow_and_broken_connections_hold_nobody_up(engine: Engine, tokenizer: Tokenizer) -> None:
    with serving(engine, tokenizer, engine.vocabulary, read_seconds=0.2) as client:
        slow = [client.connect() for _ in range(20)]
        for connection in slow:
            connection.sendall(POST + b"Content-Length: 500\r\n\r\n{")
        for sent in (b"", b"GET /hea", POST, POST + b"Content-Length: 50\r\n\r\nabc"):
            with client.connect() as connection:
                connection.sendall(sent)
        with client.connect() as connection:  # closes with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall(POST + b"Content-Length: 50\r\n\r\nabc")
        assert client.ask(GENERATE, GOOD)[0] == 200
        for connection in slow:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert client.errors == []


class Held:
    """A sampler that counts its rollouts, and holds or fails them."""

    version = 0
    inbox = None

    def __init__(self, engine: Engine, fails: Callable[[RolloutRequest], bool] = lambda request: False) -> None:
        self.engine, self.fails = engine, fails
        self.free = threading.Event()
        self.batches: list[int] = []
        self.abandoned = 0

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        self.batches.append(len(request))
        if self.fails(request):
            raise RuntimeError("the device is on fire\nsecond line")
        try:
            while not self.free.wait(0.01):
                request.interrupt()
        except Exception:
            self.abandoned += 1
            raise
        return self.engine.rollout(request, on_finished)

    def load_weights(self, weights: object) -> None:
        raise NotImplementedError


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def send(client: Client, body: dict[str, Any]) -> socket.socket:
    """Send a request and do not wait for its answer."""
    connection, text = client.connect(), json.dumps(body).encode()
    connection.sendall(POST + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return connection


def test_requests_that_wait_together_are_one_batch_and_a_full_queue_says_so(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    held = Held(engine)
    with serving(held, tokenizer, engine.vocabulary, capacity=12) as client:
        first = send(client, GOOD)
        until(lambda: held.batches)
        waiting = [send(client, good(seed=seed)) for seed in range(7)]
        waiting += [send(client, good(seed=seed, top_k=2, n=2)) for seed in range(2)]
        until(lambda: client.queue.pending == 12)
        assert "12 responses are waiting" in client.refused(GENERATE, GOOD, 503)["message"]
        held.free.set()
        for connection in (first, *waiting):
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert held.batches == [1, 7, 4]
        until(lambda: client.queue.pending == 0)


def test_the_answers_of_clients_that_are_gone_are_not_drawn(engine: Engine, tokenizer: Tokenizer) -> None:
    held = Held(engine)
    with serving(held, tokenizer, engine.vocabulary) as client:
        gone = send(client, GOOD)
        until(lambda: held.batches)
        queued = [send(client, good(seed=seed)) for seed in range(5)]
        until(lambda: client.queue.pending == 6)
        for connection in queued[:4]:
            connection.close()
        until(lambda: client.queue.pending == 2)
        gone.close()
        until(lambda: held.abandoned == 1)  # its only client is gone
        until(lambda: len(held.batches) == 2)
        held.free.set()
        with queued[4] as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert held.batches == [1, 1]
        until(lambda: client.queue.pending == 0)


def test_a_request_that_the_engine_cannot_answer_fails_alone(engine: Engine, tokenizer: Tokenizer) -> None:
    held = Held(engine, lambda request: any(13 in prompt for prompt in request.prompts))
    held.free.set()
    with serving(held, tokenizer, engine.vocabulary) as client:
        asked = [good(seed=seed) | {"token_ids": [20, 13 if seed == 3 else 21]} for seed in range(8)]
        answers = client.ask_all(GENERATE, asked)
        assert [status for status, _ in answers] == [200, 200, 200, 500, 200, 200, 200, 200]
        assert answers[3][1]["error"]["message"] == "the device is on fire"
        assert client.errors == ["the device is on fire"]
        assert client.ask(GENERATE, GOOD)[0] == 200


def test_numbers_that_json_does_not_have_are_an_error(engine: Engine, tokenizer: Tokenizer) -> None:
    class Broken(Held):
        def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
            return Completions(np.array([1]), np.array([0, 1]), np.array([np.nan], np.float32), np.array([True]))

    with serving(Broken(engine), tokenizer, engine.vocabulary) as client:
        client.refused(GENERATE, good(logprobs=1), 500)


def test_closing_answers_what_waits(engine: Engine, tokenizer: Tokenizer) -> None:
    held = Held(engine)
    with serving(held, tokenizer, engine.vocabulary) as client:
        connections = [send(client, good(seed=seed)) for seed in range(3)]
        until(lambda: client.queue.pending == 3)
        client.queue.close()
        for connection in connections:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        assert "stopping" in client.refused(GENERATE, GOOD, 503)["message"]


def test_a_port_that_is_taken_is_one_line(client: Client, engine: Engine, tokenizer: Tokenizer) -> None:
    from delta_cli.serving.http_server import HttpServer

    async def nothing(request: object) -> Any:
        raise AssertionError

    server = HttpServer(nothing, print)
    with (
        pytest.raises(UserError, match=r"cannot listen there .*; choose another --host or --port"),
        server.running("127.0.0.1", client.port),
    ):
        pass
    with pytest.raises(UserError, match="cannot listen there"), server.running("no.such.host.invalid", 0):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_the_command_serves_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "delta_cli", "serve", "tiny-base", "--backend", "fake", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("http://127.0.0.1:")[2].split()[0])
        client = Client(port, None)  # type: ignore[arg-type]  # in another process
        status, answer = client.ask(CHAT, chat("1+1=?", max_tokens=30, temperature=0))
        assert status == 200
        assert answer["choices"][0]["message"]["content"]
        with send(client, good(max_tokens=1000)):
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "stopped\n", "")
