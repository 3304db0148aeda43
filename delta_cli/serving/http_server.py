"""HTTP in a thread of its own: one request per connection, with limits on size, time and number.

The server parses the few parts of HTTP/1.1 that JSON clients use. Whatever else arrives gets an error and is closed.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from delta_cli.errors import UserError, first_line
from delta_cli.serving.requests import RefusedRequest
from delta_cli.serving.response_forms import error_body

HEAD_BYTES = 32 * 2**10  # of the request line and the headers
BODY_BYTES = 8 * 2**20
CONNECTIONS = 1024  # at a time; fewer if the limit on open files is low
OTHER_FILES = 128  # open files that are not connections
READ_SECONDS = 30.0  # for a request to arrive whole
WRITE_SECONDS = 60.0  # for a client to take its answer
LINGER_SECONDS = 0.5  # for a client to close the connection after its answer
CLOSE_SECONDS = 1.0  # for answers under way when the server stops
REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True)
class HttpRequest:
    """A request that has arrived whole."""

    method: str
    path: str  # without the query
    headers: dict[str, str]  # names in lower case
    body: bytes = b""


@dataclass(frozen=True)
class HttpAnswer:
    """A JSON object, or with ``stream`` server-sent events."""

    body: dict[str, Any]
    status: int = 200
    stream: tuple[dict[str, Any], ...] | None = None

    def encoded(self) -> bytes:
        """The whole answer. Raises ValueError for a number that JSON does not have."""
        if self.stream is None:
            kind, payload = "application/json", _json(self.body)
        else:
            events = [*map(_json, self.stream), b"[DONE]"]
            kind, payload = "text/event-stream", b"".join(b"data: " + event + b"\n\n" for event in events)
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + payload


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode(errors="replace")


Answering = Callable[[HttpRequest], Awaitable[HttpAnswer]]


class HttpServer:
    """Hands requests to ``answer``, which may raise RefusedRequest. A client that is gone cancels its call."""

    def __init__(self, answer: Answering, on_error: Callable[[str], None], read_seconds: float = READ_SECONDS) -> None:
        self._answer, self._on_error, self._read_seconds = answer, on_error, read_seconds
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = soft == resource.RLIM_INFINITY
        self._most = CONNECTIONS if unlimited else max(1, min(CONNECTIONS, soft - OTHER_FILES))
        self._connections: set[asyncio.Task[None]] = set()

    @contextmanager
    def running(self, host: str, port: int) -> Iterator[int]:
        """Serve in a thread; yields the port, which is a free one for port 0. Raises UserError if it cannot listen."""
        started: Future[tuple[int, Callable[[], object]]] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(host, port, started)), name="delta-http")
        thread.start()
        bound, stop = started.result()
        try:
            yield bound
        finally:
            stop()
            thread.join()

    async def _serve(self, host: str, port: int, started: Future[tuple[int, Callable[[], object]]]) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        try:
            listener = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES, backlog=self._most)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            started.set_exception(
                UserError(f"{host}:{port}: cannot listen there ({reason}); choose another --host or --port")
            )
            return
        started.set_result((listener.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(stopped.set)))
        await stopped.wait()
        listener.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_SECONDS)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            # The client is gone, or the server has stopped and waits no longer.
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._exchange(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request and write its answer, unless the client closes the connection before that."""
        received = await self._received(reader, writer)
        gone = asyncio.ensure_future(_until_closed(reader))
        work = asyncio.ensure_future(self._answered(received))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            writer.write(work.result())
            await asyncio.wait_for(writer.drain(), WRITE_SECONDS)
            writer.write_eof()
            await asyncio.wait({gone}, timeout=LINGER_SECONDS)  # closing at once could cut the answer off
        except TimeoutError:
            writer.transport.abort()
        finally:
            work.cancel()
            gone.cancel()

    async def _received(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpRequest | RefusedRequest:
        """The request, or why it is refused."""
        if len(self._connections) > self._most:
            return RefusedRequest(f"{self._most} connections are open; try again later", status=503)
        try:
            return await asyncio.wait_for(_read(reader, writer), self._read_seconds)
        except TimeoutError:
            return RefusedRequest(f"the request did not arrive within {self._read_seconds:g} s", status=408)
        except RefusedRequest as refusal:
            return refusal

    async def _answered(self, received: HttpRequest | RefusedRequest) -> bytes:
        try:
            if isinstance(received, RefusedRequest):
                raise received
            return (await self._answer(received)).encoded()
        except RefusedRequest as refusal:
            kind = "invalid_request_error" if refusal.status < 500 else "server_error"
            return HttpAnswer(error_body(str(refusal), refusal.field, kind), refusal.status).encoded()
        except Exception as error:  # a fault of this server or its engine: the client and the log get one line
            line = first_line(error)
            self._on_error(line)
            return HttpAnswer(error_body(line, kind="server_error"), 500).encoded()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Return once the client has closed the connection; what it sends meanwhile is thrown away."""
    with suppress(ConnectionError):
        while await reader.read(HEAD_BYTES):
            pass


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest:
    """The next request. Raises RefusedRequest if it is not one, or larger than the limits."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise RefusedRequest(f"the headers are longer than {HEAD_BYTES} bytes", status=431) from None
    first, *lines = head[:-4].split(b"\r\n")
    line, fields = REQUEST_LINE.fullmatch(first), [HEADER.fullmatch(each) for each in lines]
    if line is None or not all(fields):
        raise RefusedRequest("this is not an HTTP/1.1 request")
    headers = {each[1].decode().lower(): each[2].decode("latin-1") for each in fields if each is not None}
    if "transfer-encoding" in headers:
        raise RefusedRequest("send the body whole, with a Content-Length", status=411)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        raise RefusedRequest("Content-Length is not a number")
    if len(length) > 12 or int(length) > BODY_BYTES:
        raise RefusedRequest(f"the body is longer than {BODY_BYTES} bytes", status=413)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(length))
    return HttpRequest(line[1].decode(), line[2].decode().partition("?")[0], headers, body)
