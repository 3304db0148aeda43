"""What a response is worth: one ``[reward]``, or several ``[[reward]]`` that are added up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Discriminator, Tag, model_validator

from backends.settings import RewardModelSettings, Section, key

ONE, SEVERAL = "[reward]", "[[reward]]"  # the two forms, as messages name them
RewardKind = Literal["math", "number", "choice", "code", "custom", "environment", "judge", "model", "format", "length"]
VERIFIERS = ("math", "number", "choice", "code")
FALLBACKS = ("custom", "environment", "judge", "model")  # they say what is right where no verifier does
TAKEN = ("mean", "failures")  # reward_mean and reward_failures are metrics of their own
NAME = re.compile("[a-z][a-z0-9_]*")


class JudgeSection(Section):
    """A language model behind an OpenAI-compatible endpoint that scores responses."""

    url: str = key("http://127.0.0.1:8000/v1", "the endpoint, up to /chat/completions", min_length=1)
    model: str = key("default", "name of the model there", min_length=1)
    template: str = key(
        "Question: {question}\n\nReference answer: {answer}\n\nResponse: {response}\n\nDoes the response "
        "reach the reference answer by sound reasoning? End with a line 'Score: N', N from 0 (no) to 10 (fully).",
        "prompt of the judge, or a .txt file of it: {question}, {answer}, {response} and the columns of data.columns",
        min_length=1,
    )
    pattern: str = key(
        r"[Ss]core:\s*([0-9.]+)", "regular expression of the score in its answer: the first group of the last match"
    )
    best: float = key(10.0, "its highest score; the reward is score / best", gt=0)
    right: float | None = key(None, "score from which a response counts as right; absent: best", gt=0)
    temperature: float = key(0.0, "sampling temperature", ge=0, le=2)
    max_tokens: int = key(1024, "longest answer", "tokens", ge=1)
    concurrency: int = key(16, "requests at a time", "requests", ge=1, le=1024)
    timeout: float = key(60.0, "longest wait for one answer", "seconds", gt=0)
    retries: int = key(4, "repetitions of a request that failed or has no score", ge=0, le=100)
    deadline: float = key(300.0, "longest wait for a verdict, repetitions included", "seconds", gt=0)
    key_variable: str = key("OPENAI_API_KEY", "environment variable that holds the key of the endpoint", min_length=1)
    price_prompt: float = key(0.0, "price of a million prompt tokens, for the metric judge_cost", ge=0)
    price_completion: float = key(0.0, "price of a million tokens of its answers", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reward.judge.url = {self.url!r} is no address; write http://host:port/v1")
        try:
            groups = re.compile(self.pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"reward.judge.pattern is no regular expression: {error}") from None
        if groups == 0:
            raise ValueError("reward.judge.pattern has no group; put parentheses around the score")
        return self


class RewardModelSection(RewardModelSettings):
    """A local reward model, and how its logit becomes a reward."""

    sigmoid: bool = key(False, "whether the score is the logit's sigmoid, between 0 and 1")
    scale: float = key(1.0, "factor of the score, after the sigmoid", ge=-1000, le=1000)
    clip: float | None = key(None, "the reward is cut off at plus and minus this value; absent: not", gt=0)
    right: float = key(0.5, "reward from which a response counts as right")
    timeout: float = key(300.0, "longest wait for the scores of a group", "seconds", gt=0)


class Reward(Section):
    """What a response is worth. Several, each a table [[reward]], are added up by weight."""

    kind: RewardKind = key(
        "math",
        "verifier; number: the last number of a response, or the one after ####, without a box; environment: the "
        "reward of the episode's own environment, where 1 is right; judge: a language model's score; model: that of a "
        "local reward model (both in docs/judges.md). "
        "Beside a verifier also format: 1 for the form asked for, and length: 1 − tokens / rollout.max_tokens",
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
    group: bool = key(
        False, "custom: the function compares all responses to a prompt: reward(responses, problem) -> list of floats"
    )
    judge: JudgeSection | None = key(None, "judge: the endpoint, its prompt and its limits")
    model: RewardModelSection | None = key(None, "model: the reward model, and how its logit becomes a reward")
    max_failed: float = key(
        0.5, "judge, model: share of a batch's responses without a verdict above which the run stops", ge=0, le=1
    )
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
        if self.group and self.kind != "custom":
            raise ValueError('reward.group is for a function of your own; set reward.kind = "custom", or remove it')
        if self.judge is not None and self.kind != "judge":
            raise ValueError('[reward.judge] is for a judge; set reward.kind = "judge", or remove it')
        if (self.model is not None) != (self.kind == "model"):
            raise ValueError('reward.kind = "model" and [reward.model] belong together; add the other, or remove one')
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
    """The rewards that say whether a response is right: those of VERIFIERS, or of FALLBACKS where there is none."""
    own = tuple(reward for reward in rewards if reward.kind in VERIFIERS)
    return own or tuple(reward for reward in rewards if reward.kind in FALLBACKS)


def check_rewards(rewards: Sequence[Reward], max_tokens: int) -> None:
    """Raise ValueError where rewards do not go together, or with responses of at most ``max_tokens``."""
    titles = [reward.title for reward in rewards]
    if repeated := [title for title in titles if titles.count(title) > 1]:
        raise ValueError(f"two rewards are called {repeated[0]}; give one of them another reward.name")
    if not verifiers(rewards):
        raise ValueError(
            f"no reward says which responses are right; add a [[reward]] of kind {_or((*VERIFIERS, *FALLBACKS))}"
        )
    for reward in rewards:
        if (buffer := reward.overlong_buffer) is not None and buffer > max_tokens:
            raise ValueError(f"reward.overlong_buffer = {buffer} is longer than rollout.max_tokens")
        plain = len(rewards) == 1 and reward.weight == 1 and reward.kind in VERIFIERS and reward.code == "all"
        if reward.flip and not plain:
            raise ValueError(
                "reward.flip turns 1 into 0 and 0 into 1; it needs a single reward of weight 1 and kind math, number, "
                "choice, or code with all"
            )


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
