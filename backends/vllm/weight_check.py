"""Whether an engine draws from the weights it was given: its answers to a probe against the trainer's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from backends.interface import Floats, PublishedWeights

STILL_SHARE = 0.25  # of the tolerance: an engine whose answers stay the same bit for bit may lag so far behind


@dataclass
class WeightCheck:
    """The trainer's answers to the probe, by version, and how far an engine's may be from them."""

    tolerance: float  # nats, mean over the probe's tokens
    published: dict[int, Floats] = field(default_factory=dict)
    newest: int = -1

    def publish(self, weights: PublishedWeights) -> None:
        """Expect these weights from now on."""
        assert weights.probe is not None
        self.newest = weights.version
        self.published[weights.version] = weights.probe.logprobs

    def fault(self, answers: Floats, before: ProbeAnswers | None) -> str | None:
        """What is wrong with an engine's answers [N], in a clause; None where they are those of the newest weights.

        ``before`` are its last ones. Precision sets the tolerance, and an update in bfloat16 may be smaller:
        then answers that are exactly the old ones, though the trainer's have moved, give the engine away.
        """
        gaps = {version: _gap(answers, known) for version, known in self.published.items()}
        gap = gaps[self.newest]
        if gap > self.tolerance:
            nearest = min(gaps, key=lambda version: gaps[version])
            holds = f"are those of version {nearest}" if gaps[nearest] <= self.tolerance else "belong to no version"
            return f"its log-probabilities differ from the trainer's by {gap:.3g} nats on average and {holds}"
        if before is not None and np.array_equal(answers, before.logprobs):
            moved = _gap(self.published[self.newest], self.published[before.since])
            if moved > STILL_SHARE * self.tolerance:
                return (
                    f"its log-probabilities are exactly those of version {before.since}, though the trainer's have "
                    f"moved by {moved:.3g} nats on average"
                )
        return None

    def remember(self, answers: Floats, before: ProbeAnswers | None) -> ProbeAnswers:
        """An engine's answers under the newest weights, and since when they have been these."""
        unmoved = before is not None and np.array_equal(answers, before.logprobs)
        return ProbeAnswers(answers, before.since if before is not None and unmoved else self.newest)


@dataclass(frozen=True)
class ProbeAnswers:
    """An engine's answers to the probe [N], and the version at which it first gave just these."""

    logprobs: Floats
    since: int


def _gap(one: Floats, other: Floats) -> float:
    return float(np.abs(np.asarray(one, np.float64) - other).mean())
