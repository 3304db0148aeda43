"""The documents as blocks of code, and what runs them.

Conventions of the documents, which docs/README.md states for readers:

- ```console: commands after ``$``, each followed by what it prints; ``...`` matches anything;
- ```python, ```toml, ```json: a file where the first line is a comment with its name; other python runs, and a
  ```text block that follows is what it prints; other toml is part of a recipe;
- ```sh: commands that a test does not run, because they need another machine or more time.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import delta

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *DOCS]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# ([\w.-]+\.\w+)\n")
NUMBER = r"[-+−]?\d[\d.,:]*(?:e[-+]?\d+)?"  # with a point, a comma or a colon inside: it differs from run to run
VARIABLE = re.compile(r"(\.\.\.)|([-+−]?\d+(?:[.,:]\d+)+(?:e[-+]?\d+)?|\d+(?= tokens/s))|(\s+)|([━─]{2,})")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it begins on."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        match = NAME.match(self.text) if self.language in ("python", "toml") else None
        return match[1] if match else None

    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console block and what it prints."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0], f"line {self.line}: a console block begins with $"
        joined = (part.replace("\\\n", " ") for part in parts[1:])
        return [(command, output) for command, _, output in (part.partition("\n") for part in joined)]


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    return [Block(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in FENCE.finditer(text)]


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def shows(expected: str, printed: str) -> bool:
    """Whether a document's output is what was printed.

    ``...`` is any text; numbers with a point, comma or colon, speeds, spaces and ruled lines may differ; all
    else, whole numbers included, is as written.
    """
    expected, pattern, end = expected.strip(), "", 0
    for match in VARIABLE.finditer(expected):
        pattern += re.escape(expected[end : match.start()])
        anything, number, space, _ = match.groups()
        pattern += ".*" if anything else NUMBER if number else r"\s+" if space else "[━─]+"
        end = match.end()
    pattern += re.escape(expected[end:])
    pattern = pattern.replace(r"\s+.*", r"\s*.*").replace(r".*\s+", r".*\s*")  # what was left out may be nothing
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def run(document: Path, folder: Path) -> None:
    """Do what a document says, in an empty folder that is the working directory."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    namespace: dict[str, Any] = {}
    printed = ""
    for block in blocks(document):
        where = f"{document.name}, line {block.line}"
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            printed = _execute(block.text, where, namespace)
        elif block.language == "text":
            _compare(block.text, printed, where)
        elif block.language == "console":
            for command, output in block.commands():
                code, said = _delta(command) if command.startswith("delta ") else _shell(command)
                _compare(output, said, f"{where}: {command}")
                assert (code != 0) == output.startswith("delta: "), f"{where}: {command}: exit code {code}"


def _compare(expected: str, printed: str, where: str) -> None:
    assert shows(expected, printed), f"{where}\n--- the document\n{expected}\n--- what was printed\n{printed}"


def _execute(code: str, where: str, namespace: dict[str, Any]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(code, where, "exec"), namespace)
    return out.getvalue()


def _shell(command: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, **output)
    return done.returncode, done.stdout


def _delta(command: str) -> tuple[int, str]:
    """``delta`` in this process; exit code and output."""
    arguments, _, target = command.partition(" > ")
    said = delta(*shlex.split(arguments)[1:], merged=True)
    if target:
        Path(target).write_text(said.out, encoding="utf-8")
    return said.code, "" if target else said.out
