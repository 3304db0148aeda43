"""The bodies of answers, in the forms of vLLM's token endpoint and of OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from backends.arrays import Floats, Ids
from backends.interface import Sampling
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.serving.endpoint_model import EndpointModel
from delta_cli.serving.request_queue import FinishedResponse

Json = dict[str, Any]


def error_body(message: str, field: str | None = None, kind: str = "invalid_request_error") -> Json:
    """An error in OpenAI's form; ``param`` names the field that is wrong."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def models_body(model: EndpointModel) -> Json:
    """The list of models, with vLLM's field for the length of the context."""
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "delta"}
    return {"object": "list", "data": [card | {"max_model_len": model.context}]}


def usage(prompts: Sequence[Ids], responses: Sequence[FinishedResponse]) -> Json:
    """How many tokens a request has used."""
    read, written = sum(map(len, prompts)), sum(len(response.tokens) for response in responses)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def finish_reason(response: FinishedResponse) -> str:
    """Why a response ended, in OpenAI's words."""
    return "length" if response.truncated else "stop"


def generate_choice(index: int, response: FinishedResponse) -> Json:
    """A choice of the token endpoint: ids as they were sampled, the one that ended the response included."""
    names = [f"token_id:{token}" for token in response.tokens.tolist()]
    return {
        "index": index,
        "token_ids": response.tokens.tolist(),
        "logprobs": None if response.logprobs is None else {"content": _token_logprobs(names, response.logprobs)},
        "finish_reason": finish_reason(response),
    }


def completion_choice(index: int, response: FinishedResponse, sampling: Sampling, tokenizer: Tokenizer) -> Json:
    """A choice of /v1/completions."""
    found: Json = {"index": index, "text": _text(response, sampling, tokenizer), "logprobs": None}
    if response.logprobs is not None:
        pieces = tokenizer.pieces(response.tokens)
        found["logprobs"] = {
            "tokens": pieces,
            "token_logprobs": response.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": [0, *accumulate(map(len, pieces[:-1]))],
        }
    return found | {"finish_reason": finish_reason(response)}


def chat_choice(index: int, response: FinishedResponse, sampling: Sampling, tokenizer: Tokenizer) -> Json:
    """A choice of /v1/chat/completions."""
    message = {"role": "assistant", "content": _text(response, sampling, tokenizer)}
    found: Json = {"index": index, "message": message, "logprobs": None}
    if response.logprobs is not None:
        found["logprobs"] = {"content": _token_logprobs(tokenizer.pieces(response.tokens), response.logprobs)}
    return found | {"finish_reason": finish_reason(response)}


def _text(response: FinishedResponse, sampling: Sampling, tokenizer: Tokenizer) -> str:
    """The text of a response without what ended it."""
    ended = bool(len(response.tokens)) and int(response.tokens[-1]) in sampling.stop_ids
    return sampling.before_stop(tokenizer.decode(response.tokens[:-1] if ended else response.tokens))


def _token_logprobs(names: Sequence[str], logprobs: Floats) -> list[Json]:
    """Only the sampled token is listed: the engine does not keep the others."""
    return [
        {"token": name, "logprob": value, "bytes": list(name.encode(errors="replace")), "top_logprobs": []}
        for name, value in zip(names, logprobs.tolist(), strict=True)
    ]


def streamed(body: Json, kind: str, include_usage: bool) -> list[Json]:
    """The chunks of a streamed answer. Each choice arrives whole, because the engine hands over whole responses."""
    rest = {name: value for name, value in body.items() if name not in ("choices", "usage")} | {"object": kind}
    chunks = []
    for choice in body["choices"]:
        delta = {"delta": choice["message"]} if "message" in choice else {}
        chunks.append(rest | {"choices": [{name: choice[name] for name in choice if name != "message"} | delta]})
    return [*chunks, rest | {"choices": [], "usage": body["usage"]}] if include_usage else chunks
