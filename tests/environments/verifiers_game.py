"""An environment in the form of the package verifiers: three turns, driven in this process without another program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Game", "GameProgram"]


class GameData(vf.TaskData):
    """A sum; some tasks break their episode."""

    breaks: bool = False


class GameTask(vf.Task[GameData]):
    """Replies of an odd number of characters win."""

    @vf.reward
    async def odd(self, task: GameData, trace: Any) -> float:
        if task.breaks:
            raise RuntimeError("the board fell over")
        return float(len(trace.last_reply) % 2)


class Game(vf.Taskset[GameTask]):
    """Twelve tasks."""

    def load(self) -> Iterator[GameTask]:
        for number in range(12):
            yield GameTask(GameData(prompt=f"{number}+{number}=?", breaks=number % 5 == 4), self.config.task)


class GameProgram(Harness[HarnessConfig]):
    """Asks the model three times in one conversation."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            for turn in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": f"and {turn}?"})
        return ProgramResult(exit_code=0, stdout="", stderr="")
