"""A credit as one function: what is known about a batch's tokens goes in, a weight for each token comes out.

``method.credit = "my_credit.py:weights"`` names a function of your own; the rows of ``WEIGHT_FUNCTIONS`` are built in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from delta_cli.credit.coefficients import TokenCoefficients
from delta_cli.credit.distributed import HeldFeatures

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Doubles, Ids

NormaliseWeights = Literal["batch", "side", "budget"]
FUNCTION_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")
_FLOOR = 1e-12  # of sums that divide


class BatchFeatures:
    """The token features of the whole batch. Each process holds some of them; the results are the same on all."""

    def __init__(self, held: HeldFeatures) -> None:
        self._held = held

    def weighted_sum(self, weights: ArrayLike) -> Doubles:
        """Σ_t weights[s, t]·v_t for weights [S, N]: one direction for each of S rows."""
        own = np.asarray(weights, np.float64).take(self._held.index, axis=1)
        return self._held.sum(np.asarray(self._held.features.weighted_sum(own), np.float64))

    def project(self, direction: Doubles) -> Doubles:
        """⟨v_t, direction⟩ for every token, [N]; 0 for tokens of responses that were not scored (A = 0)."""
        return self._held.scatter(np.asarray(self._held.features.project(direction), np.float64))


@dataclass(frozen=True)
class CreditInput:
    """What a weight function reads: R responses with N tokens, flat and in order; the same on every process.

    The numbers are those of the policy before the update.
    """

    logprobs: Doubles  # [N] of the sampled tokens
    entropies: Doubles  # [N] nats
    advantages: Doubles  # [R]
    groups: Ids  # [R] index of the prompt that a response answers
    starts: Ids  # [R+1] where each response begins; first 0, last N
    tokens: Ids  # [N] token ids
    step: int = 0  # steps done before this one
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))  # a function of seed and step
    questions: Sequence[str] = ()  # [R]; empty inside TRL
    answers: Sequence[str] = ()  # [R] gold answers; empty inside TRL
    pieces: Callable[[int], list[str]] | None = None  # the text that each token of a response adds
    hinted_logprobs: Doubles | None = None  # [N] with method.hint in place of the question
    hidden_residuals: Doubles | None = None  # [N] ‖h − h as loaded‖, with method.hidden_residuals

    @property
    def token_advantages(self) -> Doubles:
        """The advantage of each token's response, [N]."""
        return np.repeat(self.advantages, np.diff(self.starts))

    @property
    def rows(self) -> Ids:
        """The response that each token belongs to, [N]."""
        return np.repeat(np.arange(len(self.advantages)), np.diff(self.starts))

    @property
    def hint_gains(self) -> Doubles:
        """How much likelier each token is with the hint, nats [N]. Raises ValueError if there is none."""
        if self.hinted_logprobs is None:
            raise ValueError("it compares log-probabilities with and without a hint; set method.hint")
        return self.hinted_logprobs - self.logprobs

    def mean_one(self, weights: Doubles) -> Doubles:
        """Weights [N] scaled to mean 1 in each response; 1 where a response has none."""
        lengths = np.diff(self.starts)
        sums = np.bincount(self.rows, weights, len(lengths))
        scale = np.repeat(lengths / np.maximum(sums, _FLOOR), lengths)
        return np.where(np.repeat(sums > _FLOOR, lengths), weights * scale, 1.0)


@dataclass(frozen=True)
class WeightFunction:
    """A function ``weights(batch)`` or ``weights(batch, features)`` and its name in messages."""

    name: str
    call: Callable[..., ArrayLike]

    def coefficients(self, batch: CreditInput, held: HeldFeatures | None) -> TokenCoefficients:
        """The weights of the batch, as DelTA's coefficients are passed on."""
        weights = self(batch, None if held is None else BatchFeatures(held))
        return TokenCoefficients(weights, np.zeros_like(weights), np.zeros_like(weights))

    @property
    def parameters(self) -> int:
        """How many parameters the function has."""
        return len(inspect.signature(self.call).parameters)

    @property
    def reads_features(self) -> bool:
        """Whether the function has a second parameter, for :class:`BatchFeatures`."""
        return self.parameters == 2

    def __call__(self, batch: CreditInput, features: BatchFeatures | None) -> Doubles:
        """The weights [N], checked.

        Raises ValueError for a wrong shape, or a weight that is negative or not finite.
        """
        given: Any = self.call(batch, features) if self.reads_features else self.call(batch)
        try:
            weights = np.array(given, np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"{self.name} returned {type(given).__name__}; it must return one number a token"
            ) from None
        if weights.shape != batch.logprobs.shape:
            raise ValueError(
                f"{self.name} returned shape {list(weights.shape)}; it must return one weight for each of the "
                f"{len(batch.logprobs)} tokens, [{len(batch.logprobs)}]"
            )
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise ValueError(
                f"{self.name} gave token {wrong[0]} the weight {weights[wrong[0]]}; weights must be finite and at "
                "least 0"
            )
        return weights


def surprisal(batch: CreditInput) -> Doubles:
    """−log p of the sampled token, scaled to mean 1."""
    found = -batch.logprobs
    return found / max(float(found.mean()), _FLOOR)


def entropy_weight(batch: CreditInput) -> Doubles:
    """The entropy at each token, scaled to mean 1: forking tokens (arXiv 2506.01939) without a threshold."""
    return batch.entropies / max(float(batch.entropies.mean()), _FLOOR)


def random(batch: CreditInput) -> Doubles:
    """Uniform numbers from 0.8 to 1.2, the range of DelTA's coefficients."""
    return batch.rng.uniform(0.8, 1.2, len(batch.logprobs))


def position(batch: CreditInput) -> Doubles:
    """A line from 0.8 at the first token of each response to 1.2 at its last."""
    lengths = np.diff(batch.starts)
    place = np.arange(len(batch.logprobs)) - np.repeat(batch.starts[:-1], lengths)
    last = np.maximum(np.repeat(lengths, lengths) - 1, 1)
    weights: Doubles = 0.8 + 0.4 * place / last
    return weights


def eapo(batch: CreditInput) -> Doubles:
    """1 + 0.2·z with z the standardised entropy in [−2, 2]: EAPO's additive form and constants (arXiv 2604.11056)."""
    scored = batch.token_advantages != 0
    chosen = batch.entropies[scored] if scored.any() else batch.entropies
    z = (batch.entropies - chosen.mean()) / max(float(chosen.std()), _FLOOR)
    weights: Doubles = 1 + 0.2 * np.clip(z, -2, 2)
    return weights


def rlsd(batch: CreditInput) -> Doubles:
    """(p with the hint / p)^sign(A) in [0.8, 1.2]; its share falls from ½ to 0 in 50 steps (arXiv 2604.03128)."""
    share = 0.5 * max(1 - batch.step / 50, 0.0)
    ratio = np.exp(np.clip(np.sign(batch.token_advantages) * batch.hint_gains, -1, 1))
    weights: Doubles = 1 - share + share * np.clip(ratio, 0.8, 1.2)
    return weights


def cort(batch: CreditInput) -> Doubles:
    """1 + ½·tanh(log(p with the hint / p)), mean 1 in each response, after CoRT (arXiv 2607.25659)."""
    return batch.mean_one(1 + 0.5 * np.tanh(batch.hint_gains))


def arca(batch: CreditInput) -> Doubles:
    """How far training has moved each token's final hidden state, mean 1 in each response (arXiv 2606.00257)."""
    if batch.hidden_residuals is None:
        raise ValueError("it compares hidden states with those of the model as loaded; set method.hidden_residuals")
    return batch.mean_one(batch.hidden_residuals)


WEIGHT_FUNCTIONS: dict[str, Callable[..., ArrayLike]] = {
    "surprisal": surprisal,
    "entropy_weight": entropy_weight,
    "random": random,
    "position": position,
    "eapo": eapo,
    "rlsd": rlsd,
    "cort": cort,
    "arca": arca,
}


def normalised(
    weights: Doubles, logprobs: Doubles, token_advantages: Doubles, kind: NormaliseWeights | None, negative: float
) -> Doubles:
    """Weights [N] scaled by ``kind``, then those of tokens with A < 0 multiplied by ``negative``.

    "batch": mean 1 over the batch. "side": mean 1 over the tokens with A > 0, and over those with A < 0. "budget": on
    each side, Σ weight·|A|·(1 − p) is what weights of 1 would give; |A|·(1 − p) is proportional to the size of the
    token's gradient in the row of the LM head that it reads. A side whose weights are all 0 stays so.
    """
    found = weights.copy()
    sides = [token_advantages > 0, token_advantages < 0]
    if kind == "batch":
        found *= len(found) / max(float(found.sum()), _FLOOR)
    elif kind is not None:
        size = np.ones_like(found) if kind == "side" else np.abs(token_advantages) * -np.expm1(logprobs)
        for side in sides:
            found[side] *= size[side].sum() / max(float((found * size)[side].sum()), _FLOOR)
    found[sides[1]] *= negative
    return found
