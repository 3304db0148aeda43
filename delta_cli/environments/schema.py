"""From a Python function with type hints and a docstring to the JSON schema that a chat template shows as a tool."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ToolSchema = dict[str, Any]
SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class SchemaError(ValueError):
    """A function cannot be a tool; the text says why."""


def tool_schema(function: Callable[..., Any], name: str | None = None) -> ToolSchema:
    """The schema of a tool: its name, what it does, and the type and meaning of each argument.

    Raises SchemaError if there is no docstring, or an argument has no type hint.
    """
    name = name or function.__name__
    text, arguments = read_docstring(inspect.getdoc(function) or "")
    if not text:
        raise SchemaError(f"tool {name} has no docstring, and the model would not know what it does")
    try:
        hints = get_type_hints(function)
    except Exception as error:  # a hint is any expression
        raise SchemaError(f"the type hints of tool {name} cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SchemaError(f"argument {parameter.name} of tool {name} has no type hint")
        properties[parameter.name] = json_type(hints[parameter.name], f"argument {parameter.name} of tool {name}")
        if described := arguments.get(parameter.name):
            properties[parameter.name]["description"] = described
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def json_type(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises SchemaError if JSON has no such type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin in (Union, types.UnionType):
        kinds = [json_type(each, where) for each in inner if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is Literal:
        return {"type": SIMPLE.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (list, tuple, set):
        return {"type": "array", "items": json_type(inner[0], where) if inner else {}}
    if origin is dict:
        return {"type": "object"}
    raise SchemaError(f"{where} has the type {hint}; use str, int, float, bool, list, dict or Literal")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's form says about the function, and about each argument."""
    about: list[str] = []
    arguments: dict[str, str] = {}
    section, last, margin = "", "", 0
    for line in text.splitlines():
        if found := SECTION.match(line):
            section, last = found[1], ""
        elif not section:
            about.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            found = ARGUMENT.match(line)
            if found and (not last or indent <= margin):
                last, margin = found[1], indent
                arguments[last] = found[2].strip()
            elif last:
                arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return "\n".join(about).strip(), arguments
