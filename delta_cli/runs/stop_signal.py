"""A request to stop a run, by Ctrl-C or another signal."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from backends.launch import LAUNCHER
from backends.process import rank_and_size

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopSignal:
    """Ctrl-C, SIGTERM or SIGHUP stops the run at the next safe point. A second signal ends it at once.

    As a context manager it puts the handlers back that were there before.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handle the signals from now on. In any thread but the main one Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for each in STOPS:
            if signal.getsignal(each) != signal.SIG_IGN:  # under nohup the run outlives its terminal
                self._before[each] = signal.signal(each, self._hear)

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def asked(self) -> bool:
        """Whether a signal came, or the process that started this rank is gone."""
        return self.number != 0 or self._orphaned()

    def _orphaned(self) -> bool:
        launcher = os.environ.get(LAUNCHER)
        return launcher is not None and os.getppid() != int(launcher)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)
        if rank_and_size()[0]:
            return  # rank 0 says it
        # Not print: the signal may have interrupted a print, which cannot be entered twice.
        with suppress(OSError):
            os.write(2, b"stopping at the next safe point; once more to stop at once\n")
