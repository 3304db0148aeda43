"""The part of pytest that tests use, since pytest is not in the sandbox. Shipped to the judge's process with it."""

from __future__ import annotations

import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def pytest_stub(held: Callable[[], None]) -> types.ModuleType:
    """A module with raises, approx, mark.parametrize and fail; ``held`` is called when ``raises`` held."""

    class Raises:
        def __init__(self, kinds: Any, match: str | None = None) -> None:
            self.kinds, self.match, self.value = kinds, match, None

        def __enter__(self) -> Raises:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            if error is None:
                raise AssertionError("nothing was raised")
            if not isinstance(error, self.kinds):
                return False
            if self.match is not None and not __import__("re").search(self.match, str(error)):
                raise AssertionError(f"{error} does not match {self.match}")
            self.value = error
            held()
            return True

    class Approx:
        def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
            self.expected, self.rel, self.abs = expected, rel, abs

        def __eq__(self, other: Any) -> bool:
            return _near(other, self.expected, self.rel, self.abs)

        __hash__ = None  # type: ignore[assignment]

    class Mark:
        def parametrize(self, names: Any, rows: Any, **_: Any) -> Any:
            keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

            def mark(function: Any) -> Any:
                values = [row if len(keys) > 1 else (row,) for row in rows]
                new = [dict(zip(keys, row, strict=True)) for row in values]
                function._rows = [{**old, **row} for old in getattr(function, "_rows", [{}]) for row in new]
                return function

            return mark

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **_: given[0] if len(given) == 1 and callable(given[0]) else lambda function: function

    def fail(reason: str = "") -> None:
        raise AssertionError(reason)

    module = types.ModuleType("pytest")
    module.__dict__.update(raises=Raises, approx=Approx, mark=Mark(), fail=fail, main=lambda *_, **__: 0)
    return module


def _near(value: Any, expected: Any, rel: float, absolute: float) -> bool:
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(
            _near(a, b, rel, absolute) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _near(value[key], expected[key], rel, absolute) for key in expected
        )
    if value == expected:
        return True
    distance, tolerance = abs(value - expected), max(rel * abs(expected), absolute)
    return bool(distance <= tolerance < float("inf"))  # an infinite value is near nothing else
