"""The environments of a run, opened as its recipe says."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.calculator import RunningCalculator, calculate
from delta_cli.environments.dialogue import Dialogue, open_dialogue
from delta_cli.environments.processes import EnvironmentProcesses, ProcessSession
from delta_cli.environments.python_tool import SCHEMA, PythonTool
from delta_cli.environments.schema import ToolSchema, tool_schema
from delta_cli.environments.turn import EpisodeSession, Row, ToolError, Turn
from delta_cli.errors import UserError
from delta_cli.recipe.environment import SHIPPED_ENVIRONMENTS, SHIPPED_TOOLS, EnvironmentSection
from delta_cli.rewards.code.sandbox import find_sandbox


class Environments:
    """Makes the environment of each episode, for the model at ``model`` with this tokenizer.

    ``dialogue`` is the form of a chat with tools; None for a text environment. Raises UserError if the user's code does
    not load, or the model's chats cannot be extended token by token.
    """

    def __init__(
        self, section: EnvironmentSection, tokenizer: Tokenizer, model: str, thinking: bool | None = None
    ) -> None:
        self.section = section
        self.python = "python" in section.tools
        self.calculator = "calculator" in section.tools
        if self.python:
            find_sandbox(section.allow_unsandboxed)
        own = tuple(name for name in section.tools if name not in SHIPPED_TOOLS)
        file = None if section.file in SHIPPED_ENVIRONMENTS else section.file
        self._processes: EnvironmentProcesses | None = None
        if file is not None or own:
            _allow_open_files()
            kind = section.kind or "text"
            self._processes = EnvironmentProcesses(kind, file, own, section.seconds, section.errors == "tell")
        self.dialogue: Dialogue | None = None
        if section.kind == "tools":
            try:
                self.dialogue = open_dialogue(tokenizer, model, section.renderer, self.tools, thinking)
            except UserError:
                self.close()
                raise

    def __enter__(self) -> Environments:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tools(self) -> list[ToolSchema]:
        """The schemas of all tools."""
        shipped = ([SCHEMA] if self.python else []) + (
            [tool_schema(calculate, "calculator")] if self.calculator else []
        )
        return shipped + (self._processes.tools if self._processes is not None else [])

    @property
    def has_reset(self) -> bool:
        """Whether an environment class begins each episode."""
        return self.section.file is not None and self._processes is not None

    @property
    def quick(self) -> bool:
        """Whether it answers in this process, in microseconds."""
        return self._processes is None and not self.python

    def session(self) -> EpisodeSession:
        """The environment of one episode."""
        if self.section.kind == "text":
            return RunningCalculator() if self._processes is None else self._processes.session()
        return ToolsSession(
            self._processes.session if self._processes is not None else None,
            PythonTool(self.section.seconds, self.section.allow_unsandboxed) if self.python else None,
            self.calculator,
        )

    def close(self) -> None:
        """End all processes."""
        if self._processes is not None:
            self._processes.close()


class ToolsSession:
    """The shipped tools, and the user's in a process that starts when it is needed; see ``turn.EpisodeSession``."""

    def __init__(self, start: Callable[[], ProcessSession] | None, python: PythonTool | None, calculator: bool) -> None:
        self._start, self._python, self._calculator = start, python, calculator
        self._process: ProcessSession | None = None

    def reset(self, row: Row) -> str | None:
        return None if self._start is None else self._own().reset(row)

    def step(self, text: str) -> Turn:
        """Tools have no steps."""
        raise NotImplementedError("tools are called; only games and custom environments take steps")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "python" and self._python is not None:
            return self._python.call(arguments.get("code"))
        if name == "calculator" and self._calculator:
            return calculate(str(arguments.get("expression", "")))
        if self._start is None:
            raise ToolError(f"there is no tool {name[:60]!r}")
        return self._own().call(name, arguments)

    def reward(self) -> float | None:
        return self._process.reward() if self._process is not None else None

    def close(self) -> None:
        """End what runs for the episode."""
        if self._process is not None:
            self._process.close()
        if self._python is not None:
            self._python.close()

    def _own(self) -> ProcessSession:
        assert self._start is not None
        if self._process is None:
            self._process = self._start()
        return self._process


def _allow_open_files() -> None:
    """Each episode holds a socket; the usual limit of open files is below a batch of responses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
