"""Error messages about recipes: one line with the place, the value, what is wrong and what to write."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from delta_cli.errors import UserError, delta_command
from delta_cli.recipe.keys import section_of, walk
from delta_cli.recipe.models import Recipe
from delta_cli.recipe.other_trainers import PAGE, SHOWN, known_elsewhere, other_trainers_keys, translated
from delta_cli.recipe.reward import ONE, SEVERAL
from delta_cli.recipe.shipped import shipped_names

DATA = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
OTHERS = (".yaml", ".yml", ".py", ".sh", ".ipynb")
OTHER_SUFFIXES = (*DATA, *OTHERS, ".safetensors")
LONGEST = 60  # characters of a quoted value


def explain(error: ValidationError, where: str) -> str:
    """The first mistake: where it is, the key, its value, what is allowed, and the closest valid name."""
    errors = error.errors(include_url=False)
    first, path, which = errors[0], path_of(errors[0]["loc"]), _which(errors[0]["loc"])
    where = f"{where}: {which}" if which else where
    name = ".".join(path)
    others = {(_which(other["loc"]), path_of(other["loc"])) for other in errors} - {(which, path)}
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key {name}{_suggest(path)}{more}"
    if not name or first["type"] == "value_error":
        why = reason(first)
        section = f"[{name}] " if name and not which and not why.startswith(f"{name}.") else ""
        return f"{where}: {section}{why}{more}"
    same = [other for other in errors if (_which(other["loc"]), path_of(other["loc"])) == (which, path)]
    return f"{where}: {name} = {shown(first['input'])} is not allowed: {_reasons(same)}{more}"


def explain_keys(error: ValidationError, where: str, model: type[BaseModel], options: Mapping[str, object]) -> str:
    """The first mistake in a suite or a study: the key, or the option that was typed, its value and what is allowed."""
    first = error.errors(include_url=False)[0]
    parts, key = first["loc"], ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        for part in (part for part in parts[:-1] if isinstance(part, str)):
            model = section_of(model.model_fields[part].annotation) or model
        names = list(model.model_fields)
        hint = did_you_mean(str(parts[-1]), names).removeprefix("; ") or f"allowed: {', '.join(names)}"
        return f"{where}: unknown key {key}; {hint}"
    typed = {name: f"--{name.replace('_', '-')} {value}" for name, value in options.items()}
    if parts and parts[-1] in typed:
        return f"{typed[str(parts[-1])]}: {reason(first)}"
    if typed and key == "settings":  # two settings that do not go together
        return f"{' '.join(typed.values())}: {reason(first)}"
    if first["type"] in ("missing", "value_error"):
        return f"{where}: {key}: {reason(first)}" if key else f"{where}: {reason(first)}"
    return f"{where}: {key} = {shown(first['input'])} is not allowed: {reason(first)}"


def reason(error: Mapping[str, Any]) -> str:
    """Why pydantic refuses a value, in plain words."""
    context, kind = error.get("ctx", {}), error["type"]
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    if kind in bounds:
        word, bound = bounds[kind]
        return f"it must be {word} {context[bound]:g}"
    if kind == "literal_error":
        words = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
        return f"choose {_either(words)}{did_you_mean(str(error['input']), words)}"
    if kind in WORDS:
        return WORDS[kind]
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


WORDS = {
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "string_type": "it must be text, in quotes",
    "string_pattern_mismatch": "name a function as FILE.py:FUNCTION",
    "string_too_short": "it must not be empty",
    "too_short": "it must not be empty",
    "tuple_type": 'it must be a list, like ["a", "b"]',
    "list_type": 'it must be a list, like ["a", "b"]',
    "dict_type": "it must be a section: [name] on a line, its keys below",
    "model_type": "it must be a section: [name] on a line, its keys below",
    "missing": "it is missing",
    "too_long": "it has too many values",
}


def shown(value: Any) -> str:
    """A value as messages quote it; a long one is cut."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}…{text[-10:]} ({len(text):,} characters)"


def _reasons(errors: Sequence[Mapping[str, Any]]) -> str:
    found = list(dict.fromkeys(reason(error) for error in errors))
    return " or ".join([found[0], *(other.removeprefix("it must be ") for other in found[1:])])


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def did_you_mean(value: str, names: Sequence[str]) -> str:
    """A hint at the name that a value resembles; empty if it resembles none."""
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def path_of(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The parts of a key's name in a location of pydantic's."""
    return tuple(str(part) for part in location if not _is_variant(part))


def _which(location: tuple[int | str, ...]) -> str:
    """Which of several [[reward]] tables a location is in, counted from 1; empty if it is in none."""
    place = location[location.index(SEVERAL) + 1 :][:1] if SEVERAL in location else ()
    return f"{SEVERAL} {place[0] + 1}" if place and isinstance(place[0], int) else ""


def _is_variant(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name for a member of a union and not a key."""
    return (
        not isinstance(part, str)
        or part in ("float", "int", "str", "constrained-str", ONE, SEVERAL)
        or part.startswith(("literal[", "function-", "tuple["))
    )


def _suggest(path: tuple[str, ...]) -> str:
    """What an unknown key may be meant as: a key of another section, another trainer's key, or the closest one here."""
    model: type[BaseModel] | None = Recipe
    named = False  # the next part is the name of a table, such as in data.sources.NAME
    for part in path[:-1]:
        if named:
            named = False
            continue
        annotation = model.model_fields[part].annotation if model and part in model.model_fields else None
        named = get_origin(annotation) is dict
        model = section_of(get_args(annotation)[1] if named else annotation)
    if model is None:
        return ""
    if hint := meant(path[-1]):
        return hint
    names = list(model.model_fields)
    section = ".".join(path[:-1])
    if close := difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5):
        return f"; did you mean {'.'.join([*path[:-1], close[0]])}?"
    return f"; allowed {f'in [{section}]' if section else 'sections'}: {', '.join(names)}"


def meant(name: str) -> str:
    """A hint at the key that a bare name means, here or in another trainer; empty if there is none."""
    same = [key for key, _ in walk(Recipe) if key.split(".")[-1] == name]
    if same:
        return f"; did you mean {_either(same[:SHOWN])}?"
    alias = known_elsewhere(name)
    return f"; {translated(alias)}" if alias else ""


def setting(name: str) -> str | None:
    """The key that a bare name means: here, in another trainer, or the closest one; None if there is none."""
    keys = [key for key, _ in walk(Recipe)]
    if same := [key for key in keys if key.split(".")[-1] == name]:
        return same[0]
    alias = known_elsewhere(name)
    if alias is not None and alias.ours:
        return alias.ours
    close = difflib.get_close_matches(name, [key.split(".")[-1] for key in keys], n=1, cutoff=0.7)
    return next((key for key in keys if close and key.split(".")[-1] == close[0]), None)


def not_an_override(text: str) -> str:
    """The message about a ``--set text`` that names no section, with what to type instead."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if "." not in name and name in Recipe.model_fields:
        keys = [key for key, _ in walk(Recipe) if key.startswith(f"{name}.")]
        return f"--set {text}: {name} is a section; its keys are {', '.join(keys[:SHOWN])}, …: delta recipe keys {name}"
    if equals and "." not in name and (key := setting(name)):
        return f"--set {text}: a key is written with its section; did you mean --set {key}={value}?"
    return f"--set {text}: write section.key=value, e.g. --set update.learning_rate=1e-5"


def refuse_other_files(table: Mapping[str, Any], path: Path) -> None:
    """Raise UserError if a TOML file is a study, or a configuration of another trainer."""
    if "arms" in table:
        raise UserError(
            f"{path}: is a study (a grid of runs), not a recipe; run it with: {delta_command('study', path)}"
        )
    found = other_trainers_keys(table, set(Recipe.model_fields))
    if len(found) > 1:
        listed = "; ".join(map(translated, found[:SHOWN]))
        raise UserError(f"{path}: has keys of another trainer: {listed}. {PAGE} lists all of them")


def not_toml(path: Path, error: Exception | None = None, what: str = "recipe") -> UserError:
    """The error about a path that is not a recipe (or study): what it is instead, and what to do with it."""
    if path.is_dir():
        return UserError(f"{path}: is a folder, not a {what}; {_folder(path)}")
    name = path.name.lower()
    if name.endswith(DATA):
        return UserError(
            f"{path}: is a data file, not a {what}; make a recipe for it with: {delta_command('init', '--data', path)}"
        )
    if name.endswith(OTHERS):
        return UserError(
            f"{path}: a {what} must be a TOML file; {PAGE} lists what keys of other trainers are called here"
        )
    if name.endswith(".safetensors"):
        return UserError(
            f"{path}: holds a model's weights and is not a {what}; put its folder into model.path of a recipe"
        )
    return UserError(f"{path}: not valid TOML: {error or 'nested too deeply'}; `delta recipe show` prints an example")


def _folder(path: Path) -> str:
    if (path / "recipe.toml").is_file():
        return f"to resume this run: {delta_command('train', '--resume', '--run-dir', path)}"
    if (path / "config.json").is_file():
        return f"to make a recipe for this model: {delta_command('init', '--data', 'FILE', '--model', path)}"
    recipes = sorted(file.name for file in path.glob("*.toml"))
    if recipes:
        return f"choose one of its recipes, such as {path / recipes[0]}"
    return "name a .toml file; make one with: delta init"


def nearby(path: Path) -> str:
    """A hint at a file with a similar name, or at a shipped recipe of that name."""
    folder = path.parent if path.parent.is_dir() else Path("recipes")
    names = {str(p): p.stem for p in folder.glob("*.toml")} if folder.is_dir() else {}
    names |= {name: name for name in shipped_names() if name not in names.values()}
    close = difflib.get_close_matches(path.stem, names.values(), n=1, cutoff=0.5)
    return next((f"; did you mean {p}?" for p, stem in names.items() if close and stem == close[0]), "")
