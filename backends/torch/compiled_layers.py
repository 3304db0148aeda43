"""Rotary embeddings and gated feed-forwards of packed rows as one compiled kernel each, forward and backward.

PyTorch compiles transformers' own functions, so the formulas stay theirs; intermediate results are not rounded to
bfloat16. A step that decodes one token keeps separate operations, which CUDA graphs record.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from backends.torch.device import first_line, out_of_memory

ROTARY = "apply_rotary_pos_emb"  # the name of transformers' function in the file of each model
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # the parts of a gated feed-forward, by their names there
TOLERANCE = 2**-5  # of the largest number; both results are rounded to bfloat16, transformers' also in between

Function = Callable[..., Any]


def compile_layers(causal: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Let attention and feed-forwards use compiled functions; returns why not, if these fail or compute otherwise."""
    attention = {module: rotary for module in causal.modules() if (rotary := _rotary(module))}
    feeds = {module: gate for module in causal.modules() if (gate := _gate_of(module))}
    shapes: dict[Function, list[tuple[int, ...]]] = dict.fromkeys(feeds.values(), [(1, 5, 16)] * 2)
    for rotary in attention.values():
        shapes[rotary] = [(1, 4, 5, 16), (1, 2, 5, 16), *[(1, 5, _angles(rotary))] * 2]
    try:
        gap = max((_gap(function, each, device, dtype) for function, each in shapes.items()), default=0.0)
    except (RuntimeError, TypeError, ValueError, ImportError, OSError) as error:
        if out_of_memory(error):  # says nothing about the compiler
            raise
        return f"they cannot be compiled here ({first_line(error)})"
    if gap > TOLERANCE:
        return f"their compiled result is off by {gap:.2g} of the largest number"
    for module in attention:
        module.forward = MethodType(_with_compiled_rotary(type(module).forward), module)
    for module, gate in feeds.items():
        module.forward = MethodType(_feed_forward, module)
        vars(module)["compiled_gate"] = fused(gate)
    return None


def compile_dynamic(function: Function) -> Function:
    """The function, compiled when it is first called, for inputs of any number of tokens."""
    # One thread: a pool of processes takes longer to start than these kernels to compile.
    compiled: Function = torch.compile(function, dynamic=True, options={"compile_threads": 1})
    return compiled


@cache
def fused(function: Function) -> Function:
    """The function, compiled for several tokens; its first input is [..., tokens, size]."""
    compiled = compile_dynamic(function)

    def run(first: Tensor, *others: Tensor) -> Any:
        return (compiled if first.shape[-2] > 1 else function)(first, *others)

    return run


def _gap(function: Function, shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between a function and its compiled form, of outputs and gradients, relative to the
    largest number of each.
    """
    noise = torch.Generator().manual_seed(0)
    states = [torch.randn(*shape, generator=noise).to(device, dtype) for shape in shapes]
    found: list[list[Tensor]] = []
    with torch.enable_grad():
        for each in (fused(function), function):
            given = [state.clone().requires_grad_(at < 2) for at, state in enumerate(states)]  # not angles
            outputs: list[Tensor] = tree_leaves(each(*given))
            slopes = torch.Generator().manual_seed(1)
            torch.autograd.backward(
                outputs, [torch.randn(out.shape, generator=slopes).to(device, dtype) for out in outputs]
            )
            found.append([out.detach() for out in outputs] + [state.grad for state in given if state.grad is not None])
    pairs = [(mine.float(), other.float()) for mine, other in zip(*found, strict=True)]
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


# --------------------------------------------------------------------------------------- rotary embeddings


def _rotary(module: nn.Module) -> Function | None:
    """The rotary function that a module's forward calls on queries and keys, if it calls transformers' usual one."""
    forward = getattr(type(module), "forward", None)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or ROTARY not in code.co_names or ROTARY not in names:
        return None
    function: Function = names[ROTARY]
    usual = [*inspect.signature(function).parameters][:4] == ["q", "k", "cos", "sin"]
    return function if usual else None


def _angles(rotary: Function) -> int:
    """The size of the angles that a rotary function takes for heads of 16: one for each number, or for each pair."""
    heads = torch.zeros(1, 1, 5, 16)
    try:
        rotary(heads, heads, *[torch.zeros(1, 5, 16)] * 2)
    except RuntimeError:
        return 8
    return 16


@cache
def _with_compiled_rotary(forward: Any) -> FunctionType:
    """The forward of a class of attention, which finds the compiled function under the name of the plain one.

    Replacing the function in transformers would change other models in the process.
    """
    names = {**forward.__globals__, ROTARY: fused(forward.__globals__[ROTARY])}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


# --------------------------------------------------------------------------------------- feed-forwards


@torch.no_grad()
def _gate_of(module: nn.Module) -> Function | None:
    """act(gate) * up, if a module computes down(act(gate(x)) * up(x)), which a tiny copy shows."""
    parts = dict(module.named_children())
    if parts.keys() != GATED:
        return None
    tiny: Any = copy.copy(module)
    tiny._modules = {"act_fn": parts["act_fn"]}
    with torch.random.fork_rng(devices=[]):
        for name, sizes in (("gate_proj", (4, 6)), ("up_proj", (4, 6)), ("down_proj", (6, 4))):
            tiny._modules[name] = nn.Linear(*sizes)
        rows = torch.randn(1, 3, 4)
    kind: Function = type(tiny.act_fn)
    try:
        gate = _gate(kind)
        expected = tiny.down_proj(gate(tiny.gate_proj(rows), tiny.up_proj(rows)))
        return gate if torch.equal(tiny(rows), expected) else None
    except (RuntimeError, TypeError, AttributeError):
        return None


@cache
def _gate(activation: Function) -> Function:
    act = activation()

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        found: Tensor = act(gate) * up
        return found

    return gated


def _feed_forward(module: Any, hidden: Tensor) -> Tensor:
    """The forward of a gated feed-forward, whose activation and product are one kernel."""
    found: Tensor = module.down_proj(module.compiled_gate(module.gate_proj(hidden), module.up_proj(hidden)))
    return found
