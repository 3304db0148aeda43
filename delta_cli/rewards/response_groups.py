"""The responses to a prompt together, for rewards that compare them, and for reward models, which take batches."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass

from delta_cli.data.problem import Problem
from delta_cli.rewards.worker_pool import GradingRequest, Score, WorkerPool


@dataclass(frozen=True)
class GroupPlace:
    """Where a response belongs: the group of its prompt, and its place in it."""

    groups: ResponseGroups
    group: int
    place: int


class ResponseGroups:
    """Collects the responses of a rollout by prompt; a group is graded when its last response is there.

    A response that is reported again, because it had to be drawn again, replaces the earlier one, and its group is
    graded again.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._lock = threading.Lock()
        self._texts: defaultdict[tuple[int, int], dict[int, str]] = defaultdict(dict)  # of a pool and group, by place
        self._waiting: defaultdict[tuple[int, int], list[tuple[int, Future[Score]]]] = defaultdict(list)

    def add(self, pool: WorkerPool, problem: Problem, group: int, place: int, response: str) -> Future[Score]:
        """The score of a response among those of its group, from a worker of ``pool``."""
        key, result = (id(pool), group), Future[Score]()
        with self._lock:
            self._texts[key][place] = response
            self._waiting[key].append((place, result))
            if len(self._texts[key]) < self.samples:
                return result
            waiting = self._waiting.pop(key)
            responses = tuple(self._texts[key][place] for place in range(self.samples))

        def settle(done: Future[Score]) -> None:
            score = Score(0.0, failure="error: the grader was closed") if done.cancelled() else done.result()
            for own, future in waiting:
                future.set_result(score if score.values is None else _own_score(score.values[own]))

        pool.submit(GradingRequest("", problem, responses=responses)).add_done_callback(settle)
        return result


def _own_score(value: float | None) -> Score:
    """The score of one response of a group. A reward model has none for what is too long for it."""
    if value is None:
        return Score(0.0, failure="error: longer than the reward model reads (reward.model.max_length)", void=True)
    return Score(value)
