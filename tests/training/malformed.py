"""What the tests of malformed files share: the command line in this process, and ways to damage a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

Delta = Callable[..., tuple[int, str]]

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_refused(result: tuple[int, str], *words: str) -> None:
    code, said = result
    assert code == 2, said
    assert said.startswith("delta: "), said
    assert said.endswith("\n"), said
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    for word in words:
        assert word in said


class Evil:
    """An object whose pickle runs a command when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    return change


def put(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])
