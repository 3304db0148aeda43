"""Messages about a command line that cannot be parsed: one line, with what to type instead."""

from __future__ import annotations

import re
import sys
from typing import Any

LONGEST = 60  # characters of a quoted value

# Newer versions of Typer contain their own copy of click, so its exceptions are recognised by their attributes.


def is_usage(error: BaseException) -> bool:
    """Whether the error comes from parsing the command line."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def usage_message(error: Any) -> str:
    """The error in one line, or the help if a command was called without any argument."""
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        return str(error.format_message())
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "delta")
    where = " ".join(["delta:", *(f"{name}:" for name in path.split()[1:])])
    if kind == "NoSuchOption":
        return f"{where} no such option {error.option_name}{_instead(error, path)}"
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    if kind == "BadParameter":
        text = _bad_value(text)
    text = re.sub(r"\. Did you mean '(.*?)'.*", r"; did you mean \1?", text)
    return f"{where} {text[:1].lower()}{text[1:]}{'' if text.endswith('?') else _see_help(path)}"


def _instead(error: Any, path: str) -> str:
    """What to type instead of an option that the command does not have."""
    if hint := _recipe_key(error.option_name, path):
        return hint
    close = [option for option in error.possibilities or () if option != "--help"]
    return f"; did you mean {close[0]}?" if close else _see_help(path)


def _bad_value(text: str) -> str:
    """The message about an option's value: the option, the value as typed, and the reason in plain words."""
    found = re.match(r"Invalid value for '?(-[-\w]+)[^:]*: (.*)", text)
    if found is None:
        return text
    option, why = found.groups()
    for pattern, words in REASONS.items():
        if match := re.search(pattern, why):
            why = words.format(*match.groups())
    return f"{option} {_value_typed_for(option)}: {why}"


REASONS = {
    r"greater than or equal to (\S+)": "it must be at least {0}",
    r"less than or equal to (\S+)": "it must be at most {0}",
    r"(?:is )?not in the range x>=(\S+)": "it must be at least {0}",
    r"valid integer": "it must be a whole number",
    r"valid number": "it must be a number",
    r"'.*' is not one of (.*)": "choose one of {0}",
}


def _value_typed_for(option: str) -> str:
    for place, word in enumerate(sys.argv):
        if word.startswith(f"{option}="):
            return word.partition("=")[2][:LONGEST]
        if word == option and place + 1 < len(sys.argv):
            return sys.argv[place + 1][:LONGEST]
    return ""


def _see_help(path: str) -> str:
    return f"; see {path} --help"


def _recipe_key(option: str, path: str) -> str:
    """A hint at the recipe key that an option of this name may mean."""
    from delta_cli.recipe.messages import setting

    if path.split()[-1] not in ("train", "doctor", "study", "parity"):
        return ""
    name = setting(option.lstrip("-").replace("-", "_"))
    return f"; to set a key of the recipe: --set {name}=VALUE" if name else ""
