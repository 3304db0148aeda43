"""The command line in this process, for the tests of malformed files, and a value for every key."""

from __future__ import annotations

import signal
import sys

import pytest

from delta_cli.cli import main
from tests.training.every_key import values as values
from tests.training.malformed import Delta


@pytest.fixture
def delta(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Delta:
    """Run ``delta`` in this process and return its exit code and standard error, with what libraries wrote there."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the test's own handlers

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["delta", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
        except SystemExit as error:
            return int(error.code or 0), capfd.readouterr().err
        return 0, capfd.readouterr().err

    return call
