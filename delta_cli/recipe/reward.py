"""What a response is worth: one ``[reward]``, or several ``[[reward]]`` that are added up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from backends.settings import Section, key

ONE, SEVERAL = "[reward]", "[[reward]]"  # the two forms, as messages name them
RewardKind = Literal["math", "number", "choice", "code", "custom", "environment", "format", "length"]
VERIFIERS = ("math", "number", "choice", "code")
JUDGES = ("custom", "environment")  # they say what is right where no verifier does
TAKEN = ("mean", "failures")  # reward_mean and reward_failures are metrics of their own
NAME = re.compile("[a-z][a-z0-9_]*")


class Reward(Section):
    """What a response is worth. Several, each a table [[reward]], are added up by weight."""

    kind: RewardKind = key(
        "math",
        "verifier; number: the last number of a response, or the one after ####, without a box; environment: the "
        "reward of the episode's own environment, where 1 is right. Beside a verifier also "
        "format: 1 for the form asked for, and length: 1 − tokens / rollout.max_tokens",
    )
    weight: float = key(1.0, "its factor in the sum; 0: only measured", ge=-1000, le=1000)
    name: str | None = key(None, "what metrics and --set reward.NAME.KEY call one of several; absent: its kind")
    verifier: Literal["strict", "math-verify", "public"] = key(
        "strict", "math: ours, the library alone on the whole response, or the public script's; the others accept more"
    )
    code: Literal["all", "share"] = key("all", "code: 1 when every test passes, or the share that does")
    allow_unsandboxed: bool = key(False, "code: run responses without a sandbox; only on a machine you can lose")
    run_seconds: float = key(6.0, "code: wall-clock time of a response's whole test run", "seconds", gt=0)
    custom_file: str | None = key(None, "custom: a Python file with reward(response, problem) -> float; 1 is right")
    custom_function: str = key("reward", "custom: the function's name")
    pattern: str | None = key(
        None,
        "format: regular expression of the whole response (a dot is any character); absent: one answer in the form "
        "that the verifier beside it reads",
    )
    format_bonus: float = key(0.0, "added where a response has exactly one closed \\boxed{}", ge=-10, le=10)
    length_penalty: float = key(0.0, "subtracted for every thousand tokens of a response", ge=0, le=10)
    overlong_buffer: int | None = key(None, "overlong shaping starts so many tokens before max_tokens", "tokens", ge=1)
    overlong_factor: float = key(1.0, "weight of overlong shaping", ge=0, le=10)
    flip: float = key(0.0, "share of rewards flipped at random between right and wrong, to study noise", ge=0, le=0.5)
    workers: int = key(2, "processes that verify", "processes", ge=1, le=256)
    timeout: float = key(10.0, "longest verification; then the worker is killed and the reward is 0", "seconds", gt=0)

    @property
    def title(self) -> str:
        """What it is called among several."""
        return self.name or self.kind

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "custom" and self.custom_file is None:
            raise ValueError('reward.kind = "custom" needs reward.custom_file')
        if not NAME.fullmatch(self.title) or self.title in TAKEN:
            raise ValueError(f"reward.name = {self.title!r}: use small letters, digits and _, and not {_or(TAKEN)}")
        if self.pattern is not None and self.kind != "format":
            raise ValueError('reward.pattern is for reward.kind = "format"; add a [[reward]] of that kind')
        try:
            re.compile(self.pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"reward.pattern is no regular expression: {error}") from None
        return self


def _form(value: Any) -> str:
    return SEVERAL if isinstance(value, list | tuple) else ONE


RewardTables = Annotated[
    Annotated[Reward, Tag(ONE)] | Annotated[tuple[Reward, ...], Tag(SEVERAL)],
    Discriminator(_form),
]


def verifiers(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """The rewards that say whether a response is right: those of VERIFIERS, or of JUDGES where there is none."""
    own = tuple(reward for reward in rewards if reward.kind in VERIFIERS)
    return own or tuple(reward for reward in rewards if reward.kind in JUDGES)


def check_rewards(rewards: Sequence[Reward], max_tokens: int) -> None:
    """Raise ValueError where rewards do not go together, or with responses of at most ``max_tokens``."""
    titles = [reward.title for reward in rewards]
    if repeated := [title for title in titles if titles.count(title) > 1]:
        raise ValueError(f"two rewards are called {repeated[0]}; give one of them another reward.name")
    if not verifiers(rewards):
        raise ValueError(
            f"no reward says which responses are right; add a [[reward]] of kind {_or((*VERIFIERS, *JUDGES))}"
        )
    for reward in rewards:
        if (buffer := reward.overlong_buffer) is not None and buffer > max_tokens:
            raise ValueError(f"reward.overlong_buffer = {buffer} is longer than rollout.max_tokens")
        plain = len(rewards) == 1 and reward.weight == 1 and reward.kind != "custom" and reward.code == "all"
        if reward.flip and not plain:
            raise ValueError(
                "reward.flip turns 1 into 0 and 0 into 1; it needs a single reward of weight 1 and kind math, number, "
                "choice, or code with all"
            )


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
