"""Schemas of tools, against transformers' own for functions that both read."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from delta_cli.environments.schema import SchemaError, tool_schema


def search(query: str, limit: int = 5, exact: bool = False) -> str:
    """
    Search the library.

    Args:
        query: words to look for,
            on as many lines as it takes
        limit: most results

    Returns:
        Titles.
    """
    return query


def plot(points: list[float], style: Literal["line", "dots"], title: str | None = None) -> None:
    """Draw points.

    Args:
        points (list[float]): what to draw
        style: how
        title: above it
    """


def test_a_simple_function_has_transformers_schema() -> None:
    own, theirs = tool_schema(search), get_json_schema(search_documented)
    theirs["function"]["name"] = "search"
    theirs["function"].pop("return", None)
    assert own["function"]["description"] == theirs["function"]["description"]
    for name, about in theirs["function"]["parameters"]["properties"].items():
        assert own["function"]["parameters"]["properties"][name]["type"] == about["type"]
    assert own["function"]["parameters"]["required"] == theirs["function"]["parameters"]["required"]


def search_documented(query: str, limit: int = 5, exact: bool = False) -> str:
    """
    Search the library.

    Args:
        query: words to look for, on as many lines as it takes
        limit: most results
        exact: whole words
    """
    return query


def test_descriptions_and_types() -> None:
    properties = tool_schema(search)["function"]["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "words to look for, on as many lines as it takes"}
    assert properties["exact"] == {"type": "boolean"}
    properties = tool_schema(plot)["function"]["parameters"]["properties"]
    assert properties["points"] == {"type": "array", "items": {"type": "number"}, "description": "what to draw"}
    assert properties["style"] == {"type": "string", "enum": ["line", "dots"], "description": "how"}
    assert properties["title"]["type"] == "string"


def silent(query: str) -> str:
    return query


def untyped(query) -> str:  # type: ignore[no-untyped-def]
    """Search."""
    return str(query)


def odd(query: bytes) -> str:
    """Search."""
    return str(query)


@pytest.mark.parametrize(
    ("function", "said"), [(silent, "no docstring"), (untyped, "no type hint"), (odd, "has the type")]
)
def test_functions_that_cannot_be_tools(function: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        tool_schema(function)
