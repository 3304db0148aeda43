"""How much there is to do in a step: tokens, products, bytes. Counts only; no GPU and no assumption about one."""

from __future__ import annotations

from dataclasses import dataclass

from delta_cli.doctor.model_shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """Groups of responses: a prompt each, with ``samples`` responses. Lengths in tokens.

    Lengths are taken as spread like an exponential's, whose mean square is twice the square of the mean, as
    far as ``longest`` allows.
    """

    groups: int
    samples: int
    prompt: float  # mean length
    mean: float  # mean length of a response
    longest: int  # that a response can have

    @property
    def responses(self) -> int:
        """Responses of all groups."""
        return self.groups * self.samples

    @property
    def drawn(self) -> float:
        """Response tokens."""
        return self.responses * self.mean

    @property
    def packed(self) -> float:
        """Tokens of packed rows: each prompt once, then its responses."""
        return self.groups * self.prompt + self.drawn

    @property
    def square(self) -> float:
        """Mean square of a response's length."""
        return min(2 * self.mean, float(self.longest)) * self.mean

    @property
    def context(self) -> float:
        """Tokens before a drawn one, on average over all that are drawn: longer responses have more of them."""
        return self.prompt + self.square / (2 * self.mean)

    @property
    def pairs(self) -> float:
        """Pairs of a token and one it attends to, in packed rows: half of each square, and prompts by responses."""
        return self.groups * self.prompt**2 / 2 + self.drawn * self.context


def trunk_flops(shape: ModelShape, tokens: float) -> float:
    """Forward of all layers' matrices: a product and a sum for each weight and token, of experts those in use."""
    return 2 * shape.layers * shape.active_matrices * tokens


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """Forward of all layers' attention: scores and their sum of values, each a product and a sum for each number."""
    return 4 * shape.attending * shape.heads * shape.head_dim * pairs


def head_flops(shape: ModelShape, tokens: float) -> float:
    """One product with the output matrix."""
    return 2 * shape.vocabulary * shape.hidden * tokens


def prefill_flops(shape: ModelShape, work: Workload) -> float:
    """Each prompt through all layers, once for all its responses."""
    pairs = work.groups * work.prompt**2 / 2
    return trunk_flops(shape, work.groups * work.prompt) + attention_flops(shape, pairs)


def decode_flops(shape: ModelShape, work: Workload) -> float:
    """Every response token, one at a time."""
    each = trunk_flops(shape, work.drawn) + head_flops(shape, work.drawn)
    return each + attention_flops(shape, work.drawn * work.context)


def score_flops(shape: ModelShape, work: Workload, head_products: int = 1) -> float:
    """One forward of packed rows; the exact hidden proxy takes a second product with the output matrix."""
    forward = trunk_flops(shape, work.packed) + attention_flops(shape, work.pairs)
    return forward + head_products * head_flops(shape, work.drawn)


def update_flops(shape: ModelShape, work: Workload, *, recompute: bool, frozen: bool) -> float:
    """Forward and backward of packed rows, one time through the batch.

    The backward of a matrix takes two products, for its input and for itself, or one where it is
    ``frozen`` below adapters (whose own products are left out, below a hundredth). ``recompute``: gradient
    checkpointing computes the layers' forward once more. The head takes two products for log-probabilities
    and their derivative, and two more for its own gradient.
    """
    again = 1 if recompute else 0
    layers = (1 + again + (1 if frozen else 2)) * trunk_flops(shape, work.packed)
    attention = (1 + again + 2) * attention_flops(shape, work.pairs)
    return layers + attention + (2 if frozen else 4) * head_flops(shape, work.drawn)


def decode_steps(work: Workload, slots: int) -> float:
    """Forwards of one token for each of so many slots, which waiting responses enter as others finish.

    All slots are busy until none waits; the one that is left longest then ends ``longest`` − ``mean`` later.
    """
    return work.mean * max(1.0, work.responses / slots) + work.longest - work.mean
