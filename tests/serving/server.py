"""A server on the numpy backend, and a client that sends it anything."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from backends.interface import Sampler
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.serving.endpoint_model import EndpointModel
from delta_cli.serving.endpoints import Endpoints
from delta_cli.serving.http_server import READ_SECONDS, HttpServer
from delta_cli.serving.request_queue import RequestQueue

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@dataclass
class Client:
    """Sends requests to a server and keeps what it reported."""

    port: int
    queue: RequestQueue
    errors: list[str] = field(default_factory=list)

    def ask(self, path: str, body: object = None, method: str | None = None, headers: Any = JSON) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, sent, headers)
        with connection.getresponse() as response:
            found = response.read()
        connection.close()
        return response.status, json.loads(found) if response.headers["Content-Type"] == JSON["Content-Type"] else found

    def ask_all(self, path: str, bodies: Sequence[object]) -> list[tuple[int, Any]]:
        """The answers to requests that are sent at the same time."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.ask(path, body), bodies))

    def refused(self, path: str, body: object, status: int = 400) -> dict[str, Any]:
        """The error of an answer that has this status."""
        found, answer = self.ask(path, body)
        assert found == status, answer
        error: dict[str, Any] = answer["error"]
        assert "\n" not in error["message"]
        return error

    def connect(self) -> socket.socket:
        """An open connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def raw(self, sent: bytes) -> bytes:
        """What comes back for these bytes, up to the end of the connection."""
        with self.connect() as connection:
            connection.sendall(sent)
            parts = []
            while part := connection.recv(2**16):
                parts.append(part)
            return b"".join(parts)


@contextmanager
def serving(
    sampler: Sampler,
    tokenizer: Tokenizer,
    vocabulary: int,
    *,
    capacity: int = 256,
    read_seconds: float = READ_SECONDS,
    template: str | None = None,
) -> Iterator[Client]:
    """A server with a context of 128 tokens and responses of at most 64."""
    queue, errors = RequestQueue(capacity), list[str]()
    model = EndpointModel("tiny", tokenizer, vocabulary, 128, 64, template)
    server = HttpServer(Endpoints(model, queue).answer, errors.append, read_seconds)
    engine = threading.Thread(target=queue.run, args=(sampler,))
    engine.start()
    try:
        with server.running("127.0.0.1", 0) as port:
            yield Client(port, queue, errors)
            queue.close()
    finally:
        queue.close()
        engine.join()
