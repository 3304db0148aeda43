"""The endpoints: from a request's body to prompts in the queue, and from responses to an answer's body."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from backends.arrays import Ids
from backends.interface import Sampling
from delta_cli.serving import response_forms as forms
from delta_cli.serving.endpoint_model import EndpointModel
from delta_cli.serving.http_server import HttpAnswer, HttpRequest
from delta_cli.serving.request_queue import (
    FinishedResponse,
    QueueClosedError,
    QueuedPrompt,
    QueueFullError,
    RequestQueue,
)
from delta_cli.serving.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    RefusedRequest,
    ServedRequest,
    TextRequest,
    parse_request,
)
from delta_cli.serving.response_forms import Json

Parsed = TypeVar("Parsed", bound=ServedRequest)
Responses = list[list[FinishedResponse]]  # of each prompt


class Endpoints:
    """Answers the requests of an HTTP server; see docs/serve.md for the paths."""

    def __init__(self, model: EndpointModel, requests: RequestQueue) -> None:
        self._model, self._queue = model, requests
        self._posts: dict[str, Callable[[bytes], Awaitable[HttpAnswer]]] = {
            "/inference/v1/generate": self._generate,
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
        }
        self._gets: dict[str, Callable[[], Json]] = {
            "/health": lambda: {"status": "ok"},
            "/v1/models": lambda: forms.models_body(model),
        }

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """The answer to a request. Raises RefusedRequest, or what the engine raised."""
        if request.path not in {**self._posts, **self._gets}:
            paths = ", ".join([*self._gets, *self._posts])
            raise RefusedRequest(f"there is no {request.path[:100]} here, only {paths}", status=404)
        if (request.method == "POST") != (request.path in self._posts) or request.method not in ("GET", "POST"):
            right = "POST" if request.path in self._posts else "GET"
            raise RefusedRequest(f"{request.path} takes {right}, not {request.method}", status=405)
        if request.method == "GET":
            return HttpAnswer(self._gets[request.path]())
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another site cannot send without asking
            raise RefusedRequest("send JSON, with the header Content-Type: application/json", status=415)
        return await self._posts[request.path](request.body)

    async def _generate(self, body: bytes) -> HttpAnswer:
        request = await self._parsed(body, GenerateRequest)
        self._model.check_name(request.model)
        prompt, params = self._model.check_prompt(request.token_ids, "token_ids"), request.sampling_params
        sampling = self._model.sampling(params, len(prompt), "sampling_params.")
        (responses,) = await self._sample([(prompt, sampling)], params.seed, params.wants_logprobs)
        choices = [forms.generate_choice(index, response) for index, response in enumerate(responses)]
        name = request.request_id or uuid.uuid4().hex
        return HttpAnswer({"request_id": name, "choices": choices, "usage": forms.usage([prompt], responses)})

    async def _completions(self, body: bytes) -> HttpAnswer:
        request = await self._parsed(body, CompletionRequest)
        self._model.check_name(request.model)
        prompts = await asyncio.to_thread(lambda: [self._completion_prompt(each) for each in request.prompts])
        asked = [(prompt, await self._sampling(request, len(prompt), None)) for prompt in prompts]
        found = await self._sample(asked, request.seed, request.wants_logprobs)
        choices = [
            forms.completion_choice(index * request.n + place, response, sampling, self._model.tokenizer)
            | ({"prompt_token_ids": prompt.tolist()} if request.return_token_ids else {})
            for index, ((prompt, sampling), responses) in enumerate(zip(asked, found, strict=True))
            for place, response in enumerate(responses)
        ]
        return self._text_answer(request, "cmpl", "text_completion", choices, prompts, found)

    def _completion_prompt(self, prompt: str | list[int]) -> Ids:
        return (
            self._model.text_prompt(prompt) if isinstance(prompt, str) else self._model.check_prompt(prompt, "prompt")
        )

    async def _chat(self, body: bytes) -> HttpAnswer:
        request = await self._parsed(body, ChatRequest)
        self._model.check_name(request.model)
        prompt = await asyncio.to_thread(self._model.chat_prompt, request)
        sampling = await self._sampling(request, len(prompt), request.max_completion_tokens)
        found = await self._sample([(prompt, sampling)], request.seed, request.wants_logprobs)
        choices = [
            forms.chat_choice(index, response, sampling, self._model.tokenizer)
            for index, response in enumerate(found[0])
        ]
        answer = self._text_answer(request, "chatcmpl", "chat.completion", choices, [prompt], found)
        if request.return_token_ids:
            answer.body["prompt_token_ids"] = prompt.tolist()
        return answer

    def _text_answer(
        self, request: TextRequest, prefix: str, kind: str, choices: list[Json], prompts: list[Ids], found: Responses
    ) -> HttpAnswer:
        """An answer in one of OpenAI's forms, whole or as a stream."""
        responses = [response for each in found for response in each]
        if request.return_token_ids:
            for choice, response in zip(choices, responses, strict=True):
                choice["token_ids"] = response.tokens.tolist()
        body = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": self._model.created,
            "model": self._model.name,
            "choices": choices,
            "usage": forms.usage(prompts, responses),
        }
        if not request.stream:
            return HttpAnswer(body)
        part = f"{kind}.chunk" if kind == "chat.completion" else kind
        options = request.stream_options
        return HttpAnswer(body, stream=tuple(forms.streamed(body, part, bool(options and options.include_usage))))

    async def _parsed(self, body: bytes, kind: type[Parsed]) -> Parsed:
        return await asyncio.to_thread(parse_request, body, kind)

    async def _sampling(self, request: TextRequest, prompt: int, limit: int | None) -> Sampling:
        """The first request with a stop string reads the whole vocabulary, so this has a thread of its own."""
        return await asyncio.to_thread(self._model.sampling, request, prompt, "", limit)

    async def _sample(self, asked: Sequence[tuple[Ids, Sampling]], seed: int | None, logprobs: bool) -> Responses:
        """The responses to each prompt. A request without a seed gets a random one."""
        seed = uuid.uuid4().int >> 65 if seed is None else seed
        queued = [QueuedPrompt(prompt, sampling, seed, logprobs) for prompt, sampling in asked]
        try:
            self._queue.submit(queued)
            return list(await asyncio.gather(*(asyncio.wrap_future(prompt.responses) for prompt in queued)))
        except QueueFullError:
            raise RefusedRequest(
                f"{self._queue.capacity} responses are waiting already; try again later", status=503
            ) from None
        except QueueClosedError:
            raise RefusedRequest("the server is stopping", status=503) from None
        finally:
            for prompt in queued:  # those that nobody waits for any more; nothing happens to the others
                prompt.responses.cancel()
