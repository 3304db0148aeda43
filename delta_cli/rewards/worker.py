"""What a worker process runs: it grades one response after another until its socket closes."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import resource
import signal
import socket
import sys
from typing import IO

from delta_cli.recipe.reward import Reward, RewardKind
from delta_cli.rewards.reward_model import model_scores
from delta_cli.rewards.verifiers import GroupReward, Verifier, custom_group, verifier, well_formed
from delta_cli.rewards.worker_pool import GradingRequest, Score, failure

WORKER_BYTES = 4 * 2**30  # address space of a worker, at most
ORPHAN_SECONDS = 2  # how much longer than its limit a worker runs if nobody is left to kill it


def main(link: socket.socket, requests: IO[bytes]) -> None:
    """Answer each request with a line of JSON. The first message is the reward with its settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    scorer: _Scorer | None = None
    while size := requests.read(8):
        message = requests.read(int.from_bytes(size, "big"))
        try:
            if scorer is None:
                reward, form, timeout = pickle.loads(message)
                if reward.kind != "model":
                    _limit_memory()
                scorer = _Scorer(reward, form, timeout)
                score = Score(0.0)
            else:
                score = scorer.score(pickle.loads(message))
        except BaseException as error:  # a custom function may raise anything, SystemExit too
            score = Score(0.0, failure=failure(error))
        link.sendall(json.dumps(dataclasses.asdict(score)).encode() + b"\n")


def _limit_memory() -> None:
    """Bound the address space, so that no response can fill the machine's memory."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # what ulimit -v allows
        most = WORKER_BYTES if hard == resource.RLIM_INFINITY else min(WORKER_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


class _Scorer:
    """The verifier of one reward, made before the clock of the first response starts.

    The file of a custom reward may itself fail or hang, so it is loaded on the clock of the first response.
    """

    def __init__(self, reward: Reward, form: RewardKind, timeout: float) -> None:
        self.reward = reward
        self.form = form
        self.compare: GroupReward | None = None
        self.alarm = math.ceil(timeout) + ORPHAN_SECONDS
        self.verify: Verifier | None = None
        if reward.model is not None:
            self.compare = model_scores(reward.model)
        elif reward.kind not in ("custom", "length", "environment"):
            self.verify = verifier(reward, form)

    def score(self, request: GradingRequest) -> Score:
        signal.alarm(self.alarm)  # ends this process whatever it is doing
        try:
            if request.responses is not None:
                self.compare = self.compare or custom_group(self.reward)
                return Score(0.0, values=tuple(self.compare(request.responses, request.problem)))
            value = request.value
            if value is None:
                self.verify = self.verify or verifier(self.reward, self.form)
                value = self.verify(request.response, request.problem)
            return Score(value, request.form and well_formed(request.response, self.reward.kind))
        finally:
            signal.alarm(0)
