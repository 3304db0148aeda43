"""What all tests share: the signals of an ordinary terminal, and a tiny model to train."""

from __future__ import annotations

import gc
import os
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main
from hypothesis import HealthCheck, settings

# A shell without job control starts background jobs with Ctrl-C ignored, and nohup ignores the end of the terminal; so
# would every run that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Messages name the program as the shell finds it; here as in an activated environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# Waiting for the disk protects from a power cut, which no test makes. Tests of what is synced replace this function.
os.fsync = lambda fd: None

# The program builds its commands from the signatures of its functions once; here once for all calls.
typer.main.get_command = cache(typer.main.get_command)

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """What is imported by now stays: searching it for garbage takes a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model with 258 tokens, 16 hidden units and one layer."""
    from tests.harness import write_model  # most tests need no run, so they do not wait for its imports

    return write_model(tmp_path_factory.mktemp("model"))
