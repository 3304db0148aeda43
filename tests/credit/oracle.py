"""The method once more, slowly: token by token in Python for the coefficients, in torch float64 for the losses.

Nothing here comes from ``delta_cli``. Sums are exact (``math.fsum``), distances are squared
distances as the method defines them, and every loss is differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# ------------------------------------------------------------------------------- coefficients


@dataclass
class Coefficients:
    """What the method defines for every token, and the lambda before it is normalised."""

    weights: list[float]
    alpha: list[float]
    margins: list[float]


def coefficients(
    hidden: np.ndarray,
    logp: np.ndarray,
    advantages: Sequence[float],
    starts: Sequence[int],
    *,
    refinements: int = 1,
    lambda_min: float = 0.8,
    lambda_max: float = 1.2,
    temperature: float | str = "lagged",
    score: str = "sigmoid",
    contrast: str = "between",
    weighting: str = "range",
    share: float = 0.5,
    normalise: str = "sum",
    groups: Sequence[int] | None = None,
) -> Coefficients:
    """DelTA's coefficients of a batch (method, section 2), one token after the other."""
    v = [[-math.expm1(float(lp)) * float(x) for x in h] for h, lp in zip(hidden, logp, strict=True)]
    owner = [r for r in range(len(advantages)) for _ in range(starts[r], starts[r + 1])]
    A = [float(advantages[r]) for r in owner]
    N = len(v)
    scopes: dict[int, list[int]] = {}
    for t in range(N):
        scopes.setdefault(0 if groups is None else int(groups[owner[t]]), []).append(t)

    alpha, margins, lam = [0.0] * N, [0.0] * N, [lambda_min] * N
    contrasted = False
    for tokens in scopes.values():
        if not (any(A[t] > 0 for t in tokens) and any(A[t] < 0 for t in tokens)):
            for t in tokens:
                lam[t] = 1.0 if A[t] != 0 else lambda_min
            continue
        contrasted = True
        scores = _scope(v, A, tokens, refinements, temperature, score, contrast)
        for t, (a, d) in scores.items():
            alpha[t], margins[t] = a, d
            lam[t] = lambda_min + (lambda_max - lambda_min) * a
    if not contrasted:
        return Coefficients([1.0] * N, alpha, margins)
    return Coefficients(_weights(lam, alpha, weighting, share, normalise), alpha, margins)


def _scope(
    v: list[list[float]], A: list[float], tokens: list[int], K: int, temperature: float | str, score: str, contrast: str
) -> dict[int, tuple[float, float]]:
    plus = [t for t in tokens if A[t] > 0]
    minus = [t for t in tokens if A[t] < 0]

    def centroid(side: list[int], mass: dict[int, float]) -> list[float]:
        total = max(math.fsum(mass[t] for t in side), 1e-8)
        return [math.fsum(mass[t] * v[t][j] for t in side) / total for j in range(len(v[0]))]

    def distance(t: int, mu: list[float]) -> float:
        return math.fsum((x - m) ** 2 for x, m in zip(v[t], mu, strict=True))

    def margin(t: int, own: list[float], other: list[float]) -> float:
        return -distance(t, own) if contrast == "within" else distance(t, other) - distance(t, own)

    def all_margins(mass: dict[int, float]) -> dict[int, float]:
        mu_plus, mu_minus = centroid(plus, mass), centroid(minus, mass)
        D = {t: margin(t, mu_plus, mu_minus) for t in plus}
        return D | {t: margin(t, mu_minus, mu_plus) for t in minus}

    def gamma(side: list[int], D: dict[int, float]) -> float:
        if temperature != "lagged":
            return float(temperature)
        mean = math.fsum(D[t] for t in side) / len(side)
        return math.sqrt(max(math.fsum((D[t] - mean) ** 2 for t in side) / len(side), 1e-8))

    def scores(D: dict[int, float], g_plus: float, g_minus: float) -> dict[int, float]:
        if score == "hard":
            return {t: float(D[t] > 0) for t in D}
        return {t: _sigmoid(D[t] / (g_plus if A[t] > 0 else g_minus)) for t in D}

    D = all_margins({t: abs(A[t]) for t in plus + minus})
    g_plus, g_minus = gamma(plus, D), gamma(minus, D)
    for _ in range(K):
        alpha = scores(D, g_plus, g_minus)
        g_plus, g_minus = gamma(plus, D), gamma(minus, D)
        D = all_margins({t: abs(A[t]) * alpha[t] for t in D})
    alpha = scores(D, g_plus, g_minus)
    return {t: (alpha[t], D[t]) for t in D}


def _weights(lam: list[float], alpha: list[float], weighting: str, share: float, normalise: str) -> list[float]:
    w = alpha if weighting == "alpha" else lam
    if weighting in ("top", "bottom"):
        sign = -1 if weighting == "top" else 1
        kept = sorted(range(len(lam)), key=lambda t: sign * lam[t])[: math.ceil(share * len(lam))]
        w = [float(t in kept) for t in range(len(lam))]
    if normalise == "count":
        return w
    total = math.fsum(w)
    return [x * len(w) / total for x in w]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


# --------------------------------------------------------------------------------------- losses


@dataclass
class Batch:
    """One mini-batch: float64 tensors for each token, lists for each response."""

    logp: torch.Tensor
    logp_old: torch.Tensor
    advantages: list[float]
    starts: list[int]
    weights: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    kept: list[bool] | None = None
    max_length: int | None = None
    reference: torch.Tensor | None = None
    kl: float = 0.0
    engine: torch.Tensor | None = None
    cap: float | None = None  # of the weight of each token

    def rows(self) -> list[int]:
        """The responses that count."""
        return [r for r in range(len(self.advantages)) if self.kept is None or self.kept[r]]

    def of(self, tensor: torch.Tensor, r: int) -> torch.Tensor:
        return tensor[self.starts[r] : self.starts[r + 1]]

    def log_ratio(self, r: int) -> torch.Tensor:
        return (self.of(self.logp, r) - self.of(self.logp_old, r)).clamp(-20, 20)

    def ratio(self, r: int) -> torch.Tensor:
        return self.log_ratio(r).exp()


Term = Callable[[int], torch.Tensor]  # of a response's tokens


def weighted(b: Batch, term: Term) -> Term:
    """The term with what may multiply it, less the KL penalty."""

    def full(r: int) -> torch.Tensor:
        value = term(r)
        if b.weights is not None:
            value = value * b.of(b.weights, r)
        if b.cap is not None:
            value = value * (b.of(b.logp_old, r) - b.of(b.engine, r)).exp().clamp(max=b.cap)
        if b.kl:
            gap = b.of(b.reference, r) - b.of(b.logp, r)
            value = value - b.kl * (gap.exp() - gap - 1)
        return value

    return full


def total(values: list[torch.Tensor], b: Batch) -> torch.Tensor:
    return torch.stack(values).sum() if values else 0 * b.logp.sum()


def token_mean(b: Batch, term: Term) -> torch.Tensor:
    count = sum(b.starts[r + 1] - b.starts[r] for r in b.rows())
    return total([weighted(b, term)(r).sum() for r in b.rows()], b) / max(count, 1)


def response_mean(b: Batch, term: Term) -> torch.Tensor:
    means = [weighted(b, term)(r).mean() for r in b.rows() if b.starts[r + 1] > b.starts[r]]
    return total(means, b) / max(len(b.rows()), 1)


def clipped(ratio: torch.Tensor, A: float, low: float, high: float, dual: float | None = None) -> torch.Tensor:
    value = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    if dual is not None and A < 0:
        value = torch.maximum(value, torch.full_like(value, dual * A))
    return value


def reinforce(b: Batch) -> torch.Tensor:
    return -token_mean(b, lambda r: b.ratio(r) * b.advantages[r])


def grpo(b: Batch) -> torch.Tensor:
    return -response_mean(b, lambda r: clipped(b.ratio(r), b.advantages[r], 0.2, 0.2))


def dr_grpo(b: Batch) -> torch.Tensor:
    term = weighted(b, lambda r: clipped(b.ratio(r), b.advantages[r], 0.2, 0.2))
    return -total([term(r).sum() for r in b.rows()], b) / (max(len(b.rows()), 1) * b.max_length)


def rloo(b: Batch) -> torch.Tensor:
    term = weighted(b, lambda r: b.ratio(r) * b.advantages[r])
    return -total([term(r).sum() for r in b.rows()], b) / max(len(b.rows()), 1)


def dapo(b: Batch) -> torch.Tensor:
    return -token_mean(b, lambda r: clipped(b.ratio(r), b.advantages[r], 0.2, 0.28, 10))


def dapo_ft(b: Batch, share: float = 0.2) -> torch.Tensor:
    candidates = sorted((float(e) for r in b.rows() for e in b.of(b.entropies, r)), reverse=True)
    if not candidates:
        return 0 * b.logp.sum()
    lowest = candidates[max(1, math.ceil(share * len(candidates))) - 1]
    term = weighted(b, lambda r: clipped(b.ratio(r), b.advantages[r], 0.2, 0.28, 10))
    masks = {r: b.of(b.entropies, r) >= lowest for r in b.rows()}
    count = sum(int(mask.sum()) for mask in masks.values())
    return -total([(term(r) * masks[r]).sum() for r in b.rows()], b) / count


def sapo(b: Batch) -> torch.Tensor:
    def term(r: int) -> torch.Tensor:
        tau = 1.0 if b.advantages[r] > 0 else 1.05
        return 4 / tau * torch.sigmoid(tau * (b.ratio(r) - 1)) * b.advantages[r]

    return -response_mean(b, term)


def fipo(b: Batch, threshold: float = 10) -> torch.Tensor:
    stays = [r for r in b.rows() if not (b.advantages[r] < 0 and int((b.ratio(r) > 10).sum()) > 1)]
    inner = Batch(**{**vars(b), "kept": [r in stays for r in range(len(b.advantages))]})

    def term(r: int) -> torch.Tensor:
        w = torch.tensor(future_kl(b.log_ratio(r).tolist(), b.advantages[r], threshold), dtype=torch.float64)
        return w * clipped(b.ratio(r), b.advantages[r], 0.2, 0.28, 10)

    return -token_mean(inner, term)


def future_kl(delta: list[float], A: float, threshold: float) -> list[float]:
    """FIPO's weights of one response's tokens: clamped once for all, and that once more past the threshold."""
    weights = []
    for t in range(len(delta)):
        F = sum(2 ** (-(k - t) / 32) * delta[k] for k in range(t, len(delta)) if delta[k] <= math.log(10))
        weight = min(max(math.exp(F), 1.0), 1.2)
        if A < 0 and math.exp(delta[t]) > threshold:
            weight = min(max(weight, 0.8), 1.0)
        weights.append(weight)
    return weights


def gspo(b: Batch) -> torch.Tensor:
    def term(r: int) -> torch.Tensor:
        ratio = b.log_ratio(r).mean().exp().expand(b.starts[r + 1] - b.starts[r])
        return clipped(ratio, b.advantages[r], 3e-4, 4e-4)

    return -response_mean(b, term)


def cispo(b: Batch) -> torch.Tensor:
    return -token_mean(b, lambda r: b.ratio(r).detach().clamp(max=5.0) * b.advantages[r] * b.of(b.logp, r))


def covariance(b: Batch) -> tuple[list[int], torch.Tensor]:
    """Positions of the tokens that count, and the covariance of each (arXiv 2505.22617, equation 10)."""
    places = [t for r in b.rows() for t in range(b.starts[r], b.starts[r + 1])]
    A = torch.tensor([b.advantages[r] for r in b.rows() for _ in range(b.starts[r], b.starts[r + 1])]).double()
    logp = b.logp_old[places]
    return places, (A - A.mean()) * (logp - logp.mean())


def clip_cov(b: Batch) -> torch.Tensor:
    """The share of 0.02 % is one token; which of the candidates it is depends on the seed alone."""
    places, cov = covariance(b)
    candidates = [t for t, c in zip(places, cov, strict=True) if 1.0 < c < 5.0]
    chosen = np.random.default_rng(0).permutation(candidates)[:1]

    def term(r: int) -> torch.Tensor:
        keep = torch.tensor([float(t not in chosen) for t in range(b.starts[r], b.starts[r + 1])]).double()
        return keep * clipped(b.ratio(r), b.advantages[r], 0.2, 0.2)

    return -token_mean(b, term)


def kl_cov(b: Batch) -> torch.Tensor:
    places, cov = covariance(b)
    policy = -token_mean(b, lambda r: b.ratio(r) * b.advantages[r])
    if not places:
        return policy
    chosen = places[int(cov.argmax())]  # the share of 0.02 % is one token
    r = next(r for r in b.rows() if b.starts[r] <= chosen < b.starts[r + 1])
    return policy + b.log_ratio(r)[chosen - b.starts[r]].abs() / len(places)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "reinforce": reinforce,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "dapo": dapo,
    "dapo_ft": dapo_ft,
    "sapo": sapo,
    "fipo": fipo,
    "gspo": gspo,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "delta": dapo,
    "delta_group": dapo,
    "delta_light": dapo,
}


def loss_and_gradient(preset: str, b: Batch, **options: float) -> tuple[float, np.ndarray]:
    """Value and derivative with respect to every log-probability; ``options`` are the loss's own."""
    b.logp = b.logp.clone().requires_grad_(True)
    value = LOSSES[preset](b, **options)
    (gradient,) = torch.autograd.grad(value, b.logp)
    return float(value.detach()), gradient.numpy()
