"""The user's environments and tools: found in a file, inspected, and called."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_cli.environments.schema import SchemaError, ToolSchema, tool_schema
from delta_cli.environments.turn import EpisodeFailure, Row, ToolError, Turn, as_turn, finite
from delta_cli.errors import UserError, typed_line
from delta_cli.user_file import load_module, run

RESERVED = ("reset", "get_reward", "step")  # methods of an environment that are no tools


def split_name(name: str) -> tuple[Path, str]:
    """``my_env.py:Class`` as a path and a name. Raises UserError."""
    file, colon, inner = name.rpartition(":")
    if not colon or not file.endswith(".py") or not inner.isidentifier():
        raise UserError(f"{name!r} is not FILE.py:NAME, such as my_env.py:Game")
    return Path(file).expanduser(), inner


def load(name: str) -> Any:
    """The object ``FILE.py:NAME``. Raises UserError if the file does not run or has no such name."""
    path, inner = split_name(name)
    unique = f"delta_environment_{path.stem}"
    module = sys.modules.get(unique)
    if module is None or getattr(module, "__file__", None) != str(path):
        module = load_module(path, unique)
    if not callable(value := getattr(module, inner, None)):
        raise UserError(f"{path} has no class or function {inner}")
    return value


class UserEnvironment:
    """One episode of an environment class, of some functions, or of both."""

    def __init__(self, environment: Callable[[], Any] | None, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._object = environment() if environment is not None else None
        self._tools = {function.__name__: function for function in functions} | methods_of(self._object)

    def reset(self, row: Row) -> str | None:
        """Call ``reset`` with the columns that it has arguments for."""
        function = getattr(self._object, "reset", None)
        if function is None:
            return None
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = {each.name for each in parameters}
        begun = run(function, **{name: value for name, value in row.items() if takes_all or name in named})
        return None if begun is None else as_text(begun)

    def step(self, text: str) -> Turn:
        """Call ``step``."""
        assert self._object is not None
        return as_turn(run(self._object.step, text))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. Raises ToolError for a tool that does not exist, or arguments that do not fit."""
        function = self._tools.get(name)
        if function is None:
            raise ToolError(f"there is no tool {name[:60]!r}; there are {', '.join(self._tools)}")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from None
        return as_text(run(function, **arguments))

    def reward(self) -> float | None:
        """What ``get_reward`` returns, or else the attribute ``reward``, if there is one."""
        if (function := getattr(self._object, "get_reward", None)) is not None:
            return finite(run(function))
        value = getattr(self._object, "reward", None)
        return finite(value) if isinstance(value, int | float) else None


def methods_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment, which are its tools."""
    if environment is None:
        return {}
    names = [name for name in dir(type(environment)) if not name.startswith("_") and name not in RESERVED]
    found = {name: getattr(environment, name) for name in names if callable(getattr(type(environment), name))}
    return {name: method for name, method in found.items() if inspect.ismethod(method) or inspect.isfunction(method)}


def schemas(environment: Callable[[], Any] | None, functions: Sequence[Callable[..., Any]]) -> list[ToolSchema]:
    """The schemas of all tools. Raises UserError if something cannot be a tool, or two have one name."""
    try:
        own = methods_of(environment()) if environment is not None else {}
    except Exception as error:
        raise UserError(f"the environment cannot be created: {typed_line(error)}") from error
    named = [*((each.__name__, each) for each in functions), *own.items()]
    names = [name for name, _ in named]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two tools are called {repeated[0]}; rename one")
    try:
        return [tool_schema(function, name) for name, function in named]
    except SchemaError as error:
        raise UserError(str(error)) from error


def as_text(value: Any) -> str:
    """What a tool returned, as the model reads it: text as it is, other data as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def failure_of(error: BaseException) -> str:
    """Why an episode failed."""
    return str(error) if isinstance(error, EpisodeFailure | UserError) else typed_line(error)
