"""The sockets of calls that are under way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CallAborted(Exception):
    """A call that was given up from this side."""


class OpenConnections:
    """The sockets that are open now, so that all can be ended at once from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.aborted = False

    @contextmanager
    def hold(self, opened: socket.socket) -> Iterator[None]:
        """Count a socket among the open ones. Raises Aborted where all have been ended."""
        with self._lock:
            if self.aborted:
                raise CallAborted
            self._open.add(opened)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(opened)

    def abort(self) -> None:
        """End every call: the server stops drawing for a client that went away."""
        with self._lock:
            self.aborted = True
            for opened in self._open:
                with suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)
