"""Prompts that are computed once for all their responses, by caches that mlx-lm's layers read and write.

The trunk is called for the prompts, which leave the keys and values of each layer in a cache, and then for the
responses, whose cache has those of their prompt in front of their own. The gradient flows through what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from backends.arrays import Ids
from backends.batching import SharedPromptBatch
from backends.mlx.attention import PromptMask
from backends.mlx.model import MlxPolicy


class PromptCache:
    """Keeps the keys and values of the prompts, [P, heads, Tp, size]."""

    offset = 0
    keys: mx.array
    values: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the keys and values that the layer has computed, and return them."""
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Each token sees those before it; padding is at the end, where none does."""
        if return_array or (window_size and count > window_size):
            return create_causal_mask(count, window_size=window_size)
        return "causal"


class ResponseCache:
    """Puts the prompts' keys and values in front of those of the responses."""

    def __init__(
        self, prompts: PromptCache, lengths: Ids, prompt_of: Ids, width: int, *, array_masks: bool = False
    ) -> None:
        self._prompts = prompts
        self._of = mx.array(prompt_of)  # [B]
        self._width = width  # Tp
        self._array_masks = array_masks
        self._lengths: list[int] = lengths[prompt_of].tolist()
        self.offset = mx.array(self._lengths)  # [B] the position of each response's first token

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values [B, heads, Tp + Tr, size]."""
        return (
            mx.concatenate([self._prompts.keys[self._of], keys], axis=2),
            mx.concatenate([self._prompts.values[self._of], values], axis=2),
        )

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Which of the Tp + Tr keys each of the ``count`` tokens sees; as an array [B, 1, Tr, Tp + Tr] if need be."""
        if not (return_array or self._array_masks or (window_size and self._width + count > window_size)):
            return PromptMask(self._lengths, self._width)
        prompt, own = mx.arange(self._width), mx.arange(count)
        lengths = self.offset[:, None, None, None]
        before = mx.broadcast_to(prompt < lengths, (len(self.offset), 1, count, self._width))
        among = mx.broadcast_to(own[:, None] >= own, (len(self.offset), 1, count, count))
        if window_size:
            before = before & (lengths + own[:, None] - prompt < window_size)
            among = among & (own[:, None] - own < window_size)
        return mx.concatenate([before, among], axis=3)


def call_trunk(
    policy: MlxPolicy, batch: SharedPromptBatch, wide: Callable[[int], int], *, array_masks: bool = False
) -> list[mx.array]:
    """Hidden states of the prompts [P, Tp, H] and of the responses [B, Tr, H]; ``wide`` rounds a width up."""
    count = len(make_prompt_cache(policy.model))
    width = wide(batch.prompts.shape[1])
    prompts = [PromptCache() for _ in range(count)]
    found = [policy.trunk(_padded(batch.prompts, width), cache=prompts)]
    if batch.responses.shape[1]:
        caches = [
            ResponseCache(prompt, batch.prompt_lengths, batch.prompt_of, width, array_masks=array_masks)
            for prompt in prompts
        ]
        found.append(policy.trunk(_padded(batch.responses, wide(batch.responses.shape[1])), cache=caches))
    return found


def _padded(ids: np.ndarray[Any, Any], width: int) -> mx.array:
    return mx.array(np.pad(ids, ((0, 0), (0, width - ids.shape[1]))))


def can_share_prompts(policy: MlxPolicy, *, array_masks: bool) -> bool:
    """Whether responses can share their prompt's computation: every layer attends, and its numbers are the same."""
    if not all(type(cache) is KVCache for cache in make_prompt_cache(policy.model)):
        return False
    ids = np.arange(7) % policy.vocabulary
    batch = SharedPromptBatch(
        rows=np.arange(2),
        prompts=np.stack([np.append(ids[:2], 0), ids[3:6]]),
        prompt_lengths=np.array([2, 3]),
        prompt_of=np.array([1, 0]),
        responses=np.stack([ids[1:4], ids[2:5]]),
        own=(np.ones(4, dtype=bool),) * 2,
        targets=np.zeros(8, dtype=np.int64),
    )
    try:
        _, found = call_trunk(policy, batch, lambda width: width, array_masks=array_masks)
    except (TypeError, AttributeError, ValueError, RuntimeError):  # caches of other kinds want more than these
        return False
    whole = [np.concatenate([ids[3:6], ids[1:4]]), np.concatenate([ids[:2], ids[2:5]])]
    apart = [policy.trunk(mx.array(row[None]))[0, -3:] for row in whole]
    expected = mx.stack(apart).astype(mx.float32)
    tolerance = 1e-3 if found.dtype == mx.float32 else 5e-2
    gap = mx.abs(found.astype(mx.float32) - expected).max()
    return bool((gap <= tolerance * mx.abs(expected).max()).item())
