"""Layers that pass a state from token to token, such as linear attention and short convolutions, over packed rows.

transformers' recurrent layers keep their state in a cache. Here that cache keeps the autograd graph too: a prompt is
computed once, each of its responses starts from the state after it, and the prompt's gradient is the sum over its
responses. Layers that cannot start from a state compute the prompt again in front of each response.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.batching import PackedBatch, similar_lengths
from backends.interface import Ids

LEAST_WIDTH = 2  # transformers computes rows of a single token with kernels that have no gradient


@dataclass
class CarriedState:
    """The cache that a recurrent layer of transformers reads and writes, for some sequences.

    Layers have one or more states of each kind, by number; the first axis is that of the sequences.
    """

    conv: dict[int, Tensor] = field(default_factory=dict)  # the last inputs of convolutions [R, channels, kernel]
    recurrent: dict[int, Tensor] = field(default_factory=dict)  # [R, ...]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None at the start of a sequence."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence; None at the start of a sequence."""
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Put the last inputs in front of ``inputs`` [R, channels, tokens] and keep the end; returns the sum."""
        if state_idx in self.conv:
            inputs = torch.cat([self.conv[state_idx].to(inputs.dtype), inputs], dim=-1)
        size = conv_kernel_size or inputs.shape[-1]
        padded = nn.functional.pad(inputs, (max(0, size - inputs.shape[-1]), 0))
        self.conv[state_idx] = padded[..., -size:]
        return padded

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state after the tokens."""
        self.recurrent[state_idx] = state
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """True keeps transformers from changing the states in place, which autograd forbids."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the sequences have begun."""
        return bool(self.conv or self.recurrent)

    def row(self, place: int) -> CarriedState:
        """The state of one sequence."""
        return self.map(lambda part: part[place : place + 1])

    def pairs(self, other: CarriedState) -> list[tuple[Tensor, Tensor]]:
        """Each tensor with the same one of ``other``."""
        kinds = (self.conv, other.conv), (self.recurrent, other.recurrent)
        return [(mine[key], theirs[key]) for mine, theirs in kinds for key in theirs]

    def map(self, change: Callable[[Tensor], Tensor]) -> CarriedState:
        """A new state with every tensor changed."""
        parts = ({key: change(part) for key, part in kind.items()} for kind in (self.conv, self.recurrent))
        return CarriedState(*parts)


def _joined(states: list[CarriedState]) -> CarriedState:
    """The states of several calls as those of one."""
    first = states[0]
    return CarriedState(
        {key: torch.cat([state.conv[key] for state in states]) for key in first.conv},
        {key: torch.cat([state.recurrent[key] for state in states]) for key in first.recurrent},
    )


@dataclass(frozen=True)
class _Call:
    """The sequences of one call of a layer."""

    tokens: Tensor  # [R, W] positions in the packed row; padding repeats a sequence's last token
    prompts: Tensor  # [R] the prompt of each, counted in the order of the calls


@dataclass(frozen=True)
class StateLayout:
    """How a recurrent layer computes a packed row of T tokens.

    Prompts of the same length are computed in one call without padding, which would change the state after them.
    Responses of similar length are padded at the end, where it changes nothing.
    """

    prompts: tuple[_Call, ...]
    responses: tuple[_Call, ...]
    places: Tensor  # [T] the position of each token among the outputs of all calls
    order: Tensor  # [P] the position of each prompt among those of ``prompts``
    carried: bool  # whether responses start from the state after their prompt, or repeat it
    kept: dict[int, CarriedState] | None  # by layer, the states after the prompts in their own order, if asked for

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device, *, carried: bool, keep: bool = False) -> StateLayout:
        """The calls for a batch; ``keep`` stores the states after the prompts in ``kept``."""
        sizes = np.array([group.prompt for group in batch.groups])
        starts = np.array([group.start for group in batch.groups])
        places, end = np.empty(len(batch.ids), dtype=np.int64), 0
        prompts, members = [], []
        for size in np.unique(sizes):
            same = np.flatnonzero(sizes == size)
            tokens = starts[same, None] + np.arange(size)
            places[tokens.ravel()] = end + np.arange(tokens.size)
            end += tokens.size
            prompts.append(_call(tokens, np.arange(len(same)), device))
            members.append(same)
        order = np.argsort(np.concatenate(members))
        responses = []
        for tokens, own, real in _responses(batch, carried):
            places[tokens[real]] = end + np.flatnonzero(real)
            end += tokens.size
            responses.append(_call(tokens, order[own], device))
        at, ordered = (torch.from_numpy(array).to(device) for array in (places, order))
        return cls(tuple(prompts), tuple(responses), at, ordered, carried, {} if keep else None)

    def compute(self, layer: int, hidden: Tensor, call: Callable[[Tensor, CarriedState | None], Tensor]) -> Tensor:
        """The outputs [1, T, H] of a layer for ``hidden`` [1, T, H].

        ``call`` computes rows [R, W, H] from a state, which it changes; None means that nobody needs the states.
        """
        row, size = hidden[0], hidden.shape[-1]
        needed = self.carried or self.kept is not None
        states, outputs = [], []
        for rows in self.prompts:
            state = CarriedState() if needed else None
            outputs.append(call(row.index_select(0, rows.tokens.flatten()).view(*rows.tokens.shape, size), state))
            states.append(state)
        after = _joined([state for state in states if state is not None]) if needed else None
        if self.kept is not None and after is not None:
            self.kept[layer] = after.map(lambda part: part.index_select(0, self.order))
        for rows in self.responses:
            state = None
            if self.carried and after is not None:
                state = after.map(functools.partial(_take, at=rows.prompts))
            outputs.append(call(_take(row, rows.tokens), state))
        return torch.cat([part.flatten(0, 1) for part in outputs]).index_select(0, self.places)[None]


def _call(tokens: Ids, prompts: Ids, device: torch.device) -> _Call:
    return _Call(torch.from_numpy(tokens).to(device), torch.from_numpy(prompts).to(device))


def _responses(batch: PackedBatch, carried: bool) -> Iterator[tuple[Ids, Ids, Ids]]:
    """Calls of responses of similar length: positions [R, W], prompts [R], and which positions are the responses' own.

    Unless the state is carried over, each row begins with the prompt.
    """
    prompt = np.repeat(np.arange(len(batch.groups)), [len(group.responses) for group in batch.groups])
    begins = np.array([group.start for group in batch.groups])
    sizes = np.array([group.prompt for group in batch.groups])
    lengths = np.concatenate([group.responses for group in batch.groups])
    ends = [group.start + group.prompt + np.cumsum(group.responses) for group in batch.groups]
    starts = np.concatenate(ends) - lengths
    for run in similar_lengths(lengths):
        own, count = prompt[run], lengths[run, None]
        prefix = np.zeros_like(count) if carried else sizes[own, None]
        column = np.arange(max(LEAST_WIDTH, int((prefix + count).max())))
        inside = column - prefix
        tokens = np.where(inside < 0, begins[own, None] + column, starts[run, None] + np.minimum(inside, count - 1))
        yield tokens, own, (inside >= 0) & (inside < count)


def _take(rows: Tensor, at: Tensor) -> Tensor:
    """rows[at], with a gradient that is summed in a fixed order on each device."""
    if rows.device.type == "cuda":
        return rows[at]
    return rows.index_select(0, at.flatten()).view(*at.shape, *rows.shape[1:])


# ------------------------------------------------------------------------------------------------ transformers' layers


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is one of transformers' layers with a state, all of which contain a short convolution."""
    return hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())


def adopt(causal: nn.Module) -> bool | None:
    """Let a model's recurrent layers compute packed rows.

    Returns None if it has no such layers, else whether all of them can start from a state.
    """
    found: list[Any] = [module for module in causal.modules() if is_recurrent(module)]
    for module in found:
        cls: Any = type(module)
        module.__class__ = _packed_class(cls)
    for block in causal.modules():
        if found and isinstance(block, GradientCheckpointingLayer):
            block.register_forward_pre_hook(_hand_over, with_kwargs=True)
    return all(_starts_from_a_state(module) for module in found) if found else None


def _hand_over(block: nn.Module, args: Any, options: dict[str, Any]) -> None:
    """Give a block's recurrent layers the layout of this forward pass, which some blocks do not pass on."""
    recurrent: list[Any] = [module for module in block.modules() if is_recurrent(module)]
    for module in recurrent:
        module.layout = options.get("layout")


@functools.cache
def _packed_class(cls: Any) -> Any:
    """A subclass that computes packed rows if it has been given a layout, and otherwise does what its class does."""
    known = inspect.signature(cls.forward).parameters
    cache = "cache_params" if "cache_params" in known else "past_key_values"

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if self.layout is None:
            with _limited_steps(self):
                return cls.forward(self, hidden_states, *args, **options)
        self.layout.reached.add(self.layer_idx)
        return self.layout.states.compute(
            self.layer_idx, hidden_states, lambda rows, state: cls.forward(self, rows, **{cache: state})
        )

    members = {"forward": forward, "__module__": cls.__module__, "cache_name": cache, "layout": None}
    return type(cls.__name__, (cls,), members)


@contextlib.contextmanager
def _limited_steps(module: Any) -> Iterator[None]:
    """Keep a layer of Nemotron-H from taking smaller time steps than its limit.

    transformers applies the limit to whole sequences only, so what it draws token by token is another model's.
    """
    least, _ = getattr(module, "time_step_limit", (0.0, math.inf))
    if not least:
        yield
        return
    count, lowest = len(module.dt_bias), math.log(math.expm1(least))  # softplus(lowest) = least

    def limit(_: nn.Module, __: Any, projected: Tensor) -> Tensor:
        rest, steps = projected[..., :-count], projected[..., -count:]
        return torch.cat([rest, torch.maximum(steps, lowest - module.dt_bias.to(steps.dtype))], dim=-1)

    hook = module.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def _starts_from_a_state(module: Any) -> bool:
    """Whether the second half of a random sequence, computed from the state after the first, is what it should be.

    Jamba's layers start from the last inputs of the convolution, which is most of the state after a few tokens, and
    ignore the recurrent state; so another recurrent state must give another result.
    """
    weight = next(child.weight for child in module.children() if isinstance(child, nn.Conv1d))
    size = module.hidden_size if hasattr(module, "hidden_size") else module.config.hidden_size
    noise = torch.Generator().manual_seed(0)
    sequence = torch.randn(1, 8, size, generator=noise).to(weight)
    state = CarriedState()

    def half(rows: Tensor, state: CarriedState | None) -> Tensor:
        found: Tensor = module(rows, **{module.cache_name: state})
        return found.float()

    whole = half(sequence, None)[:, 4:]
    half(sequence[:, :4], state)
    other = CarriedState(dict(state.conv), {key: part + 1 for key, part in state.recurrent.items()})
    without, found = half(sequence[:, 4:], None), half(sequence[:, 4:], state)
    ignored = state.recurrent and torch.equal(half(sequence[:, 4:], other), found)
    return not ignored and bool((found - whole).abs().max() <= 0.05 * (without - whole).abs().max())
