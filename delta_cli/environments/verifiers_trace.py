"""From a trace of the package verifiers to the tokens of an episode, exactly as they were sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from backends.arrays import Bools, Floats, Ids

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode as VerifiersEpisode


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that its environment has driven to the end. One that failed has no tokens."""

    prompt: Ids
    region: Ids  # [m] everything after the prompt, up to the model's last token
    own: Bools  # [m] the model wrote it
    logprobs: Floats  # [n] of the model's tokens
    reward: float | None = None  # None: the environment gave none
    turns: int = 0  # of the model
    calls: int = 0  # of tools
    seconds: float = 0.0  # that the environment worked
    ended: Literal["done", "turns", "tokens", "failed"] = "failed"
    failure: str | None = None  # on one line

    @property
    def last_turn(self) -> Ids:
        """The tokens of the model's last turn."""
        return self.region[max(np.flatnonzero(~self.own), default=-1) + 1 :]


def failed(reason: str) -> PlayedEpisode:
    """An episode without tokens."""
    nothing = np.zeros(0, np.int64)
    line = " ".join(reason.split())[:300]
    return PlayedEpisode(nothing, nothing, nothing.astype(bool), nothing.astype(np.float32), failure=line)


def played(episode: VerifiersEpisode) -> PlayedEpisode:
    """What an episode's trace says. An episode that cannot be trained on token by token has failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return failed(f"{errors[-1].type}: {errors[-1].message}" if errors else "the environment does not say why")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        return failed(f"{len(traces)} agents are to be trained in one episode, and it has one response")
    branches = [branch for branch in traces[0].branches if branch.trainable]
    if len(branches) != 1:
        return failed(
            f"its conversation has {len(branches)} versions: a turn could not be extended and was rendered again; "
            "environment.renderer has to be the model's family"
        )
    (trace,), (branch,) = traces, branches
    ids, own = np.array(branch.token_ids, dtype=np.int64), np.array(branch.sampled_mask, dtype=bool)
    places = np.flatnonzero(own)
    if not len(places) or not places[0]:
        return failed("the model was not asked")
    reward = trace.reward if any(each is not None for each in trace.rewards.values()) else None
    if reward is not None and not math.isfinite(reward):
        return failed(f"its reward is {reward}")
    part = slice(places[0], places[-1] + 1)  # what follows the last turn was read by nobody
    return PlayedEpisode(
        prompt=ids[: places[0]],
        region=ids[part],
        own=own[part],
        logprobs=np.array(branch.logprobs, dtype=np.float32)[places],
        reward=reward,
        turns=trace.num_turns,
        calls=len(trace.tool_messages),
        seconds=trace.timing.agent.harness.duration + trace.timing.scoring.duration,
        ended="turns" if trace.stop_condition == "max_turns" else "tokens" if trace.is_truncated else "done",
    )
