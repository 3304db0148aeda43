"""Walking through the keys of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation, also in ``Section | None`` and in a list of sections; None if it has none."""
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := section_of(part))), None)
    if get_origin(annotation) is tuple:
        return section_of(get_args(annotation)[0])
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as (dotted name, pydantic field). The keys of a section come before those of its inner sections."""
    inner = {name: section_of(field.annotation) for name, field in model.model_fields.items()}
    yield from ((prefix + name, field) for name, field in model.model_fields.items() if inner[name] is None)
    for name, section in inner.items():
        if section is not None:
            yield from walk(section, f"{prefix}{name}.")


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a recipe's table by their dotted names, with their values; several rewards by their names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):  # [[reward]]
            for each in value:
                yield from flattened(each, f"{prefix}{name}.{each.get('name') or each.get('kind')}.")
        else:
            yield prefix + name, value
