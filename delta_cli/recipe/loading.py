"""From TOML to a Recipe: ``extends``, ``--set`` overrides, and one clear line for every mistake."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from delta_cli.errors import UserError
from delta_cli.recipe.keys import walk
from delta_cli.recipe.messages import (
    FOREIGN,
    explain,
    from_elsewhere,
    nearby,
    not_an_override,
    not_toml,
    path_of,
    shown,
)
from delta_cli.recipe.models import Recipe
from delta_cli.recipe.renamed import with_new_keys

Table = dict[str, Any]


def load_recipe(path: Path | None, overrides: Sequence[str] = (), over: Table | None = None) -> Recipe:
    """The recipe of a TOML file (None: all defaults) with ``section.key=value`` overrides.

    ``over`` is a part of a recipe that is laid over the file's, below the overrides. Raises UserError,
    one line, for a file that cannot be read and for every key or value that is not allowed.
    """
    table = {} if path is None else read_recipe(path)
    _lay_over(table, with_new_keys(over or {}, str(path)), "overrides", str(path))
    return _overridden(table, overrides, str(path) if path else "the defaults")


def parse_recipe(table: Table, where: str) -> Recipe:
    """The recipe of a table that is already read; ``where`` names it in messages."""
    try:
        return Recipe.model_validate(_lists_to_tuples(with_new_keys(table, where)))
    except ValidationError as error:
        raise UserError(explain(error, where)) from None


def _overridden(table: Table, overrides: Sequence[str], where: str) -> Recipe:
    """The recipe of a table with overrides; a mistake is told of the override that makes it."""
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
    """The table with overrides, its lists as tuples."""
    changed = deepcopy(table)
    for override in overrides:
        changes = with_new_keys(_override(override), f"--set {override}")
        rewards = changed.get("reward")
        if "reward" in changes and rewards and isinstance(rewards, list | tuple):
            changes = {"reward": _one_of(rewards, changes["reward"], override)}
        _merge(changed, changes)
    return _lists_to_tuples(changed)


def _one_of(rewards: Sequence[Any], change: Table, override: str) -> list[Any]:
    """Several rewards with a change ``{name: {key: value}}`` of one of them."""
    (name, value), *_ = change.items()
    names = [_title(each) for each in rewards]
    if name not in names or not isinstance(value, dict):
        key, _, given = override.partition("=")
        key = key.strip().rpartition(".")[2]
        raise UserError(
            f"--set {override}: the recipe has {len(rewards)} rewards, {', '.join(map(str, names))}; say of which: "
            f"--set reward.{names[0]}.{key}={given}"
        )
    changed = list(rewards)
    changed[names.index(name)] = rewards[names.index(name)] | value
    return changed


def _title(reward: Any) -> Any:
    """What one of several rewards is called."""
    return reward.get("name") or reward.get("kind", "math") if isinstance(reward, dict) else None


def _at_fault(table: Table, overrides: Sequence[str], error: ValidationError, where: str) -> str:
    """Of a file with a mistake of its own: the file, unless an override set the very key."""
    key = ".".join(path_of(error.errors()[0]["loc"]))
    blamed = [text for text in overrides if key and key.startswith(text.partition("=")[0].strip())]
    return f"--set {blamed[-1]}" if blamed else where


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> Table:
    """A file's table over the table of the file it extends. Raises UserError where it is no recipe."""
    resolved = path.resolve()
    if resolved in seen:
        raise UserError(f"{path}: extends itself, by way of {' → '.join(p.name for p in (*seen, resolved))}")
    table = read_toml(path)
    from_elsewhere(table, path)
    table = with_new_keys(table, str(path))
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str) or "\0" in parent:
        raise UserError(f"{path}: extends = {shown(parent)} must be the path of a recipe, as text")
    base = read_recipe(path.parent / parent, (*seen, resolved))
    _lay_over(base, table, str(path), parent)
    return base


def read_toml(path: Path, what: str = "recipe") -> Table:
    """A TOML file, with or without a byte-order mark; raises UserError that says what it is instead."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.name.lower().endswith(FOREIGN):  # an empty one would be valid
            raise not_toml(path, what=what)
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{nearby(path)}") from None
    except IsADirectoryError:
        raise not_toml(path, what=what) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as a text in UTF-8 ({error.reason}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise not_toml(path, error if isinstance(error, ValueError) else None, what) from None


def _lay_over(base: Table, table: Table, where: str, parent: str) -> None:
    """Lay a table over that of ``parent``. Raises UserError where it has one reward for several."""
    if isinstance(base.get("reward"), list) and isinstance(table.get("reward"), dict):
        raise UserError(
            f"{where}: [reward] would change one reward, and {parent} has {len(base['reward'])}; write all of them "
            "here, each as [[reward]]"
        )
    _merge(base, table)


def _merge(base: Table, changes: Table) -> None:
    """Lay changes over a table, key by key; a list is replaced whole."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = value


def _override(text: str) -> Table:
    """``section.key=value`` as nested tables; the value as in TOML, a bare word as text."""
    name, equals, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise UserError(not_an_override(text))
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
        if list(parsed) != ["value"]:
            raise UserError(f"--set {text}: one value at a time")
        given = parsed["value"]
    except (ValueError, RecursionError):
        given = value.strip()
    result: dict[str, Any] = {parts[-1]: given}
    for part in reversed(parts[:-1]):
        result = {part: result}
    return result


def _lists_to_tuples(value: Any) -> Any:
    """TOML's arrays as the tuples that frozen models hold."""
    if isinstance(value, dict):
        return {name: _lists_to_tuples(item) for name, item in value.items()}
    return tuple(_lists_to_tuples(item) for item in value) if isinstance(value, list) else value


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with ``section.key=value`` overrides."""
    return _overridden(recipe.model_dump(), overrides, "the recipe")


def differences(before: Recipe, after: Recipe) -> list[tuple[str, str]]:
    """Keys whose values differ, each with a line "key: before → after"."""
    found = []
    for name, _ in walk(Recipe):
        first, second = _value(before, name), _value(after, name)
        if first != second:
            found.append((name, f"{name}: {first!r} → {second!r}"))
    return found


def _value(recipe: Recipe, name: str) -> Any:
    """The value of a key; of several rewards the list of theirs."""
    section, _, rest = name.partition(".")
    if section == "reward":
        values = [getattr(reward, rest) for reward in recipe.rewards]
        return values if len(values) > 1 else values[0]
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
