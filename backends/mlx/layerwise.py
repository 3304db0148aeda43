"""The gradient of a trunk a layer at a time: of each layer its input is kept, and it is called twice.

On the way forward every layer's output is evaluated before the next one is called. On the way back each layer is
differentiated on its own from its kept input, and what it needed is freed before the layer below: graphs are small,
no piece of work is longer than a layer, and memory holds the inputs of all layers and the inside of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backends.mlx.arrays import NamedArrays
from backends.mlx.checkpointing import replaced
from backends.mlx.model import MlxPolicy

TrunkCalls = Callable[[], Sequence[mx.array]]  # one or more calls of the trunk, and their hidden states


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer: what it was given beside its input, and its input and output."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    hidden: mx.array
    output: mx.array


class _Unchained(Exception):
    pass


def is_chain(model: nn.Module, policy: MlxPolicy) -> bool:
    """Whether each layer takes the output of the one before as it is, and returns one array."""
    try:
        LayerwiseGradient(model, policy.text.layers).forward(lambda: [policy.trunk(mx.array([[0, 0]]))])
    except _Unchained:
        return False
    return True


class LayerwiseGradient:
    """The trunk's layers, and the gradient through them; ``rest`` of the model is differentiated around them.

    ``run`` calls the trunk one or more times, always in the same way: what one call leaves in a cache for another is
    part of what is differentiated, as both calls of a layer are made again together.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._model, self._layers = model, layers
        names = {id(module): name for name, module in model.named_modules()}
        self._names = [names[id(layer)] for layer in layers]

    def forward(self, run: TrunkCalls) -> tuple[list[mx.array], list[list[LayerCall]]]:
        """The hidden states of each call of the trunk, and each layer's calls."""
        calls: list[list[LayerCall]] = [[] for _ in self._layers]

        def compute(place: int, original: Any, hidden: mx.array, arguments: Any, options: Any) -> mx.array:
            output = original(hidden, *arguments, **options)
            if not isinstance(output, mx.array):
                raise _Unchained
            before = calls[place - 1][-1].output if place else None
            if before is not None and hidden is not before:
                raise _Unchained
            mx.eval(output)
            calls[place].append(LayerCall(arguments, options, hidden, output))
            return output

        with replaced(self._layers, compute):
            hidden = list(run())
            mx.eval(hidden)
        return hidden, calls

    def backward(
        self, run: TrunkCalls, calls: list[list[LayerCall]], slopes: Sequence[mx.array]
    ) -> Iterator[NamedArrays]:
        """The gradient of Σ slopes·hidden, from the slope of each call's hidden states; a layer's at a time."""
        top = [call.output for call in calls[-1]]
        gradient, back = self._around(run, top, slopes)
        yield gradient
        lowest = next((place for place, layer in enumerate(self._layers) if layer.trainable_parameters()), 0)
        embedded = any(tree_flatten(self._rest()))
        for place in reversed(range(0 if embedded else lowest, len(self._layers))):
            gradient, back = self._layer(place, calls[place], back)
            mx.eval(gradient, back)
            yield {f"{self._names[place]}.{name}": part for name, part in gradient.items()}
            calls[place] = []
        if embedded:
            yield self._below(run, back)

    def _rest(self) -> Any:
        """The trainable parameters outside the layers."""
        prefixes = tuple(f"{name}." for name in self._names)
        flat = tree_flatten(self._model.trainable_parameters())
        return tree_unflatten([(name, value) for name, value in flat if not name.startswith(prefixes)])

    def _around(
        self, run: TrunkCalls, top: list[mx.array], slopes: Sequence[mx.array]
    ) -> tuple[NamedArrays, list[mx.array]]:
        """The part after the last layer: its weights' gradient, and the slopes of the last layer's outputs."""
        last = len(self._layers) - 1

        def after(outputs: list[mx.array]) -> list[mx.array]:
            waiting = iter(outputs)

            def skip(place: int, original: Any, hidden: mx.array, arguments: Any, options: Any) -> mx.array:
                return next(waiting) if place == last else hidden

            with replaced(self._layers, skip):
                return list(run())

        return self._differentiate(after, top, slopes)

    def _below(self, run: TrunkCalls, slopes: Sequence[mx.array]) -> NamedArrays:
        """The part before the first layer: its weights' gradient."""

        def before(_: list[mx.array]) -> list[mx.array]:
            found: list[mx.array] = []

            def catch(place: int, original: Any, hidden: mx.array, arguments: Any, options: Any) -> mx.array:
                if place == 0:
                    found.append(hidden)
                return hidden

            with replaced(self._layers, catch):
                run()
            return found

        return self._differentiate(before, [], slopes)[0]

    def _layer(
        self, place: int, calls: Sequence[LayerCall], slopes: Sequence[mx.array]
    ) -> tuple[NamedArrays, list[mx.array]]:
        layer = self._layers[place]

        def compute(hidden: list[mx.array]) -> list[mx.array]:
            return [layer(x, *call.arguments, **call.options) for x, call in zip(hidden, calls, strict=True)]

        return self._differentiate(compute, [call.hidden for call in calls], slopes, layer)

    def _differentiate(
        self,
        function: Callable[[list[mx.array]], list[mx.array]],
        inputs: list[mx.array],
        slopes: Sequence[mx.array],
        module: nn.Module | None = None,
    ) -> tuple[NamedArrays, list[mx.array]]:
        """The derivatives of Σ slopes·function(inputs) by the weights of a module (or the rest) and by the inputs."""
        owner = self._model if module is None else module
        weights = tree_flatten(self._rest() if module is None else owner.trainable_parameters())
        names = [name for name, _ in weights]
        kept = tree_unflatten(weights)

        def flat(*arrays: mx.array) -> list[mx.array]:
            owner.update(tree_unflatten(list(zip(names, arrays, strict=False))))
            return function(list(arrays[len(names) :]))

        primals = [*(value for _, value in weights), *inputs]
        if not primals:
            return {}, []
        try:
            _, found = mx.vjp(flat, primals, list(slopes))
        finally:
            owner.update(kept)
        return dict(zip(names, found, strict=False)), list(found[len(names) :])
