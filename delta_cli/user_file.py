"""Load a function from a user's Python file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delta_cli.errors import UserError


def load_function(path: Path, name: str, what: str, usage: str) -> Callable[..., Any]:
    """The function ``name`` of the file; ``what`` names the file in messages and ``usage`` shows how to define it.

    Raises UserError if the file or the function is missing or the file does not run.
    """
    if not path.is_file():
        raise UserError(f"{what} file {path} does not exist; give the path of a Python file")
    module_spec = importlib.util.spec_from_file_location(f"delta_custom_{what}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{what} file {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{what} file {path} does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{what} file {path} has no function '{name}'; define {usage}")
    return function  # type: ignore[no-any-return]  # callable() does not narrow Any
