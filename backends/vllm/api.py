"""The HTTP calls of a vLLM server. No other module names one of its routes; docs/vllm.md says what they rest on."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from backends.arrays import Floats, Ids
from backends.interface import BackendError, Sampling
from backends.settings import EngineSection
from backends.vllm import answers
from backends.vllm.answers import Answer, CompletionAnswer
from backends.vllm.command import MODEL, check_version, how_to_start
from backends.vllm.open_connections import CallAborted, OpenConnections

ADAPTER = "delta-adapter"  # the name under which a server gets the trained adapter
CHANGING = "delta-changing"  # label of weights that are being replaced
STARTED = "default"  # label of the weights that a server was started with
CONNECT_SECONDS = 30.0
ANSWER_BYTES = 2**28  # a longer answer is not read
COMPLETIONS = "/v1/completions"

RequestBody = dict[str, Any]

_TOKENS_MADE = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^\n]*\})? ([0-9.e+]+)", re.MULTILINE)


class ServerError(Exception):
    """A call that brought no usable answer. It has had no effect that counts, so it may be made again.

    The message begins with the server's address.
    """


class ServerTimeout(ServerError):
    """No answer within the time allowed."""


@dataclass(frozen=True)
class VllmResponse:
    """One response: its tokens as they were sampled, and their log-probabilities."""

    tokens: Ids  # [n], n ≥ 1
    logprobs: Floats  # [n] float32
    versions: Ids  # [n] of the weights that drew each token; empty without updates in flight


class VllmApi:
    """A vLLM server at a URL. ``model`` names what responses are drawn from: the server's model, or an adapter."""

    def __init__(self, url: str, engine: EngineSection) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"engine.url: '{url}' is not the address of a server; write http://host:port")
        self._parts = parts
        self._engine = engine
        self.model = MODEL
        self.changing = False  # it draws nothing, because its weights are being replaced
        self._versions: dict[str, int] = {}  # of the weights that it was given, by label

    # -------------------------------------------------------------------------------- looking

    def healthy(self, seconds: float = 5.0) -> bool:
        """Whether the server says that it is up."""
        try:
            status, _ = self._exchange("GET", "/health", None, seconds)
        except ServerError:
            return False
        return status == http.HTTPStatus.OK

    def check_alive(self, seconds: float) -> None:
        """Raise ServerError unless the engine behind the server draws a token within so many seconds."""
        request = {"model": self.model, "prompt": [0], "max_tokens": 1, "temperature": 1.0}
        self._tell("/resume", {}, seconds)  # a trainer that was killed may have left it paused
        status, text = self._exchange("POST", COMPLETIONS, request, seconds)
        if status >= 500:  # below, the engine was reached, or the model's name is not known after a restart
            raise ServerError(f"{self.url}{COMPLETIONS}: status {status}, {_reason(text)}")

    def tokens_made(self, seconds: float, connections: OpenConnections) -> float | None:
        """Tokens that the server has computed since its start; None if it does not count them.

        Raises ServerError if it does not answer.
        """
        status, text = self._exchange("GET", "/metrics", None, seconds, connections)
        found = _TOKENS_MADE.findall(text) if status == http.HTTPStatus.OK else []
        return sum(map(float, found)) if found else None

    def check_version(self) -> None:
        """Raise BackendError unless the calls of this server's version are known."""
        answer = self._ask("GET", "/version", None, self._engine.stall, answers.VersionAnswer)
        check_version(answer.version, self.url, in_flight=self._engine.in_flight)

    def find_model(self) -> None:
        """Draw from the first model that the server offers."""
        self.model = self._ask("GET", "/v1/models", None, self._engine.stall, answers.ModelsAnswer).data[0].id

    # -------------------------------------------------------------------------------- drawing

    def draw(
        self,
        prompt: Ids,
        sampling: Sampling,
        seed: int,
        seconds: float,
        connections: OpenConnections,
        vocabulary: int | None = None,
    ) -> VllmResponse:
        """One response, its end-of-sequence token included; log-probabilities are those at the temperature.

        ``vocabulary`` is how many ids the trainer's model can read.
        """
        request = {
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": seed,
            "stop_token_ids": list(sampling.stop_ids),
            "logprobs": 0,
        }
        if self._engine.in_flight:
            request["return_weight_versions"] = True
        if sampling.stop is not None:  # stop strings are looked for in the text of special tokens, too
            request |= {"stop": list(sampling.stop.strings), "skip_special_tokens": False}
        choice = self._complete(request, seconds, answers.DrawnChoice, connections)
        tokens, logprobs = np.array(choice.token_ids, np.int64), answers.float32(choice.logprobs.token_logprobs)
        if len(tokens) != len(logprobs) or len(tokens) > sampling.max_tokens:
            raise self._malformed(
                f"{len(tokens)} token ids came with {len(logprobs)} log-probabilities, where at most "
                f"{sampling.max_tokens} tokens were asked for"
            )
        if vocabulary is not None and tokens.max() >= vocabulary:
            place = int(tokens.argmax())
            raise self._malformed(
                f"field choices[0].token_ids[{place}] is {tokens[place]}: the trainer's model has {vocabulary} ids"
            )
        if np.isin(tokens[:-1], sampling.stop_ids).any():
            raise self._malformed("a response went on after the token that ends it")
        versions = self._token_versions(choice) if self._engine.in_flight else np.zeros(0, np.int64)
        if sampling.stop is not None:  # vLLM's decoder may find the string a token later than the trainer's
            end = next((n for n in range(1, len(tokens) + 1) if sampling.ends(tokens[:n])), len(tokens))
            tokens, logprobs, versions = tokens[:end], logprobs[:end], versions[:end]
        if len(tokens) < sampling.max_tokens and not sampling.ends(tokens):
            reason = answers.shown(choice.finish_reason)
            raise self._malformed(f"a response broke off after {len(tokens)} tokens (finish_reason {reason})")
        return VllmResponse(tokens, logprobs, versions)

    def _token_versions(self, choice: answers.DrawnChoice) -> Ids:
        """The version of the weights that drew each token [n]. Raises ServerError if one is none that it was given."""
        found: list[int] = []
        for span in choice.weight_versions or ():
            if span.version not in self._versions:
                raise self._malformed(f"tokens come from weights labelled '{answers.shown(span.version)}'")
            if span.start != len(found) or span.end < span.start:
                raise self._malformed(f"field choices[0].weight_versions has a gap before token {span.start}")
            found += [self._versions[span.version]] * (min(span.end, len(choice.token_ids)) - span.start)
        if len(found) != len(choice.token_ids):
            raise self._malformed(
                f"field choices[0].weight_versions covers {len(found)} of {len(choice.token_ids)} tokens"
            )
        return np.array(found, np.int64)

    def score(self, ids: Ids) -> Floats:
        """Log-probabilities [n − 1] of all ids but the first, at temperature 1, under the server's present weights."""
        request = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        table = self._complete(request, self._engine.stall, answers.ScoredChoice).prompt_logprobs
        if len(table) != len(ids):
            raise self._malformed(f"field choices[0].prompt_logprobs has {len(table)} entries for {len(ids)} tokens")
        found: list[float] = []
        for place, token in enumerate(ids[1:].tolist(), 1):
            entry = table[place]
            if entry is None or str(token) not in entry:
                raise self._malformed(f"field choices[0].prompt_logprobs[{place}] has no entry for token {token}")
            found.append(entry[str(token)].logprob)
        return answers.float32(found)

    def logprobs_follow_temperature(self, prompt: Ids) -> bool:
        """Whether the server's log-probabilities are those at the sampling temperature, and not those at 1.

        The likeliest token is likelier at a low temperature, unless it was certain before.
        """
        request = {"prompt": prompt.tolist(), "max_tokens": 1, "logprobs": 1, "seed": 0}

        def highest(temperature: float) -> float:
            asked = request | {"temperature": temperature}
            choice = self._complete(asked, self._engine.stall, answers.LikeliestChoice)
            return max(choice.logprobs.top_logprobs[0].values())

        low, one = highest(0.25), highest(1.0)
        return low > one + 1e-4 or one > -1e-3

    def _complete(
        self,
        request: RequestBody,
        seconds: float,
        kind: type[answers.Choice],
        connections: OpenConnections | None = None,
    ) -> answers.Choice:
        """The single choice of a completion. Whatever the server's own defaults could change is set here."""
        fixed = {
            "model": self.model,
            "n": 1,
            "stream": False,
            "ignore_eos": True,  # stop_token_ids alone decide
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
        }
        answer = self._ask("POST", COMPLETIONS, fixed | request, seconds, CompletionAnswer[kind], connections)  # type: ignore[valid-type]  # a class made at run time
        return answer.choices[0]

    # -------------------------------------------------------------------------------- weights

    def load(self, folder: Path, adapter: bool, label: str, send: Callable[[Path], None] | None = None) -> None:
        """Take new weights, a whole model or an adapter, and remember them under a label.

        Requests under way are finished first, with the former weights; with ``engine.in_flight`` they wait, and go on
        with the new weights. ``send`` brings a folder's weights to a server
        that cannot read it.
        """
        in_flight = self._engine.in_flight
        self._control("/pause?mode=keep" if in_flight else "/pause?mode=wait")
        self.changing = True
        try:
            if in_flight:  # what is drawn after a failed load must not count as drawn from the former weights
                self._tell("/update_weight_version", {"new_version": CHANGING}, self._engine.stall)
            if adapter:
                place = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
                self._tell("/v1/load_lora_adapter", place, self._engine.deadline)
            elif send is not None:
                send(folder)
            else:
                order = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._tell("/collective_rpc", order, self._engine.deadline)
            # Requests that were kept compute their keys and values again, with the new weights.
            if not self._control(f"/reset_prefix_cache{'?reset_running_requests=true' if in_flight else ''}").success:
                raise ServerError(f"{self.url}: the prefix cache, computed with the former weights, was not emptied")
            self.set_label(label)
        finally:
            self.changing = False
            self._control("/resume")
        if adapter:
            self.model = ADAPTER

    def set_label(self, label: str) -> None:
        """Remember the present weights under a label. The server forgets it when it is started again."""
        self._versions[label] = int(label.rpartition("-")[2])
        self._tell("/update_weight_version", {"new_version": label}, self._engine.stall)

    def label(self) -> str:
        """The label of the weights that the server has now; ``STARTED`` if nobody has set one since its start."""
        return self._ask("GET", "/weight_info", None, self._engine.stall, answers.WeightsAnswer).weight_version

    def sleep(self) -> None:
        """Free the device's memory; the weights wait in the host's memory."""
        self._control("/sleep?level=1&mode=wait")

    def wake(self) -> None:
        """Take the device's memory back."""
        self._control("/wake_up")

    # ---------------------------------------------------------------------------------- calls

    def _control(self, path: str) -> answers.ControlAnswer:
        text = self._tell(path, {}, self._engine.stall)
        return self._parsed(path, text, answers.ControlAnswer) if text else answers.ControlAnswer()

    def _ask(
        self,
        method: str,
        path: str,
        body: RequestBody | None,
        seconds: float,
        kind: type[Answer],
        connections: OpenConnections | None = None,
    ) -> Answer:
        """The answer to a call. Raises ServerError, and BackendError for a call that the server refuses."""
        return self._parsed(path, self._accepted(method, path, body, seconds, connections), kind)

    def _tell(self, path: str, body: RequestBody, seconds: float) -> bytes:
        """A call of whose answer the status counts; its text."""
        return self._accepted("POST", path, body, seconds)

    def _parsed(self, path: str, text: bytes, kind: type[Answer]) -> Answer:
        try:
            return answers.parse(text, kind)
        except answers.MalformedAnswer as error:
            raise ServerError(f"{self.url}{path}: {error}") from error

    def _accepted(
        self,
        method: str,
        path: str,
        body: RequestBody | None,
        seconds: float,
        connections: OpenConnections | None = None,
    ) -> bytes:
        """The text of an answer with status 200."""
        status, text = self._exchange(method, path, body, seconds, connections)
        if status == http.HTTPStatus.OK:
            return text
        route = path.partition("?")[0]
        if status == http.HTTPStatus.NOT_FOUND and route == COMPLETIONS:  # a server that was started again
            raise ServerError(f"{self.url}: does not offer '{self.model}' any more ({_reason(text)})")
        if status == http.HTTPStatus.NOT_FOUND and route != "/version":
            raise BackendError(f"{self.url}: has no {route}; start it with {how_to_start()}")
        if 400 <= status < 500:
            raise BackendError(f"{self.url}: refused {route}: {_reason(text)}")
        raise ServerError(f"{self.url}{route}: status {status}, {_reason(text)}")

    def _exchange(
        self,
        method: str,
        path: str,
        body: RequestBody | None,
        seconds: float,
        connections: OpenConnections | None = None,
    ) -> tuple[int, bytes]:
        """Status and text of an answer that arrives whole within ``seconds``. Raises ServerError or CallAborted."""
        connections = connections or OpenConnections()
        end = time.monotonic() + seconds
        connection = self._connection(min(seconds, CONNECT_SECONDS))
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.connect()
            opened = connection.sock
            with connections.hold(opened):
                opened.settimeout(max(end - time.monotonic(), 0.01))
                connection.request(method, self._parts.path + path, None if body is None else json.dumps(body), headers)
                with connection.getresponse() as response:
                    return response.status, _read(response, opened, end)
        except TimeoutError as error:
            raise ServerTimeout(f"{self.url}{path}: no answer within {seconds:.3g} s") from error
        except (OSError, http.client.HTTPException) as error:
            if connections.aborted:
                raise CallAborted from error
            raise ServerError(f"{self.url}{path}: {answers.shown(error) or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if secure else http.client.HTTPConnection
        )
        return kind(self._parts.hostname, self._parts.port, timeout=seconds)

    def _malformed(self, what: str) -> ServerError:
        return ServerError(f"{self.url}{COMPLETIONS}: {what}")


def _read(response: http.client.HTTPResponse, opened: socket.socket, end: float) -> bytes:
    """The whole body, before ``end``, even if the server sends only a byte now and then."""
    parts, size = [], 0
    while part := response.read1(2**20):
        parts.append(part)
        size += len(part)
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if size > ANSWER_BYTES:
            raise http.client.HTTPException(f"the answer is longer than {ANSWER_BYTES} bytes")
        opened.settimeout(left)
    if response.length:  # read1 does not notice a body that is cut off
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _reason(text: bytes) -> str:
    """The message in the body of an error, in one line."""
    try:
        body = json.loads(text)
        said = body.get("error", body.get("detail", body))
        words = str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError, RecursionError):
        words = text.decode("utf-8", "replace")
    line = next(iter(words.strip().splitlines()), "")[:300]
    return "".join(each if each.isprintable() else " " for each in line) or "it gave no reason"
