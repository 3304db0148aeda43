"""Responses under way: the turns that servers have drawn so far, and what an environment wrote between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Bools, Floats, Ids
from backends.interface import RolloutRequest, Sampling
from backends.vllm.api import VllmResponse


@dataclass(frozen=True)
class TurnRequest:
    """A turn to draw: a whole response unless the rollout has an environment."""

    place: int  # of its response in the result
    prompt: Ids  # all ids before the turn
    seed: int
    max_tokens: int


class ResponseDraft:
    """Response ``row`` of the whole batch, at ``place`` of the rollout, as far as it has been drawn."""

    def __init__(self, place: int, prompt: Ids, row: int, sampling: Sampling) -> None:
        self.place, self.prompt, self.row, self.sampling = place, prompt, row, sampling
        self.restart()

    def restart(self) -> None:
        """Forget all turns."""
        self.turns = 0
        self.finished = self.truncated = False
        self.servers: set[int] = set()  # that drew turns of it in the present round
        self._ids: list[Ids] = []
        self._own: list[Bools] = []
        self._logprobs: list[Floats] = []
        self._versions: list[Ids] = []

    @property
    def region(self) -> Ids:
        """All ids after the prompt so far."""
        return np.concatenate([np.zeros(0, np.int64), *self._ids])

    @property
    def own(self) -> Bools:
        """Which ids of the region the model wrote."""
        return np.concatenate([np.zeros(0, bool), *self._own])

    @property
    def logprobs(self) -> Floats:
        """Log-probabilities of the model's ids, float32."""
        return np.concatenate([np.zeros(0, np.float32), *self._logprobs])

    @property
    def versions(self) -> Ids:
        """The version of the weights that drew each of the model's ids; empty without updates in flight."""
        return np.concatenate([np.zeros(0, np.int64), *self._versions])

    @property
    def request(self) -> TurnRequest:
        """The next turn. Its noise is a function of the rollout's seed, the response's row and the turn's number."""
        region = self.region
        return TurnRequest(
            place=self.place,
            prompt=np.concatenate([self.prompt, region]),
            seed=seed_of(self.sampling.seed, self.row, self.turns),
            max_tokens=self.sampling.max_tokens - len(region),
        )

    def add_turn(self, drawn: VllmResponse, server: int) -> bool:
        """Add a turn that a server has drawn; whether the turn ended before the limit of tokens."""
        self._ids.append(drawn.tokens)
        self._own.append(np.ones(len(drawn.tokens), bool))
        self._logprobs.append(drawn.logprobs)
        self._versions.append(drawn.versions)
        self.servers.add(server)
        self.turns += 1
        return self.sampling.ends(drawn.tokens)

    def append(self, ids: Ids) -> None:
        """Add what the environment wrote after the last turn."""
        self._ids.append(ids)
        self._own.append(np.zeros(len(ids), bool))

    def finish(self, truncated: bool) -> None:
        """Nothing more is drawn."""
        self.finished, self.truncated = True, truncated


def drafts_of(request: RolloutRequest) -> list[ResponseDraft]:
    """A draft of each response."""
    sampling = request.sampling
    prompts = [prompt for prompt in request.prompts for _ in range(sampling.samples)]
    rows: Sequence[int] = request.global_rows.tolist()
    pairs = zip(prompts, rows, strict=True)
    return [ResponseDraft(place, prompt, row, sampling) for place, (prompt, row) in enumerate(pairs)]


def seed_of(seed: int, row: int, turn: int = 0) -> int:
    """The seed of a turn: a function of the rollout's seed, the response's row in the whole batch, and the turn."""
    words = f"{seed} {row} {turn}" if turn else f"{seed} {row}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1
