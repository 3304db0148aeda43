"""What clients may send: the fields of vLLM's token endpoint and of OpenAI's completions and chat completions.

Every field is checked here, once. A field that this server cannot honour is accepted with its neutral value only, so
that no setting is ignored in silence.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MOST_RESPONSES = 128  # to one prompt
MOST_PROMPTS = 1024  # of one request
MOST_STOPS = 16  # stop strings, and stop ids, of one request
LONGEST_STOP = 256  # characters

PromptTokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Request = TypeVar("Request", bound="ServedRequest")


class RefusedRequest(Exception):
    """A request that is not answered: a status, a line that says why, and the field that is wrong."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        self.field, self.status = field, status
        super().__init__(message if field is None else f"{field}: {message}")


def _only(*neutral: object) -> Any:
    def check(value: object) -> object:
        if value is not None and value not in neutral:
            shown = " or ".join(map(repr, neutral)) if neutral else "leaving it out"
            raise ValueError(f"this server supports only {shown}")
        return value

    return AfterValidator(check)


class ServedRequest(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SamplingParams(ServedRequest):
    """How to sample. Names and defaults are OpenAI's, and vLLM's for what OpenAI does not have."""

    n: int = Field(1, ge=1, le=MOST_RESPONSES)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: all
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[StopString] | None = None
    stop_token_ids: list[PromptTokenId] | None = Field(None, max_length=MOST_STOPS)
    ignore_eos: bool = False

    # Accepted with a neutral value only.
    frequency_penalty: Annotated[float | None, _only(0)] = None
    presence_penalty: Annotated[float | None, _only(0)] = None
    repetition_penalty: Annotated[float | None, _only(1)] = None
    min_tokens: Annotated[int | None, _only(0)] = None
    logit_bias: Annotated[dict[str, Any] | None, _only({})] = None
    prompt_logprobs: Annotated[int | None, _only()] = None

    # They change nothing about token ids.
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    routed_experts_prompt_start: int | None = None

    @field_validator("temperature")
    @classmethod
    def _not_almost_zero(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.01:
            raise ValueError("use 0 for the likeliest token, or at least 0.01")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MOST_STOPS or not all(0 < len(string) <= LONGEST_STOP for string in strings):
            raise ValueError(f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of sampled tokens are requested: by a number of others, or by true."""
        asked: int | None = getattr(self, "logprobs", None)
        return asked is not None and asked is not False


class GenerateParams(SamplingParams):
    """The sampling parameters of the token endpoint."""

    logprobs: int | None = Field(None, ge=0, le=1)


class GenerateRequest(ServedRequest):
    """Of the token endpoint: a prompt as token ids."""

    token_ids: list[PromptTokenId] = Field(min_length=1)
    sampling_params: GenerateParams
    model: str | None = None
    request_id: str | None = Field(None, max_length=256)
    stream: Annotated[bool | None, _only(False)] = None
    features: Annotated[dict[str, Any] | None, _only()] = None  # of images and sounds
    kv_transfer_params: Annotated[dict[str, Any] | None, _only()] = None
    priority: Annotated[int | None, _only(0)] = None
    cache_salt: str | None = None  # nothing is cached between requests


class StreamOptions(ServedRequest):
    """What a stream contains besides the answers."""

    include_usage: bool = False


class TextRequest(SamplingParams):
    """What OpenAI's two forms share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None


class CompletionRequest(TextRequest):
    """Of /v1/completions."""

    prompt: Any  # a text, a list of token ids, or a list of either
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: Annotated[bool | None, _only(False)] = None
    suffix: Annotated[str | None, _only()] = None
    best_of: Annotated[int | None, _only(1)] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids. Raises RefusedRequest for anything else."""
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if given is self.prompt and all(type(item) is int for item in given):
            given = [given]
        texts = all(isinstance(item, str) for item in given)
        ids = all(isinstance(item, list) and all(type(each) is int for each in item) for item in given)
        if not given or len(given) > MOST_PROMPTS or not (texts or ids):
            raise RefusedRequest(
                f"must be a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} of either", "prompt"
            )
        return given


class TextPart(ServedRequest):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(ServedRequest):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TemplateKwargs(ServedRequest):
    """Switches of the model's chat template."""

    enable_thinking: bool | None = None


class ChatRequest(TextRequest):
    """Of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_PROMPTS)
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, _only(0)] = None
    chat_template_kwargs: TemplateKwargs = TemplateKwargs()
    response_format: Annotated[dict[str, Any] | None, _only({"type": "text"})] = None
    tools: Annotated[list[Any] | None, _only([])] = None
    tool_choice: Annotated[str | None, _only("none", "auto")] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


def parse_request(body: bytes, kind: type[Request]) -> Request:
    """The request in a body. Raises RefusedRequest, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid" or not first["loc"]:
        raise RefusedRequest(f"the body is not a JSON object of this request ({reason})")
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
    if first["type"] == "missing":
        reason = "is missing"
    elif first["type"] == "extra_forbidden":
        reason = "this server does not know this field; leave it out"
    else:
        reason = f"{reason}, not {reprlib.repr(first['input'])}"
    raise RefusedRequest(reason, "".join(names).removeprefix("."))
