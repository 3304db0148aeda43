"""Tests that run programs need the sandbox: without it they are skipped on a desk and fail in CI."""

from __future__ import annotations

import os

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards.code.sandbox import find_sandbox


@pytest.fixture
def sandbox() -> None:
    try:
        find_sandbox()
    except UserError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the tests of code rewards need a sandbox: {error}")
        pytest.skip(f"no sandbox, bubblewrap is not installed or does not work: {error}")
