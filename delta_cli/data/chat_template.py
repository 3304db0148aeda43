"""Chat templates: Jinja programs that come with a model, from anyone. They run in a sandbox, and are tried first.

Run as a script, this file tries a template with limits on time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2  # of processor time to render two conversations; a usual template takes a thousandth of a second
BYTES = 2**30  # of address space meanwhile
CHARACTERS = 10**6  # that a template may write around a conversation
LONG_QUESTION = "Why is 1 + 1 = 2? " * 500  # loops over characters show their cost


class TemplateError(Exception):
    """A chat template cannot be used; the message says why, on one line."""


def render(template: str, names: Mapping[str, object]) -> str:
    """The template's text with these variables. Raises TemplateError if it refuses, or takes too much when tried."""
    try_out(template)
    try:
        return _compiled(template).render(names)
    except Exception as error:  # a template is a program and raises whatever it likes
        raise TemplateError(_first_line(error)) from error


@lru_cache(maxsize=8)
def try_out(template: str) -> None:
    """Render two conversations in another process. Raises TemplateError if that exceeds its limits."""
    command, text = [sys.executable, "-P", __file__], template.encode(errors="surrogatepass")
    try:
        found = subprocess.run(command, input=text, capture_output=True, timeout=10 * SECONDS)
    except subprocess.TimeoutExpired:
        raise TemplateError(f"it takes longer than {SECONDS} s to render a conversation") from None
    if found.returncode:
        said = found.stdout.decode(errors="replace").strip()
        raise TemplateError(said or f"it takes more than {SECONDS} s or {BYTES // 2**30} GiB to render a conversation")


def _try_here() -> int:
    """Render what ``try_out`` asks for. What a template refuses is left to the prompt that it refuses."""
    import resource

    for limit, value in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, BYTES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    try:
        template = _compiled(sys.stdin.buffer.read().decode(errors="surrogatepass"))
        for question in ("1+1=?", LONG_QUESTION):
            messages = [{"role": "user", "content": question}]
            try:
                text = template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None)
            except (MemoryError, OverflowError, RecursionError):
                raise
            except Exception:  # it wants another role, a system message, a tool: not what is tried here
                continue
            if len(text) > CHARACTERS:
                print(f"it writes {len(text):,} characters for a conversation of {len(question):,}")
                return 1
    except (MemoryError, OverflowError, RecursionError):
        print(f"it takes more than {BYTES // 2**30} GiB to render a conversation")
        return 1
    except jinja2.TemplateError:
        return 0  # not a template at all, which rendering says
    return 0


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """The compiled template. Compiling takes longer than rendering, and every prompt renders it."""
    return _environment().from_string(template)


class _Generation(Extension):
    """The block ``generation``, which marks the assistant's part; it has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 the base class's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment that chat templates on the hub are written for, in Jinja's sandbox."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    sys.exit(_try_here())
