"""The model behind the endpoints: how requests become prompts, and what may be asked of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.arrays import Ids
from backends.interface import Sampling
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.serving.requests import ChatRequest, RefusedRequest, SamplingParams

LONGEST_CONTEXT = 2**17  # tokens, of a model whose config names no limit


@dataclass(frozen=True)
class EndpointModel:
    """A model's name, tokenizer and limits. Refusals are RefusedRequest with the field that is wrong."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int  # ids the model reads
    context: int  # tokens of a prompt and its response together
    max_tokens: int  # of a response
    template: str | None = None  # in which a single question is asked; None: in the chat template
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            raise RefusedRequest(f"there is no model {name[:100]!r} here, only {self.name!r}", "model", status=404)

    def check_prompt(self, ids: Sequence[int] | Ids, where: str) -> Ids:
        """The prompt as an array; refuses ids that the model does not have, and a prompt that fills its context."""
        if not len(ids):
            raise RefusedRequest("the prompt has no tokens", where)
        if len(ids) >= self.context:
            raise RefusedRequest(
                f"the prompt has {len(ids)} tokens, and the model reads {self.context}, the response included", where
            )
        wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise RefusedRequest(f"token id {wrong} is not in the model's vocabulary of {self.vocabulary}", where)
        return np.asarray(ids, dtype=np.int64)

    def text_prompt(self, text: str) -> Ids:
        """The token ids of a text, with the tokens that the tokenizer puts around it."""
        return self.check_prompt(self.tokenizer.encode(text), "prompt")

    def chat_prompt(self, request: ChatRequest) -> Ids:
        """The token ids of a conversation, up to the beginning of the next answer.

        A single question is asked in ``template`` if there is one, as in training and in ``delta chat``.
        """
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        switches = request.chat_template_kwargs.model_dump(exclude_none=True)
        try:
            if self.template is not None and [message["role"] for message in messages] == ["user"]:
                ids = encode_prompt(Problem("chat", messages[0]["content"], ""), self.template, self.tokenizer)
            elif self.tokenizer.converses:
                ids = self.tokenizer.encode(self.tokenizer.converse(messages, **switches), special=False)
            else:
                raise RefusedRequest("this model has no chat template; send one message with the role user", "messages")
        except UserError as error:
            raise RefusedRequest(str(error), "messages") from error
        return self.check_prompt(ids, "messages")

    def sampling(self, params: SamplingParams, prompt: int, where: str = "", limit: int | None = None) -> Sampling:
        """The sampling parameters of a request whose prompt has ``prompt`` tokens.

        ``where`` is put before the names of fields in refusals; ``limit`` is the request's own limit on tokens, if it
        has another name than max_tokens.
        """
        asked, room = limit or params.max_tokens, self.context - prompt
        if asked is not None and asked > self.max_tokens:
            raise RefusedRequest(f"{asked} is more than this server's limit of {self.max_tokens}", where + "max_tokens")
        if asked is not None and asked > room:
            raise RefusedRequest(
                f"{asked} is more than the {room} tokens that a prompt of {prompt} leaves of the model's "
                f"{self.context}",
                where + "max_tokens",
            )
        temperature = 1.0 if params.temperature is None else params.temperature
        if temperature == 0 and params.n > 1:
            raise RefusedRequest("temperature 0 gives the same response every time; leave n out", where + "n")
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        return Sampling(
            max_tokens=asked or min(self.max_tokens, room),
            stop_ids=tuple(sorted({*ends, *(params.stop_token_ids or ())})),
            temperature=temperature,
            top_p=params.top_p or 1.0,
            samples=params.n,
            top_k=max(params.top_k or 0, 0),
            min_p=params.min_p or 0.0,
            stop=self.tokenizer.stop_text(params.stops),
        )
