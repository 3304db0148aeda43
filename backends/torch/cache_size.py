"""Which cache of keys and values a rollout gets, and how large it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch

from backends.torch.cache import KeyValueCache, PagedCache, SlotCache
from backends.torch.decoder import prefill
from backends.torch.model import WITHOUT_ATTENTION, TorchPolicy
from backends.torch.paged_attention import PAGE

# Numbers of a token inside one layer of a prefill, in multiples of the hidden and the feed-forward's size: residual
# stream, norms, queries, keys, values and outputs; both products of the feed-forward and what becomes of them.
PREFILL_NUMBERS = (24, 4)
SPARE = 0.08  # share of the GPU's memory that stays free: graphs, gaps between allocations


@dataclass
class CacheBudget:
    """How much a rollout may hold at a time."""

    slots: int  # responses
    tokens: int = sys.maxsize  # of all responses; shrinks if memory runs out
    paged: bool = False  # whether attention can read pages
    prefill_tokens: int = 0  # of one forward pass beside the cache
    reserved: int = 0  # bytes of the GPU's memory that something else will need
    states: int = 1  # copies of each response's recurrent states; episodes keep another while an environment works

    def halve(self, cache: KeyValueCache, longest: int) -> bool:
        """Hold half of what ``cache`` can hold from now on, because memory ran out; False if that is one response."""
        least = longest if isinstance(cache, SlotCache) else longest + PAGE
        if cache.tokens <= least:
            return False
        self.tokens = max(least, cache.tokens // 2)
        return True


def new_cache(policy: TorchPolicy, budget: CacheBudget, waiting: int, longest: int) -> KeyValueCache:
    """An empty cache for ``waiting`` responses of at most ``longest`` tokens, prompts included."""
    if not budget.paged:
        slots = min(budget.slots, waiting, max(1, budget.tokens // longest))
        return SlotCache(slots, longest, policy.dtype, policy.windows)
    slots = min(budget.slots, waiting)
    wanted = slots * -(-longest // PAGE) * PAGE
    tokens = min(wanted, budget.tokens, _free_tokens(policy, budget, slots))
    return PagedCache(slots, longest, tokens, PAGE, policy.dtype, policy.windows, policy.layer_windows)


def key_value_bytes(policy: TorchPolicy) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = policy.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = sum(kind not in WITHOUT_ATTENTION for kind in kinds)
    return int(2 * layers * heads * size * policy.dtype.itemsize)


def state_bytes(policy: TorchPolicy) -> int:
    """Bytes of the states of recurrent layers for one response."""
    if policy.carries_state is None:
        return 0
    with torch.no_grad(), policy.compute():
        [prefix] = prefill(policy, [np.zeros(1, np.int64)])
    return sum(part.nbytes for state in prefix.states.values() for part, _ in state.pairs(state))


def _free_tokens(policy: TorchPolicy, budget: CacheBudget, slots: int) -> int:
    """Tokens whose keys and values fit the GPU's free memory beside a prefill; no limit on a CPU."""
    if policy.device.type != "cuda":
        return sys.maxsize
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(policy.device)
    config, each = policy.config, key_value_bytes(policy)
    inside = PREFILL_NUMBERS[0] * config.hidden_size + PREFILL_NUMBERS[1] * getattr(config, "intermediate_size", 0)
    prefill_bytes = budget.prefill_tokens * (inside * policy.dtype.itemsize + each)
    states = slots * budget.states * state_bytes(policy)
    return max(PAGE, int(free - SPARE * total - prefill_bytes - states - budget.reserved) // each)
