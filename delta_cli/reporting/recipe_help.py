"""The keys of a recipe as lines of text: ``delta recipe keys`` and ``delta recipe explain``."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from itertools import groupby

from delta_cli.errors import UserError
from delta_cli.recipe import key_reference
from delta_cli.recipe.document import KeyReference
from delta_cli.recipe.keys import section_of
from delta_cli.recipe.messages import setting
from delta_cli.recipe.models import Recipe
from delta_cli.recipe.other_trainers import TRAINERS

INDENT = "    "


def key_lines(prefix: str, width: int) -> Iterator[str]:
    """The keys that begin with ``prefix``, by section; raises UserError if there are none."""
    found = [key for key in key_reference() if key.name == prefix or key.name.startswith(prefix)]
    if not found:
        raise UserError(f"no key begins with '{prefix}'; {_instead(prefix)}")
    for number, (section, keys) in enumerate(groupby(found, lambda key: key.name.rpartition(".")[0])):
        if number:
            yield ""
        yield from _wrapped(f"[{section}] {purpose(section)}", width, later="")
        for key in keys:
            yield from _wrapped(_head(key), width, INDENT, 3 * INDENT)
            yield from _wrapped(key.description, width, 2 * INDENT, 2 * INDENT)


def _instead(name: str) -> str:
    """What to write for a name that is not a key: a key that resembles it, or what its section or the recipe holds."""
    section, _, last = name.rpartition(".")
    inside = [key.name for key in key_reference() if section and key.name.startswith(f"{section}.")]
    if close := difflib.get_close_matches(name, inside, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    if close_elsewhere := setting(last):
        return f"did you mean {close_elsewhere}?"
    if inside:
        return f"the keys of [{section}] are {', '.join(each.removeprefix(f'{section}.') for each in inside)}"
    return f"the sections are {', '.join(Recipe.model_fields)}"


def explained(name: str, width: int) -> Iterator[str]:
    """Everything about one key, given its name, the last part of its name, or another trainer's name for it.

    Raises UserError if there is no such key.
    """
    by_name = {key.name: key for key in key_reference()}
    key = by_name.get(name) or by_name.get(setting(name.rpartition(".")[2]) or "")
    if key is None:
        raise UserError(f"no key is called '{name}'; {_instead(name)}; list all: delta recipe keys")
    section = key.name.rpartition(".")[0]
    yield from _wrapped(_head(key), width)
    yield from _wrapped(key.description + (f", in {key.unit}" if key.unit else "") + ".", width)
    yield from _wrapped(f"It belongs to [{section}]: {purpose(section)}", width)
    elsewhere = [
        f"{trainer}: {alias.theirs}" + (f" ({alias.note})" if alias.note else "")
        for trainer, aliases in TRAINERS.items()
        for alias in aliases
        if alias.ours == key.name
    ]
    for line in elsewhere:
        yield from _wrapped(f"in {line}", width)
    yield from _wrapped(f"to change it: --set {key.name}={key.default or 'VALUE'}", width)


def purpose(section: str) -> str:
    """The purpose of a section in one sentence."""
    model = Recipe
    for part in section.split("."):
        inner = section_of(model.model_fields[part].annotation)
        assert inner is not None
        model = inner  # type: ignore[assignment]  # any section
    return (model.__doc__ or "").strip().partition("\n")[0]


def _head(key: KeyReference) -> str:
    """Name, default, type and allowed values of a key."""
    default = f" = {key.default}" if key.default else ""
    allowed = ": ".join(part for part in (key.type, key.allowed) if part)
    return f"{key.name}{default}  ({allowed}{', ' + key.unit if key.unit else ''})"


def _wrapped(text: str, width: int, first: str = "", later: str = INDENT) -> list[str]:
    """The text wrapped to ``width``; longer words are not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
