"""What all tests share: the signals of an ordinary terminal."""

from __future__ import annotations

import signal

# A shell without job control starts background jobs with Ctrl-C ignored, and nohup ignores the end of the terminal; so
# would every run that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
