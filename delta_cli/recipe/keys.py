"""The keys of a recipe as the models have them."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section model behind an annotation (also ``Section | None``, or one that may be repeated), or None."""
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := section_of(part))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as (dotted name, pydantic field), sections in order."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk(section, f"{prefix}{name}.")
