"""Run a ``delta`` command line in this process: a new process needs seconds to import a framework."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from delta_cli import cli


class Said(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


def delta(*arguments: object, merged: bool = False) -> Said:
    """Run ``delta`` with these arguments and take away its signal handlers; ``merged`` writes errors to ``out`` too."""
    out = io.StringIO()
    err = out if merged else io.StringIO()
    before, argv = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}, sys.argv
    code: Any = 0
    try:
        sys.argv = ["delta", *map(str, arguments)]
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = argv
        for each, handler in before.items():
            signal.signal(each, handler)
    return Said(int(code), out.getvalue(), err.getvalue())
