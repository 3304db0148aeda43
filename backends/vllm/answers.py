"""The answers of a vLLM server: every field is checked here, once, before anything uses it."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.arrays import Floats

# vLLM writes −9999 for −∞, the log-probability of a token that cannot be drawn; rounding may give slightly more than 0.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogProbability = Annotated[float, Field(gt=-9999, le=1e-3, allow_inf_nan=False)]


class VllmAnswer(BaseModel):
    """The fields that are used; the other fields of an answer are not looked at."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class VersionAnswer(VllmAnswer):
    """Of /version."""

    version: str


class ModelEntry(VllmAnswer):
    """A model that the server offers."""

    id: str = Field(min_length=1)


class ModelsAnswer(VllmAnswer):
    """Of /v1/models."""

    data: list[ModelEntry] = Field(min_length=1)


class WeightsAnswer(VllmAnswer):
    """Of /weight_info: the label that the last load of weights left, "default" after a start."""

    weight_version: str


class ControlAnswer(VllmAnswer):
    """Of the routes that pause, resume, sleep or empty a cache."""

    success: bool = True


class TokenLogprobs(VllmAnswer):
    """Log-probabilities of a completion's tokens."""

    token_logprobs: list[LogProbability] = Field(min_length=1)


class VersionSpan(VllmAnswer):
    """The label of the weights that drew the tokens from ``start`` to before ``end``."""

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class DrawnChoice(VllmAnswer):
    """A response, with as many log-probabilities as it has tokens."""

    token_ids: list[TokenId] = Field(min_length=1)
    logprobs: TokenLogprobs
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class LikeliestLogprobs(VllmAnswer):
    """The likeliest tokens at each position of a completion, by their text."""

    top_logprobs: list[Annotated[dict[str, LogProbability], Field(min_length=1)]] = Field(min_length=1)


class LikeliestChoice(VllmAnswer):
    """A completion of which the likeliest tokens were asked for."""

    logprobs: LikeliestLogprobs


class PromptLogprob(VllmAnswer):
    """Of a token at one position of a prompt."""

    logprob: LogProbability


class ScoredChoice(VllmAnswer):
    """A completion of which the prompt's log-probabilities were asked for: by token id, None for its first token."""

    prompt_logprobs: list[dict[str, PromptLogprob] | None] = Field(min_length=1)


Choice = TypeVar("Choice", bound=VllmAnswer)
Answer = TypeVar("Answer", bound=VllmAnswer)


class CompletionAnswer(VllmAnswer, Generic[Choice]):
    """Of /v1/completions: always one completion."""

    choices: list[Choice] = Field(min_length=1, max_length=1)


class MalformedAnswer(Exception):
    """An answer that is not what the route should answer; the message names the field."""


def parse(text: bytes, kind: type[Answer]) -> Answer:
    """The answer in a body. Raises MalformedAnswer, which names the first field that is wrong and what it holds."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise MalformedAnswer(f"the answer cannot be read ({first['msg']}): {shown(text)}") from None
        raise MalformedAnswer(f"field {_path(first['loc'])} is {shown(first['input'])}: {first['msg']}") from None


def float32(values: list[float]) -> Floats:
    """Log-probabilities as the backends hold them, at most 0."""
    return np.minimum(np.array(values, np.float32), 0)


def _path(location: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).lstrip(".")


def shown(value: Any) -> str:
    """A value from outside in a few printable characters; of text and bytes, their characters."""
    words = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)[:1000]
    line = "".join(each if each.isprintable() else " " for each in words).strip()
    return line if len(line) <= 60 else f"{line[:60]}…"
