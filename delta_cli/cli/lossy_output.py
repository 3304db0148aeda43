"""Standard output and error that may go away while a run trains: lost output is no reason to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class LossyStream:
    """A text stream that drops what cannot be written: to a closed pipe, a terminal that is gone, a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop_the_rest()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines, or drop them."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream, or drop what it holds."""
        try:
            self._stream.flush()
        except OSError:
            self._drop_the_rest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop_the_rest(self) -> None:
        """Point the descriptor at /dev/null, so that what the stream still holds can be flushed at exit."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Make both streams lossy inside the block. A stream that was closed from the start becomes /dev/null."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (cast(TextIO, LossyStream(stream or nowhere)) for stream in before)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
