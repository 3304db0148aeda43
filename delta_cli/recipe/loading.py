"""Loading a recipe from TOML, with ``extends`` and ``--set`` overrides. Every mistake gives one clear line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from delta_cli.errors import UserError
from delta_cli.recipe.document import toml_value
from delta_cli.recipe.keys import walk
from delta_cli.recipe.messages import (
    OTHER_SUFFIXES,
    explain,
    nearby,
    not_an_override,
    not_toml,
    path_of,
    refuse_other_files,
    shown,
)
from delta_cli.recipe.models import Recipe
from delta_cli.recipe.renamed import Table, with_new_keys
from delta_cli.recipe.shipped import find_shipped

LONGEST = 10**7  # bytes of a recipe or study


def load_recipe(path: Path | None, overrides: Sequence[str] = (), over: Table | None = None) -> Recipe:
    """The recipe in a TOML file, or the shipped one of that name, with ``section.key=value`` overrides.

    Without a path it has all defaults.
    ``over`` holds further keys, which replace the file's; the overrides replace those in turn. Raises UserError, one
    line, if the file cannot be read or a key or value is not allowed.
    """
    path = None if path is None else find_shipped(path)
    table = {} if path is None else read_recipe(path)
    _lay_over(table, with_new_keys(over or {}, str(path)), "overrides", str(path))
    return _overridden(table, overrides, str(path) if path else "the defaults")


def parse_recipe(table: Table, where: str) -> Recipe:
    """The recipe in a table that is already parsed; ``where`` names it in messages."""
    try:
        return Recipe.model_validate(_lists_to_tuples(with_new_keys(table, where)))
    except ValidationError as error:
        raise UserError(explain(error, where)) from None


def _overridden(table: Table, overrides: Sequence[str], where: str) -> Recipe:
    """The recipe in a table with overrides. An error names the override that causes it."""
    try:
        return Recipe.model_validate(_changed(table, overrides))
    except ValidationError as error:
        if not overrides or not _valid(table, ()):
            raise UserError(explain(error, _at_fault(table, overrides, error, where))) from None
        culprits = [text for text in overrides if _valid(table, [other for other in overrides if other != text])]
        blamed = culprits[-1:] or overrides
        raise UserError(explain(error, " ".join(f"--set {text}" for text in blamed))) from None


def _valid(table: Table, overrides: Sequence[str]) -> bool:
    try:
        Recipe.model_validate(_changed(table, overrides))
    except (ValidationError, UserError):
        return False
    return True


def _changed(table: Table, overrides: Sequence[str]) -> Any:
    """The table with overrides applied and lists as tuples."""
    changed = deepcopy(table)
    for override in overrides:
        changes = with_new_keys(_override(override), f"--set {override}")
        rewards = changed.get("reward")
        if "reward" in changes and rewards and isinstance(rewards, list | tuple):
            changes = {"reward": _one_of(rewards, changes["reward"], override)}
        merge(changed, changes)
    return _lists_to_tuples(changed)


def _one_of(rewards: Sequence[Any], change: Table, override: str) -> list[Any]:
    """Several rewards after the change ``{name: {key: value}}`` of one of them."""
    (name, value), *_ = change.items()
    names = [_title(each) for each in rewards]
    if name not in names or not isinstance(value, dict):
        key, _, given = override.partition("=")
        key = key.strip().rpartition(".")[2]
        raise UserError(
            f"--set {override}: the recipe has {len(rewards)} rewards, {', '.join(map(str, names))}; name one of them: "
            f"--set reward.{names[0]}.{key}={given}"
        )
    changed = list(rewards)
    changed[names.index(name)] = rewards[names.index(name)] | value
    return changed


def _title(reward: Any) -> Any:
    """The name of one of several rewards."""
    return reward.get("name") or reward.get("kind", "math") if isinstance(reward, dict) else None


def _at_fault(table: Table, overrides: Sequence[str], error: ValidationError, where: str) -> str:
    """What to blame for a mistake that the file has by itself: the file, unless an override sets that key."""
    key = ".".join(path_of(error.errors()[0]["loc"]))
    blamed = [text for text in overrides if key and key.startswith(text.partition("=")[0].strip())]
    return f"--set {blamed[-1]}" if blamed else where


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> Table:
    """A recipe file's table, laid over the table of the file it extends. Raises UserError if it is not a recipe."""
    resolved = path.resolve()
    if resolved in seen:
        raise UserError(f"{path}: extends itself, through {' → '.join(p.name for p in (*seen, resolved))}")
    table = read_toml(path)
    refuse_other_files(table, path)
    table = with_new_keys(table, str(path))
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str) or "\0" in parent:
        raise UserError(f"{path}: extends = {shown(parent)} must be the path of a recipe, in quotes")
    base = read_recipe(path.parent / parent, (*seen, resolved))
    _lay_over(base, table, str(path), parent)
    return base


def read_toml(path: Path, what: str = "recipe") -> Table:
    """The table in a TOML file. Raises UserError that says what the file is instead if it is not ``what``."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)  # a device has no end
        if len(content) > LONGEST:
            raise UserError(
                f"{path}: has more than {LONGEST:,} bytes and is not a {what}; give the path of a TOML file"
            )
        text = content.decode("utf-8-sig")
        if path.name.lower().endswith(OTHER_SUFFIXES):  # an empty one would be valid TOML
            raise not_toml(path, what=what)
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{nearby(path)}") from None
    except IsADirectoryError:
        raise not_toml(path, what=what) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text in UTF-8 ({error.reason}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise not_toml(path, error if isinstance(error, ValueError) else None, what) from None


def _lay_over(base: Table, table: Table, where: str, parent: str) -> None:
    """Lay a table over the table of ``parent``. Raises UserError if it has one reward where ``parent`` has several."""
    if isinstance(base.get("reward"), list) and isinstance(table.get("reward"), dict):
        raise UserError(
            f"{where}: [reward] changes a single reward, but {parent} has {len(base['reward'])}; write all of them "
            "here, each as [[reward]]"
        )
    merge(base, table)


def merge(base: Table, changes: Table) -> None:
    """Change a table in place, key by key. A list is replaced as a whole."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merge(base[name], value)
        else:
            base[name] = value


def _override(text: str) -> Table:
    """``section.key=value`` as nested tables. The value is TOML; anything else is text."""
    name, equals, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise UserError(not_an_override(text))
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
        if list(parsed) != ["value"]:
            raise UserError(f"--set {text}: gives more than one value; use one --set for each key")
        given = parsed["value"]
    except (ValueError, RecursionError):
        given = value.strip()
    return nested(parts, given)


def nested(parts: Sequence[str], value: Any) -> Table:
    """A value at a dotted name, as tables inside tables: ``{"run": {"steps": 3}}``."""
    for part in reversed(parts):
        value = {part: value}
    found: Table = value
    return found


def _lists_to_tuples(value: Any) -> Any:
    """The value with TOML's arrays as tuples, which frozen models hold."""
    if isinstance(value, dict):
        return {name: _lists_to_tuples(item) for name, item in value.items()}
    return tuple(_lists_to_tuples(item) for item in value) if isinstance(value, list) else value


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with ``section.key=value`` overrides."""
    return _overridden(recipe.model_dump(), overrides, "the recipe")


def differences(before: Recipe, after: Recipe) -> list[tuple[str, str]]:
    """Every key whose value differs, with a line "key: before → after"."""
    found = []
    for name, _ in walk(Recipe):
        first, second = _value(before, name), _value(after, name)
        if first != second:
            found.append((name, f"{name}: {_in_words(first)} → {_in_words(second)}"))
    return found


def _in_words(value: Any) -> str:
    return "absent" if value is None else toml_value(value)


def _value(recipe: Recipe, name: str) -> Any:
    """The value of a key; for several rewards, the list of their values."""
    section, _, rest = name.partition(".")
    if section == "reward":
        values = [_field(reward, rest) for reward in recipe.rewards]
        return values if len(values) > 1 else values[0]
    return _field(recipe, name)


def _field(record: Any, name: str) -> Any:
    """The value at a dotted name; None if a section on the way is absent."""
    for part in name.split("."):
        record = getattr(record, part, None)
    return record
