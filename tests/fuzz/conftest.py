"""How much is tried: a few fixed examples in an ordinary run, many new ones with `make fuzz`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

SLOW = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
]

settings.register_profile("ordinary", derandomize=True, max_examples=30, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "fuzz",
    max_examples=300,
    deadline=None,
    suppress_health_check=SLOW,
    print_blob=True,
    phases=(Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
    database=DirectoryBasedExampleDatabase(Path(".hypothesis") / "fuzz"),
)
settings.load_profile("fuzz" if os.environ.get("DELTA_FUZZ") else "ordinary")


@pytest.fixture
def sandbox() -> None:
    from delta_cli.errors import UserError
    from delta_cli.rewards.code.sandbox import find_sandbox

    try:
        find_sandbox()
    except UserError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the tests of code rewards need a sandbox: {error}")
        pytest.skip(f"no sandbox: {error}")
