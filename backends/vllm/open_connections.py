"""The sockets of calls that are under way, so that another thread can end them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CallAborted(Exception):
    """A call that was ended from this side."""


class OpenConnections:
    """Sockets that are open now; ``abort`` ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.aborted = False

    @contextmanager
    def hold(self, opened: socket.socket) -> Iterator[None]:
        """Count a socket as open. Raises CallAborted if all have been ended before."""
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
        """End every call. A server stops drawing for a client that has gone."""
        with self._lock:
            self.aborted = True
            for opened in self._open:
                with suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)
