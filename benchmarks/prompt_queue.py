"""What a queue of prompts saves over fixed shares, simulated: when each rank has drawn its last response.

Every decoding step takes as long as any other, so time is counted in steps. The mean length of a prompt's responses is
spread like a log-normal's, and a prompt's responses like an exponential's around it, up to the limit.

    python benchmarks/prompt_queue.py --out benchmarks/results/prompt_queue.json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable
from statistics import fmean

import numpy as np
from common import show, write

from backends.arrays import Doubles
from backends.collective import SharedPrompts

SPREAD = 0.6  # standard deviation of the logarithm of a prompt's mean length


class Rank:
    """One rank of the group that ``SharedPrompts`` reads; responses run in ``slots``."""

    def __init__(self, rank: int, size: int, slots: int) -> None:
        self.rank, self.size = rank, size
        self.ends: list[float] = []  # of the responses under way
        self.waiting: list[float] = []  # lengths
        self.slots, self.end = slots, 0.0

    def admit(self, now: float, take: Callable[[], Doubles | None], most: int) -> None:
        """Let responses that have ended leave, and admit others, as the engine does."""
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        while len(self.ends) < self.slots:
            if not self.waiting:
                group = take() if len(self.ends) + 1 <= most else None
                if group is None:
                    return
                self.waiting += group.tolist()
            heapq.heappush(self.ends, now + self.waiting.pop(0))
            self.end = max(self.end, *self.ends[-1:], max(self.ends))


def ends(lengths: Doubles, ranks: int, slots: int, queue: bool) -> list[float]:
    """When each rank is done with its part of the responses [prompts, samples]."""
    group = [Rank(rank, ranks, slots) for rank in range(ranks)]
    ticket = itertools.count().__next__
    shared = [SharedPrompts(ticket, each, len(lengths)) for each in group]  # type: ignore[arg-type]
    fixed = [iter(range(rank, len(lengths), ranks)) for rank in range(ranks)]
    events: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    while events:
        now, rank = heapq.heappop(events)

        def take(rank: int = rank) -> Doubles | None:
            prompt = shared[rank].take() if queue else next(fixed[rank], None)
            return None if prompt is None else lengths[prompt]

        samples = lengths.shape[1]
        most = shared[rank].share * samples - samples + 1 if queue else len(lengths) * samples
        group[rank].admit(now, take, most)
        if group[rank].ends:
            heapq.heappush(events, (group[rank].ends[0], rank))
    return [each.end for each in group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--mean", type=int, default=5120, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=20480)
    parser.add_argument("--slots", type=int, nargs="*", default=[12, 100], help="responses of a rank at a time")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", metavar="JSON")
    options = parser.parse_args()
    results = []
    for slots in options.slots:
        rng, spread, saved = np.random.default_rng(0), list[float](), list[float]()
        for _ in range(options.trials):
            means = options.mean * np.exp(rng.normal(-(SPREAD**2) / 2, SPREAD, options.prompts))
            drawn = rng.exponential(1, (options.prompts, options.responses)) * means[:, None]
            lengths = np.minimum(options.longest, np.ceil(drawn))
            fixed, queued = (ends(lengths, options.ranks, slots, queue) for queue in (False, True))
            spread.append(max(fixed) / fmean(fixed))
            saved.append(max(fixed) / max(queued))
        results.append({"slots": slots, "fixed, last over mean": fmean(spread), "fixed over queue": fmean(saved)})
    write(options.out, {"simulated": vars(options) | {"out": None}, "results": results})
    show(
        f"{options.ranks} ranks, {options.prompts} prompts × {options.responses} responses",
        [{name: f"{value:.3g}" for name, value in row.items()} for row in results],
    )


if __name__ == "__main__":
    main()
