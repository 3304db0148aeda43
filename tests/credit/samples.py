"""Random batches: proxies with outlier dimensions, log-ratios near 1, far from it and beyond the clamp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_cli.credit import DenseFeatures, output_row_features


@dataclass
class Rollout:
    """The arguments of token_coefficients, and the hidden states that the features were made from."""

    hidden: np.ndarray  # [N, H]
    logp: np.ndarray  # [N]
    advantages: np.ndarray  # [R]
    starts: np.ndarray  # [R+1]

    @property
    def features(self) -> DenseFeatures:
        return output_row_features(self.hidden, self.logp)


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def rollout(seed: int, lengths: list[int], advantages: list[float], width: int = 6) -> Rollout:
    """Features float32 with two outlier dimensions, as post-norm hidden states have them."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    hidden = rng.normal(size=(tokens, width))
    hidden[:, 0] = 60 + 8 * hidden[:, 0]
    hidden[:, 1] *= 12
    logp = np.log(rng.uniform(0.02, 0.98, tokens))
    return Rollout(hidden.astype(np.float32), logp, np.array(advantages, float), starts_of(lengths))


def bf16(array: np.ndarray) -> np.ndarray:
    """float32 numbers that bfloat16 can hold: the low 16 bits cut off."""
    return (array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def log_ratios(rng: np.random.Generator, count: int) -> np.ndarray:
    """logp − logp_old: nothing, small, large, and beyond the clamp at ±20."""
    widths = rng.choice([0.0, 0.05, 0.5, 2.5, 12.0, 40.0], count, p=[0.1, 0.3, 0.25, 0.2, 0.1, 0.05])
    return rng.normal(size=count) * widths
