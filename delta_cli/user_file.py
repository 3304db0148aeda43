"""Run a user's Python file and find a function in it."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from delta_cli.errors import UserError, typed_line


def load_module(path: Path, module_name: str) -> ModuleType:
    """Run the file as a module of that name. Raises UserError if it is missing or does not run."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the path of a Python file")
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None or found.loader is None:
        raise UserError(f"{path} is not a Python file; its name must end in .py")
    module = sys.modules[module_name] = importlib.util.module_from_spec(found)  # before it runs, for its dataclasses
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} does not run: {typed_line(error)}") from error
    return module


def load_function(path: Path, name: str, what: str, usage: str) -> Callable[..., Any]:
    """The function ``name`` of the file; ``what`` names the file in messages and ``usage`` shows how to define it.

    Raises UserError if the file or the function is missing or the file does not run.
    """
    try:
        function = getattr(load_module(path, f"delta_custom_{what}"), name, None)
    except UserError as error:
        raise UserError(f"{what} file {error}") from error.__cause__
    if not callable(function):
        raise UserError(f"{what} file {path} has no function '{name}'; define {usage}")
    return function  # type: ignore[no-any-return]  # callable() does not narrow Any


def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a function, which may be a coroutine function."""
    value = function(*arguments, **named)
    return asyncio.run(value) if inspect.iscoroutine(value) else value
