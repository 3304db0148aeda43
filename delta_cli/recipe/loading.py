"""From TOML to a Recipe: ``extends``, ``--set`` overrides, and one clear line for every mistake."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from delta_cli.errors import UserError
from delta_cli.recipe.models import Recipe

Table = dict[str, Any]


def load_recipe(path: Path | None, overrides: Sequence[str] = (), over: Table | None = None) -> Recipe:
    """The recipe of a TOML file (None: all defaults) with ``section.key=value`` overrides.

    ``over`` is a part of a recipe that is laid over the file's, below the overrides. Raises UserError,
    one line, for a file that cannot be read and for every key or value that is not allowed.
    """
    table = {} if path is None else _read(path, ())
    _merge(table, over or {})
    for override in overrides:
        _merge(table, _override(override))
    return parse_recipe(table, str(path) if path else "--set", overrides)


def parse_recipe(table: Table, where: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a table that is already read, ``overrides`` included.

    ``where`` names it in messages, unless an override made the mistake.
    """
    try:
        return Recipe.model_validate(_lists_to_tuples(table))
    except ValidationError as error:
        key = ".".join(_path(error.errors()[0]["loc"]))
        blamed = [text for text in overrides if key and text.partition("=")[0].strip() == key]
        raise UserError(_explain(error, f"--set {blamed[-1]}" if blamed else where)) from None


def _read(path: Path, seen: tuple[Path, ...]) -> Table:
    """A file's table over the table of the file it extends."""
    resolved = path.resolve()
    if resolved in seen:
        raise UserError(f"{path}: extends itself, by way of {' → '.join(p.name for p in (*seen, resolved))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a TOML text: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise UserError(f"{path}: not valid TOML: {error or 'nested too deeply'}") from None
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str) or "\0" in parent:
        raise UserError(f"{path}: extends = {parent!r} must be the path of a recipe, as text")
    base = _read(path.parent / parent, (*seen, resolved))
    _merge(base, table)
    return base


def _merge(base: Table, changes: Table) -> None:
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
        raise UserError(f"--set {text}: write section.key=value, e.g. --set update.learning_rate=1e-5")
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


def _explain(error: ValidationError, where: str) -> str:
    """The first mistake in one line: file, key, value, what is allowed, the nearest valid name."""
    errors = error.errors(include_url=False)
    first, path = errors[0], _path(errors[0]["loc"])
    name = ".".join(path)
    others = {_path(other["loc"]) for other in errors} - {path}
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key {name}{_suggest(path)}{more}"
    reasons = [_sentence(other["msg"]) for other in errors if _path(other["loc"]) == path]
    message = " or ".join(dict.fromkeys(reasons))
    if not name or first["type"] == "value_error":
        return f"{where}: {f'[{name}] ' if name else ''}{message}{more}"
    return f"{where}: {name} = {first['input']!r} is not allowed: {message}{more}"


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message if message[1:2].isupper() else message[0].lower() + message[1:]


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in location if not _is_variant(part))


def _is_variant(part: int | str) -> bool:
    """Whether a location is pydantic's name for a member of a union rather than a key."""
    return (
        not isinstance(part, str)
        or part in ("float", "int", "str")
        or part.startswith(("literal[", "function-", "tuple["))
    )


def _suggest(path: tuple[str, ...]) -> str:
    model: type[BaseModel] | None = Recipe
    for part in path[:-1]:
        model = section_of(model.model_fields[part].annotation) if model else None
    if model is None:
        return ""
    names = list(model.model_fields)
    section = ".".join(path[:-1])
    close = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)
    elsewhere = [name for name, _ in walk(Recipe) if name.split(".")[-1] == path[-1]]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    if close:
        return f"; did you mean {'.'.join([*path[:-1], close[0]])}?"
    return f"; allowed {f'in [{section}]' if section else 'sections'}: {', '.join(names)}"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section model behind an annotation (also ``Section | None``), or None."""
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as (dotted name, pydantic field), sections in order."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk(section, f"{prefix}{name}.")


def _nearby(path: Path) -> str:
    """A hint at a recipe with a similar name."""
    folder = path.parent if path.parent.is_dir() else Path("recipes")
    names = {str(p): p.stem for p in folder.glob("*.toml")} if folder.is_dir() else {}
    close = difflib.get_close_matches(path.stem, names.values(), n=1, cutoff=0.5)
    return next((f"; did you mean {p}?" for p, stem in names.items() if close and stem == close[0]), "")


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with ``section.key=value`` overrides."""
    table = recipe.model_dump()
    for override in overrides:
        _merge(table, _override(override))
    return parse_recipe(table, "--set")


def differences(before: Recipe, after: Recipe) -> list[tuple[str, str]]:
    """Keys whose values differ, each with a line "key: before → after"."""
    found = []
    for name, _ in walk(Recipe):
        first, second = _value(before, name), _value(after, name)
        if first != second:
            found.append((name, f"{name}: {first!r} → {second!r}"))
    return found


def _value(recipe: Recipe, name: str) -> Any:
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
