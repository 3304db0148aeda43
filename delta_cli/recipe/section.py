"""What every table of a recipe has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(default: Any, description: str, unit: str = "", **limits: Any) -> Any:
    """A field with its meaning, unit and range."""
    return Field(default, description=description, json_schema_extra={"unit": unit} if unit else None, **limits)


class Section(BaseModel):
    """A table of a recipe: frozen, and closed to keys that it does not name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
