"""A recipe as TOML, the reference of all keys, and the JSON schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from delta_cli.recipe.keys import walk
from delta_cli.recipe.models import Recipe


@dataclass(frozen=True)
class KeyReference:
    """All about one key, as text for people."""

    name: str
    type: str
    default: str
    allowed: str
    unit: str
    description: str


def key_reference() -> list[KeyReference]:
    """Every key of a recipe, section by section."""
    return [_describe(name, field) for name, field in walk(Recipe)]


def json_schema() -> str:
    """The JSON schema of a recipe file, for editors to complete and check recipes."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "delta recipe"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "path of another recipe, which this one changes",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def to_toml(recipe: Recipe) -> str:
    """The recipe with every key, as TOML that loads to the same recipe."""
    lines: list[str] = []
    _write_section(recipe, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_section(section: BaseModel, name: str, lines: list[str]) -> None:
    values = dict(section)
    tables = {key: _tables(value) for key, value in values.items() if _tables(value)}
    by_name = {key: value for key, value in values.items() if isinstance(value, dict)}
    plain = {key: value for key, value in values.items() if key not in tables and key not in by_name}
    lines += [f"{key} = {toml_value(value)}" for key, value in plain.items() if value is not None]
    for key, sections in tables.items():
        dotted = f"{name}.{key}" if name else key
        for table in sections:
            lines += ["", f"[{dotted}]" if isinstance(values[key], BaseModel) else f"[[{dotted}]]"]
            _write_section(table, dotted, lines)
    for key, named in by_name.items():
        for title, table in named.items():
            dotted = f"{name}.{key}.{title}"
            lines += ["", f"[{dotted}]"]
            _write_section(table, dotted, lines)


def _tables(value: Any) -> list[BaseModel]:
    """The sections in a value: one, several of a kind, or none."""
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, BaseModel)]


def toml_value(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, BaseModel):
        return toml_value(value.model_dump(exclude_defaults=True))
    if isinstance(value, float):
        return repr(value)
    # TOML's strings have the escapes of JSON's. Direction marks and control characters are escaped too, to be seen.
    return "".join(char if char.isprintable() else _escaped(char) for char in json.dumps(value, ensure_ascii=False))


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 2**16 else f"\\U{ord(char):08x}"


def _describe(name: str, field: Any) -> KeyReference:
    bounds = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(item, bound)}"
        for item in field.metadata
        for bound, sign in bounds.items()
        if getattr(item, bound, None) is not None
    ]
    types, choices = _type_names(field.annotation)
    default = field.default
    absent = default is None or default is PydanticUndefined
    return KeyReference(
        name=name,
        type=types,
        default="" if absent else toml_value(default),
        allowed=", ".join(choices) if choices else " and ".join(limits),
        unit=(field.json_schema_extra or {}).get("unit", ""),
        description=field.description,
    )


def _type_names(annotation: Any) -> tuple[str, list[str]]:
    """The type in words, such as "number or text", and the words of a choice."""
    if get_origin(annotation) is Annotated:
        return _type_names(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [_type_names(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(name for name, _ in parts)), [c for _, choices in parts for c in choices]
    if get_origin(annotation) is Literal:
        return "choice", [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return ("list of numbers" if float in get_args(annotation) else "list of text"), []
    if get_origin(annotation) is dict:
        return "tables by name", []
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(annotation, str(annotation)), []
