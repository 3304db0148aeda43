"""The tool ``python``: what is printed, state over an episode, and code that hangs, ends, floods or escapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delta_cli.environments.python_tool import PythonTool
from delta_cli.environments.turn import ToolError
from delta_cli.errors import UserError
from delta_cli.rewards.code.sandbox import find_sandbox


@pytest.fixture
def python() -> Iterator[PythonTool]:
    try:
        find_sandbox()
    except UserError:
        find_sandbox.cache_clear()
        tool = PythonTool(1.0, allow_unsandboxed=True)
    else:
        tool = PythonTool(1.0)
    yield tool
    tool.close()


def test_variables_stay_and_errors_are_text(python: PythonTool) -> None:
    assert python.call("x = 6\nprint('set')") == "set\n"
    assert python.call("x * 7") == "42\n"
    assert python.call("def f(n):\n    return n + x") == ""
    assert python.call("f(1)\n") == "7\n"
    assert "ZeroDivisionError" in python.call("1 / 0")
    assert "SyntaxError" in python.call("1 +")
    assert "SystemExit" in python.call("import sys; sys.exit(3)")
    assert python.call("x") == "6\n"
    assert len(python.call("print('a' * 10**6)")) <= 200_000


@pytest.mark.parametrize("code", ["while True: pass", "import os; os._exit(1)"])
def test_a_process_that_is_lost_starts_again(python: PythonTool, code: str) -> None:
    python.call("x = 1")
    with pytest.raises(ToolError, match="all variables are lost"):
        python.call(code)
    assert "NameError" in python.call("x")


def test_what_is_not_code(python: PythonTool) -> None:
    with pytest.raises(ToolError, match="not text"):
        python.call(None)
