"""All that is known of vLLM: its HTTP calls, its command line, and the versions whose they are.

Nothing else here names a route or an option of vLLM. Facts that the calls rest on are in docs/vllm.md.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from backends.interface import BackendError, Floats, Ids, Sampling
from backends.vllm.open_connections import CallAborted, OpenConnections

SUPPORTED = (0, 32)  # its calls changed between minor versions
MODEL, ADAPTER = "delta", "delta-adapter"  # names under which a launched server has the model, and any the adapter
CONNECT_SECONDS = 30.0
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that a server can be told to have room for

JsonBody = dict[str, Any]


class ServerError(Exception):
    """A call that did not bring an answer: nothing of it counts, so it may be made again."""


class ServerTimeout(ServerError):
    """No answer within the time there was."""


@dataclass(frozen=True)
class VllmResponse:
    """One response: its tokens as they were sampled, and their log-probabilities."""

    tokens: Ids  # [n] at least one
    logprobs: Floats  # [n] float32


class VllmApi:
    """A vLLM server at a URL. ``model`` is the name of what is drawn from: the model, or an adapter of it.

    ``patience`` are the seconds that a call other than for a response may take.
    """

    def __init__(self, url: str, model: str = MODEL, patience: float = 600.0) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"engine.url: '{url}' is no address of a server; write http://host:port")
        self._parts = parts
        self.model = model
        self.patience = patience

    # -------------------------------------------------------------------------------- looking

    def healthy(self, seconds: float = 5.0) -> bool:
        """Whether the server is up."""
        try:
            self._call("GET", "/health", None, seconds, json_answer=False)
        except (ServerError, BackendError):
            return False
        return True

    def check_version(self) -> str:
        """Its version; raises BackendError for one whose calls are not known here."""
        version = str(self._call("GET", "/version", None, self.patience).get("version"))
        check_version(version, self.url)
        return version

    def find_model(self) -> None:
        """Draw from the first model that the server has."""
        models = self._call("GET", "/v1/models", None, self.patience).get("data")
        if not isinstance(models, list) or not models:
            raise BackendError(f"{self.url}: serves no model; start it with one")
        self.model = str(models[0].get("id"))

    # -------------------------------------------------------------------------------- drawing

    def draw(self, prompt: Ids, sampling: Sampling, seed: int, seconds: float, calls: OpenConnections) -> VllmResponse:
        """One response. The end-of-sequence token is kept; log-probabilities are those at the temperature."""
        choice = self._complete(
            {
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
            | _stops(sampling),
            seconds,
            calls,
        )
        tokens, logprobs = _tokens(choice), _numbers((choice.get("logprobs") or {}).get("token_logprobs"))
        if not 1 <= len(tokens) <= sampling.max_tokens or len(tokens) != len(logprobs):
            raise ServerError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities came back")
        if np.isin(tokens[:-1], sampling.stop_ids).any():
            raise ServerError("a response went on after its end")
        if sampling.stop is not None:  # the engine's decoder may find the string a token later than ours
            end = next((n for n in range(1, len(tokens) + 1) if sampling.ends(tokens[:n])), len(tokens))
            tokens, logprobs = tokens[:end], logprobs[:end]
        if len(tokens) < sampling.max_tokens and not sampling.ends(tokens):
            raise ServerError(f"a response broke off after {len(tokens)} tokens ({choice.get('finish_reason')})")
        return VllmResponse(tokens, logprobs)

    def score(self, ids: Ids) -> Floats:
        """Log-probabilities [n − 1] of all ids but the first, at temperature 1, under the weights it has now."""
        request = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        table = self._complete(request, self.patience, OpenConnections()).get("prompt_logprobs")
        if not isinstance(table, list) or len(table) != len(ids):
            raise ServerError("the log-probabilities of a prompt did not come back")
        try:
            return _numbers([table[i][str(ids[i])]["logprob"] for i in range(1, len(ids))])
        except (KeyError, TypeError) as error:
            raise ServerError("the log-probabilities of a prompt are not those of its tokens") from error

    def is_tempered(self, prompt: Ids) -> bool:
        """Whether the log-probabilities it tells are those at the sampling temperature, and not at 1.

        The likeliest token's is greater at a low temperature, where it is not certain already.
        """
        request = {"prompt": prompt.tolist(), "max_tokens": 1, "logprobs": 1, "seed": 0}
        low, one = (self._complete(request | {"temperature": t}, self.patience, OpenConnections()) for t in (0.25, 1.0))
        best = [max(_numbers(list(each["logprobs"]["top_logprobs"][0].values()))) for each in (low, one)]
        return bool(best[0] > best[1] + 1e-4 or best[1] > -1e-3)

    def _complete(self, request: JsonBody, seconds: float, calls: OpenConnections) -> JsonBody:
        """The single choice of a completion. What the server's own defaults could change is said here."""
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
        answer = self._call("POST", "/v1/completions", fixed | request, seconds, calls)
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ServerError("the answer is not one completion")
        return choices[0]

    # -------------------------------------------------------------------------------- weights

    def load(self, folder: Path, adapter: bool) -> None:
        """Take new weights: a whole model, or an adapter. What is being drawn is finished before."""
        self._control("/pause?mode=wait")
        try:
            if adapter:
                place = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
                self._call("POST", "/v1/load_lora_adapter", place, self.patience, json_answer=False)
            else:
                order = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._call("POST", "/collective_rpc", order, self.patience, json_answer=False)
            if not self._control("/reset_prefix_cache").get("success", True):
                raise ServerError("the prefix cache, which holds what the former weights computed, was not emptied")
        finally:
            self._control("/resume")
        if adapter:
            self.model = ADAPTER

    def sleep(self) -> None:
        """Free the device's memory; the weights wait in the host's."""
        self._control("/sleep?level=1&mode=wait")

    def wake(self) -> None:
        """Take the memory back."""
        self._control("/wake_up")

    def _control(self, path: str) -> JsonBody:
        return self._call("POST", path, {}, self.patience)

    # ---------------------------------------------------------------------------------- calls

    def _call(
        self,
        method: str,
        path: str,
        body: JsonBody | None,
        seconds: float,
        calls: OpenConnections | None = None,
        json_answer: bool = True,
    ) -> JsonBody:
        """An answer within ``seconds``. Raises ServerError, and BackendError for a call that the server refuses."""
        calls = calls or OpenConnections()
        secure = self._parts.scheme == "https"
        kind: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if secure else http.client.HTTPConnection
        )
        connection = kind(self._parts.hostname, self._parts.port, timeout=min(seconds, CONNECT_SECONDS))
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        end = time.monotonic() + seconds
        try:
            connection.connect()
            opened = connection.sock
            with calls.hold(opened):
                opened.settimeout(max(end - time.monotonic(), 0.01))
                connection.request(method, self._parts.path + path, None if body is None else json.dumps(body), headers)
                with connection.getresponse() as response:
                    status, text = response.status, _read(response, opened, end)
        except TimeoutError as error:
            raise ServerTimeout(f"{method} {path} brought no answer within {seconds:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            if calls.aborted:
                raise CallAborted from error
            raise ServerError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if status == http.HTTPStatus.NOT_FOUND and path.partition("?")[0] not in ("/v1/completions", "/version"):
            raise BackendError(
                f"{self.url}: has no {path.partition('?')[0]}; start it with {' '.join(environment_words())}"
            )
        if 400 <= status < 500:
            raise BackendError(f"{self.url}: refused {path.partition('?')[0]}: {_reason(text)}")
        if status != http.HTTPStatus.OK:
            raise ServerError(f"{method} {path}: status {status}, {_reason(text)}")
        if not json_answer:
            return {}
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerError(f"{method} {path}: the answer is no JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{method} {path}: the answer is no JSON object")
        return answer


def _stops(sampling: Sampling) -> JsonBody:
    """What a request says about stop strings: to look for them in special tokens' text, too."""
    return {} if sampling.stop is None else {"stop": list(sampling.stop.strings), "skip_special_tokens": False}


def _read(response: http.client.HTTPResponse, opened: socket.socket, end: float) -> bytes:
    """The whole body, before ``end``: a server that sends a byte now and then is late all the same."""
    parts = []
    while part := response.read1(2**20):
        parts.append(part)
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        opened.settimeout(left)
    if response.length:  # read1 does not complain about a body that is cut off
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _reason(text: bytes) -> str:
    """What an error's body says, in a line."""
    try:
        body = json.loads(text)
        said = body.get("error", body.get("detail", body))
        words = str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        words = text.decode("utf-8", "replace")
    return (words.strip().splitlines() or ["nothing said"])[0][:300]


def _tokens(choice: JsonBody) -> Ids:
    found = choice.get("token_ids")
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise ServerError("the answer has no token ids")
    return np.array(found, np.int64)


def _numbers(values: Any) -> Floats:
    """Log-probabilities [n] float32."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ServerError("the answer has no log-probabilities")
    found = np.array(values, np.float32)
    if not np.isfinite(found).all() or (found > 1e-3).any() or (found <= -9999).any():  # −9999 stands for −∞
        raise ServerError("the answer has log-probabilities that are none")
    return np.minimum(found, 0)


# ------------------------------------------------------------------------------------ versions


def check_version(version: str, where: str) -> None:
    """Raise BackendError for a version of vLLM whose calls are not known here."""
    found = re.match(r"(\d+)\.(\d+)\b", version)
    if found is None or (int(found[1]), int(found[2])) != SUPPORTED:
        raise BackendError(
            f"{where}: is vLLM {version}, whose calls are not known here; install "
            f"vllm=={SUPPORTED[0]}.{SUPPORTED[1]}.* in its environment"
        )


# ------------------------------------------------------------------------------------ starting


@dataclass(frozen=True)
class LaunchOptions:
    """How to start a server of our own."""

    model: str  # folder or name
    dtype: str
    max_tokens: int  # of prompt and response
    concurrency: int
    lora_rank: int | None = None  # with room for an adapter of that rank
    memory: float | None = None  # share of the GPU's memory; None: vLLM's own
    sleeps: bool = False  # frees the GPU's memory on demand
    arguments: tuple[str, ...] = ()  # more options of its command line

    def command(self, python: str, port: int) -> list[str]:
        """The command line."""
        options: dict[str, Any] = {
            "--model": self.model,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": self.dtype,
            "--max-model-len": self.max_tokens,
            "--max-num-seqs": self.concurrency,
            "--logprobs-mode": "processed_logprobs",  # those at the sampling temperature
            "--generation-config": "vllm",  # not the model's own top-k and top-p
        }
        if self.lora_rank is not None:
            rank = next((rank for rank in RANKS if rank >= self.lora_rank), None)
            if rank is None:
                raise BackendError(f"model.lora.rank: {self.lora_rank} is more than vLLM takes ({RANKS[-1]})")
            options |= {"--max-lora-rank": rank, "--max-loras": 1}
        if self.memory is not None:
            options["--gpu-memory-utilization"] = self.memory
        flags = ["--disable-uvicorn-access-log"]
        flags += ["--enable-lora"] if self.lora_rank is not None else []
        flags += ["--enable-sleep-mode"] if self.sleeps else []
        words = [str(word) for option in options.items() for word in option]
        return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags, *self.arguments]


# On a CPU, 0.32 ends its engine at a request with a seed whose prompt is computed in parts.
ON_CPU = ("--no-enable-chunked-prefill",)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def environment_words() -> Sequence[str]:
    """What a server needs beyond its defaults, for a person who starts one."""
    return [*(f"{name}={value}" for name, value in ENVIRONMENT.items()), "--logprobs-mode processed_logprobs"]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server that is started by a process with the environment ``own``.

    What torchrun tells its processes is not for vLLM, which would join their group.
    """
    kept = {name: value for name, value in own.items() if name not in _TORCHRUN}
    return kept | ENVIRONMENT


_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
