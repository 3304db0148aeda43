"""Bytes and products of a layer of Qwen3-8B in scoring and in an update, counted on tensors without numbers.

benchmarks/count_8b.py prints what follows from them. A packed row of responses goes through one and three layers, and
the difference is a layer's. An operation moves its inputs and outputs once; attention counts as one kernel, and so does
a norm where the backend runs it as one. "autocast" is float32 weights, whose norms are several operations; "squares"
takes long sequences as squares; "compiled" has rotary embeddings and gated feed-forwards as one kernel each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.batching import pack
from backends.interface import Sequences, starts_of
from backends.torch import attention, compiled_layers, varlen_attention
from backends.torch.model import TorchPolicy

# Launch nothing; "device" is how a tensor without numbers is asked where it lies.
VIEWS = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "alias", "device"}
PRODUCTS = {"mm", "addmm", "bmm"}
WIDTHS = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
LENGTHS, PROMPT = (8000, 6000, 4000, 2000), 150
TOKENS = PROMPT + sum(LENGTHS) - len(LENGTHS)  # of the packed row; the last of each response predicts nothing
WAYS = ("autocast", "bfloat16", "squares", "compiled")  # each with what those before it have, but the first


@dataclass(frozen=True)
class LayerWork:
    """What one layer does for a token of a packed row."""

    bytes: float  # moved by operations other than products and attention
    flops: float  # of products


class _Kernel(torch.autograd.Function):
    """One kernel without numbers: its result is like its first input, and so are the gradients like the inputs."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(first, *others)
        return torch.empty_like(first)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _Count(TorchDispatchMode):
    """Adds up the bytes and products of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if func.is_view or name in VIEWS:
            return out
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        if name in PRODUCTS:
            a, b = given[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        else:
            made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            self.bytes += sum(_moved(tensor) for tensor in (*given, *made))
        return out


def _moved(tensor: Tensor) -> int:
    """Bytes of a tensor; what is expanded is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _policy(layers: int, way: str) -> TorchPolicy:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(vocab_size=64, num_hidden_layers=layers, head_dim=128, tie_word_embeddings=False, **WIDTHS)
    mixed = way == "autocast"
    dtype = torch.float32 if mixed else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if not mixed:
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = MethodType(lambda self, hidden_states: _norm(self, hidden_states), module)
    if way == "compiled":
        with unset_fake_temporarily():
            assert compiled_layers.compile_layers(model, torch.device("cpu"), dtype) is None
    policy = TorchPolicy(model, Path(), torch.bfloat16)
    policy.mixed, policy.varlen, policy.squares = mixed, True, way in ("squares", "compiled")
    return policy


def _norm(module: Any, hidden: Tensor) -> Tensor:
    out: Tensor = _Moving.apply(hidden, module.weight)
    return out


class _Moving(_Kernel):
    """One kernel whose inputs and outputs are counted, with one more operation in each direction."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(first, *others)
        return torch.relu(first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        first, *others = ctx.saved_tensors
        return (gradient * first, *(torch.empty_like(tensor) for tensor in others))


class _Rotated(torch.autograd.Function):
    """One kernel in each direction, which reads and writes as many numbers."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return torch.relu(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.relu(gradients[0])


class _Gated(torch.autograd.Function):
    """One kernel in each direction: it reads two and writes one; then it reads these and a gradient, and writes two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate + up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gradients[0] + gate, torch.relu(up)


def _fused(function: Any) -> Any:
    """What a compiled function reads and writes; angles are few."""
    if function.__name__ == "gated":
        return _Gated.apply
    return lambda query, key, *_: (_Rotated.apply(query), _Rotated.apply(key))


def _attend(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    out: Tensor = _Kernel.apply(query, keys, values)
    return out


@contextmanager
def _without_numbers() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("_kernel", "_square_kernel"):
            stack.enter_context(patch.object(varlen_attention, name, _attend))
        plain = compiled_layers._with_compiled_rotary.__wrapped__
        stubs = {"fused": _fused, "_gap": lambda *_: 0.0, "_with_compiled_rotary": plain}
        stack.enter_context(patch.multiple(compiled_layers, **stubs))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _counted(layers: int, way: str) -> dict[str, tuple[float, float]]:
    """Bytes and products of scoring and of an update with so many layers."""
    prompt = np.zeros(PROMPT, np.int64)
    rows = Sequences((prompt,) * len(LENGTHS), np.zeros(sum(LENGTHS), np.int64), starts_of(LENGTHS))
    batch, found = pack(rows, [list(range(len(LENGTHS)))]), {}
    with _without_numbers():
        policy = _policy(layers, way)
        layout = policy.layout(batch)
        with torch.no_grad(), policy.compute(), _Count() as count:
            policy.packed_hidden(batch, layout=layout)
        found["scoring"] = count.bytes, count.flops
        with policy.checkpointing(), _Count() as count:
            with policy.compute():
                hidden = policy.packed_hidden(batch, layout=layout)
            hidden.backward(torch.empty_like(hidden))
        found["update"] = count.bytes, count.flops
    return found


def layer_work() -> dict[str, dict[str, LayerWork]]:
    """The work of a layer, by way and phase; an update recomputes the layer."""
    found: dict[str, dict[str, LayerWork]] = {}
    for way in WAYS:
        one, three = (_counted(layers, way) for layers in (1, 3))
        found[way] = {
            phase: LayerWork(*((b - a) / 2 / TOKENS for a, b in zip(one[phase], three[phase], strict=True)))
            for phase in one
        }
    return found


if __name__ == "__main__":
    for way, phases in layer_work().items():
        for phase, work in phases.items():
            print(f"{way}, {phase}: {work.bytes / 1024:.0f} KiB and {work.flops / 1e6:.0f} MFLOP a token")
