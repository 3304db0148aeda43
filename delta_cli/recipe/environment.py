"""The section [environment]: what answers between the turns of an episode."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from backends.settings import Section, key

SHIPPED_TOOLS = ("python", "calculator")
SHIPPED_ENVIRONMENTS = ("calculator",)  # of kind text


class EnvironmentSection(Section):
    """Episodes of several turns: what answers when the model ends a turn. Absent: a response is one turn."""

    kind: Literal["text", "tools", "verifiers"] | None = key(
        None,
        "text: the environment writes into the running text, for base models and games; tools: the model calls tools "
        "in its chat template; verifiers: an environment of the package verifiers",
    )
    id: str | None = key(
        None, "kind verifiers: the installed environment (taskset), which also gives the problems", min_length=1
    )
    file: str | None = key(
        None,
        'the environment\'s class as FILE.py:CLASS, or the shipped "calculator" of kind text; kind verifiers: a TOML '
        "file with the environment's own settings",
        min_length=1,
    )
    tools: tuple[str, ...] = key(
        (), "kind tools: functions as FILE.py:FUNCTION, and the shipped python and calculator", strict=False
    )
    renderer: str = key(
        "auto",
        "kinds tools and verifiers: what extends a chat token by token: a name of the package renderers such as "
        '"qwen3", "template" for the model\'s chat template; auto: by the model\'s name, else its template',
        min_length=1,
    )
    turns: int = key(8, "turns of the model in an episode, at most", "turns", ge=1, le=1000)
    observation_tokens: int = key(
        256, "longest text of the environment after a turn; more is cut, with a mark", "tokens", ge=8, le=10**6
    )
    seconds: float = key(10.0, "longest call of the environment; then the episode fails", "seconds", gt=0, le=3600)
    workers: int = key(16, "calls of environments at the same time; kind verifiers: episodes", "calls", ge=1, le=1024)
    errors: Literal["tell", "fail"] = key(
        "tell", "an exception in step or a tool: tell the model its text, or fail the episode"
    )
    allow_unsandboxed: bool = key(False, "python: run without a sandbox; only on a machine you can lose")

    @property
    def used(self) -> bool:
        """Whether responses are episodes."""
        return self.kind is not None

    @property
    def identity(self) -> str | None:
        """A text that tells environments apart; None without one."""
        return self.model_dump_json(exclude_defaults=True, exclude={"workers"}) if self.used else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.id is not None and self.kind != "verifiers":
            raise ValueError('environment.id needs environment.kind = "verifiers"')
        if self.kind == "verifiers":
            if self.id is None or self.tools:
                raise ValueError('environment.kind = "verifiers" needs environment.id, and no environment.tools')
            return self
        if self.kind is None:
            named = [name for name in ("file", "tools") if getattr(self, name)]
            if named:
                raise ValueError(f'environment.{named[0]} needs environment.kind = "text", "tools" or "verifiers"')
        elif self.kind == "text":
            if self.file is None:
                raise ValueError('environment.kind = "text" needs environment.file = "FILE.py:CLASS" or "calculator"')
            if self.tools:
                raise ValueError('environment.tools is for environment.kind = "tools"; remove it')
        elif not (self.file or self.tools):
            raise ValueError('environment.kind = "tools" needs environment.tools, environment.file or both')
        names = [*(() if self.file is None else (self.file,)), *self.tools]
        shipped = (*SHIPPED_TOOLS, *SHIPPED_ENVIRONMENTS)
        if odd := [
            name for name in names if name not in shipped and not (".py:" in name and name.partition(".py:")[2])
        ]:
            raise ValueError(
                f"environment: {odd[0]!r} is neither of the form FILE.py:NAME nor shipped "
                f"({', '.join(dict.fromkeys(shipped))})"
            )
        if self.kind == "tools" and self.file in shipped:
            raise ValueError(f'environment.file = "{self.file}" is of kind text; put it into environment.tools')
        return self
