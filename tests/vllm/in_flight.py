"""Responses of the stand-in server that go on while its weights change."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np

from backends.interface import RolloutRequest, Sampling
from tests.vllm.server import RESUME, JsonBody, TestServer


class Hold:
    """Responses, but the first ``free`` ones, wait after some tokens until the server was resumed a second time."""

    def __init__(self, server: TestServer, after: int, free: int = 0) -> None:
        self.server, self.after, self.free = server, after, free
        self.begun = self.held = 0
        self.lock = threading.Lock()
        server.before_token = self.wait

    def wait(self, drawn: int) -> None:
        with self.lock:
            self.begun += drawn == 0
            if drawn != self.after or self.begun <= self.free:
                return
            self.held += 1
        end = time.monotonic() + 10
        while self.server.seen.count(RESUME) < 2 and time.monotonic() < end:
            time.sleep(0.005)


def complete_by_token(server: TestServer, body: JsonBody) -> JsonBody:
    """A response whose tokens may come from several weights; it waits while the server is paused."""
    prompt, stops = np.array(body["prompt"], np.int64), set(body["stop_token_ids"])
    tokens: list[int] = []
    logprobs: list[float] = []
    labels: list[str] = []
    while len(tokens) < body["max_tokens"] and not stops & set(tokens[-1:]):
        server.before_token(len(tokens))
        with server.lock:
            if not server.paused:
                sampling = Sampling(1, (), body["temperature"], seed=(body["seed"] + len(tokens)) % 2**63)
                drawn = server.engine.rollout(RolloutRequest((np.append(prompt, tokens).astype(np.int64),), sampling))
                tokens, logprobs = [*tokens, *drawn.tokens.tolist()], [*logprobs, *drawn.logprobs.tolist()]
                labels.append(server.label)
                server.labels_drawn.add(server.label)
        time.sleep(0.002)
    starts = [n for n, label in enumerate(labels) if n == 0 or labels[n - 1] != label]
    spans = [{"version": labels[start], "start": start, "end": end} for start, end in pairwise([*starts, len(labels)])]
    return {
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": "stop" if stops & set(tokens[-1:]) else "length",
        "weight_versions": spans,
    }
