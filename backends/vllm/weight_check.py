"""Checks from its log-probabilities that a server draws from the weights that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from backends.interface import Floats, PublishedWeights

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}  # nats between server and trainer, mean over a probe's tokens
STILL_SHARE = 0.25  # of the tolerance: how far the trainer may move while a server's answers stay the same to the bit


@dataclass(frozen=True)
class ProbeAnswers:
    """A server's log-probabilities for the probe [N], and the version at which it first gave exactly these."""

    logprobs: Floats
    since: int


@dataclass
class WeightCheck:
    """The trainer's log-probabilities for the probe, by version, and how far a server's may be from them."""

    tolerance: float  # nats, mean over the probe's tokens
    published: dict[int, Floats] = field(default_factory=dict)
    newest: int = -1

    def publish(self, weights: PublishedWeights) -> None:
        """Expect these weights from now on."""
        assert weights.probe is not None
        self.newest = weights.version
        self.published[weights.version] = weights.probe.logprobs

    def fault(self, found: Floats, before: ProbeAnswers | None) -> str | None:
        """Say what is wrong with a server's log-probabilities [N], in a clause; None if they fit the newest weights.

        ``before`` are its former ones. The tolerance allows for precision, and an update in bfloat16 may be smaller
        than it. So answers that stay the same to the bit while the trainer's move are a fault, too.
        """
        gaps = {version: _gap(found, known) for version, known in self.published.items()}
        gap = gaps[self.newest]
        if gap > self.tolerance:
            nearest = min(gaps, key=lambda version: gaps[version])
            holds = f"are those of version {nearest}" if gaps[nearest] <= self.tolerance else "belong to no version"
            return f"its log-probabilities differ from the trainer's by {gap:.3g} nats on average and {holds}"
        if before is not None and np.array_equal(found, before.logprobs):
            moved = _gap(self.published[self.newest], self.published[before.since])
            if moved > STILL_SHARE * self.tolerance:
                return (
                    f"its log-probabilities are exactly those of version {before.since}, though the trainer's have "
                    f"moved by {moved:.3g} nats on average"
                )
        return None

    def remember(self, found: Floats, before: ProbeAnswers | None) -> ProbeAnswers:
        """A server's log-probabilities under the newest weights, and since when they have been exactly these."""
        unmoved = before is not None and np.array_equal(found, before.logprobs)
        return ProbeAnswers(found, before.since if before is not None and unmoved else self.newest)


def _gap(one: Floats, other: Floats) -> float:
    return float(np.abs(np.asarray(one, np.float64) - other).mean())
