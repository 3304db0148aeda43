"""Responses whose lengths are known beforehand, the same for this project and for transformers.

The last id of the vocabulary is the stop: every response ends with it, at its place in the schedule and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from backends import batching
from backends.interface import Floats, Ids


def schedule(count: int, longest: int, spread: int) -> Ids:
    """Tokens of each response: even in the logarithm from ``longest / spread`` to ``longest``, in no order."""
    lengths = np.geomspace(longest / spread, longest, count).round().astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


@contextmanager
def scheduled_rollout(lengths: Ids) -> Iterator[None]:
    """The torch backend's responses have these lengths.

    The sampling noise decides the token: a value next to 1 draws the last id, and one below 0.99
    never does, where the vocabulary is large and the weights are random.
    """

    def noise(seed: int, row: int, count: int) -> Floats:
        values = 0.99 * batching.uniforms(seed, row, count)
        values[lengths[row] - 1] = 1 - 1e-9
        return values

    with patch("backends.torch.rollout.uniforms", noise):
        yield


def scheduled_generate(generate: Callable[..., Any], lengths: Ids, stop: int) -> Callable[..., Any]:
    """transformers' ``generate`` with these lengths: rows stop one by one, the call with the longest.

    Its ``eos_token_id`` must be one that the model does not have, so that nothing else ends a row.
    """

    def call(input_ids: Any, **options: Any) -> Any:
        width = input_ids.shape[1]
        ends = input_ids.new_tensor(width + lengths)

        def done(ids: Any, _: object, **__: object) -> Any:
            return ids.shape[1] >= ends

        ids = generate(input_ids=input_ids, stopping_criteria=[done], **options)
        responses = ids[:, width:]
        responses[responses == stop] = 0  # drawn by chance
        responses[range(len(lengths)), lengths - 1] = stop
        return ids

    return call


def scheduled_fork(fork: Callable[..., Any], lengths: Ids, samples: int) -> Callable[..., Any]:
    """``fork`` of the requests of transformers' continuous batching, for responses of these lengths.

    The ``samples`` responses to a prompt are one request, named after the number of the prompt and as
    long as the first of them, and its forks, which would all get its limit of tokens.
    """

    def call(request: Any, name: str) -> Any:
        child = fork(request, name)
        prompt, number = name.split("__child#")
        child._new_tokens_limit = int(lengths[int(prompt) * samples + 1 + int(number)])
        return child

    return call
