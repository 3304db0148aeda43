"""The records that cross the boundary of a backend; ``backends.interface`` explains it and exports them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from backends.arrays import Bools, Floats, Ids

if TYPE_CHECKING:
    from backends.interface import Features, PromptQueue, Turns
    from backends.regions import ResponseRegions

ProxyKind = Literal["output_row", "hidden_topk", "hidden_exact"]


class StopStrings(Protocol):
    """Strings that end a response, just as an end-of-sequence token does; see ``backends.stop_strings.StopText``."""

    @property
    def strings(self) -> tuple[str, ...]:
        """Each of them ends a response."""

    def completed_by(self, tokens: Ids | Sequence[int]) -> bool:
        """Whether the last of ``tokens``, a response so far, completes a stop string."""


@dataclass(frozen=True)
class Sampling:
    """How to sample responses. ``temperature`` 0 takes the likeliest token.

    The distribution at the temperature is truncated in this order: ``min_p`` removes tokens with less than that share
    of the likeliest one's probability, ``top_k`` all but the k likeliest, and ``top_p`` all but the likeliest that
    together reach it, of what is left. Under the first two, tokens of equal probability stay or go together.

    A response ends with the first token that is one of ``stop_ids`` or completes a string of ``stop``. That token is
    the last of the response, as it was sampled.
    """

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    samples: int = 1  # responses per prompt
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    stop: StopStrings | None = None

    def ends(self, tokens: Ids | Sequence[int]) -> bool:
        """Whether a response ends with the last of ``tokens``, apart from the length limit."""
        if not len(tokens):
            return False
        return int(tokens[-1]) in self.stop_ids or (self.stop is not None and self.stop.completed_by(tokens))

    def before_stop(self, text: str) -> str:
        """A response's text up to its first stop string, which is not part of the answer."""
        strings = () if self.stop is None else self.stop.strings
        return text[: min((place for place in map(text.find, strings) if place >= 0), default=len(text))]

    @property
    def truncates(self) -> bool:
        """Whether it samples from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def softmax_temperature(self) -> float:
        """The temperature of the reported log-probabilities: 1 if the likeliest token is taken."""
        return self.temperature or 1.0


def _do_nothing() -> None:
    """No-op callback."""


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts to answer. The noise of a response is a function of the seed and of its row in the whole batch.

    ``rows`` numbers the responses, prompt-major, in the batch that several processes sample together, so that a
    response does not depend on which process samples it; None: 0, 1, 2, … ``interrupt`` is called every few tokens,
    and an exception it raises ends the rollout. ``entropies`` and ``proxy`` ask for what else the engine knows about
    sampled tokens.

    With a ``queue`` the prompts are those of all processes. The sampler draws the ones that it takes from the queue,
    and returns their responses alone, in the order of ``prompts``.

    With ``turns`` a response is an episode: ``sampling.max_tokens`` then limits all its tokens, the environment's
    included, and the noise of a token depends on its place among them.
    """

    prompts: tuple[Ids, ...]  # P, each of at least one id
    sampling: Sampling
    rows: Ids | None = None  # [R] = [P · samples]
    interrupt: Callable[[], None] = _do_nothing
    entropies: bool = False
    proxy: Proxy | None = None
    turns: Turns | None = None
    queue: PromptQueue | None = None  # only for samplers that take prompts

    def __post_init__(self) -> None:
        if self.rows is not None and len(self.rows) != len(self):
            raise ValueError(f"rows must be [R] = [{len(self)}], not {list(self.rows.shape)}")

    def __len__(self) -> int:
        return len(self.prompts) * self.sampling.samples

    @property
    def at_once(self) -> int:
        """Responses that are drawn at a time, at most."""
        return len(self) if self.queue is None else min(len(self), self.queue.share * self.sampling.samples)

    @property
    def global_rows(self) -> Ids:
        """The row of each response in the whole batch [R]."""
        return np.arange(len(self)) if self.rows is None else self.rows


def starts_of(lengths: Sequence[int] | Ids) -> Ids:
    """The start of each response when all lie end to end, and the end of the last one: int64 [R+1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def token_index(starts: Ids, rows: Ids) -> Ids:
    """Flat positions of the tokens of the responses at ``rows``, in that order."""
    lengths = starts[rows + 1] - starts[rows]
    offsets = np.repeat(starts[rows] - starts_of(lengths)[:-1], lengths)
    return np.arange(lengths.sum(), dtype=np.int64) + offsets


@dataclass(frozen=True)
class Completions:
    """Sampled responses, prompt-major: first the responses to the first prompt, then those to the second, …

    ``tokens`` are the ids as they were sampled, including the token that ended a response; ``logprobs`` are the
    sampling engine's own, at the sampling temperature and of the whole distribution; ``truncated`` marks responses
    that reached ``max_tokens`` without an end, see :class:`Sampling`; ``version`` is that of the weights;
    ``entropies`` are those of the same distributions, and ``features`` equal those of a forward pass. The last two are
    present if they were requested, the engine knows them, and all tokens fit the memory budgets.
    """

    tokens: Ids  # [N]
    starts: Ids  # [R+1]
    logprobs: Floats  # [N] float32
    truncated: Bools  # [R]
    version: int = 0
    entropies: Floats | None = None  # [N] float32, nats
    features: Features | None = None  # of N tokens
    regions: ResponseRegions | None = None  # if the request has turns: ``tokens`` are those that the model wrote
    versions: Ids | None = None  # [N] of the weights that drew each token; None: ``version`` drew all


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, ready for a forward pass.

    Log-probabilities and entropies are those of softmax(logits / temperature), with the ``temperature`` that sampled
    the responses. 0, which takes the likeliest token, becomes 1.
    """

    prompts: tuple[Ids, ...]  # R arrays of at least one id; responses of a group share one array
    tokens: Ids  # [N]
    starts: Ids  # [R+1]
    temperature: float = 1.0
    regions: ResponseRegions | None = None  # of episodes; None: the model wrote every token of a response

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", self.temperature or 1.0)
        if self.regions is not None and not np.array_equal(self.regions.own_starts, self.starts):
            raise ValueError("starts do not count the tokens that regions mark as the model's own")

    def __len__(self) -> int:
        return len(self.prompts)

    def response(self, row: int) -> Ids:
        """The token ids of one response: those that the model wrote."""
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    def region(self, row: int) -> tuple[Ids, Bools]:
        """All ids after the prompt of one response, and which of them the model wrote."""
        if self.regions is not None:
            return self.regions.region(row)
        response = self.response(row)
        return response, np.ones(len(response), dtype=bool)

    @property
    def lengths(self) -> Ids:
        """The number of tokens that the model wrote in each response [R]."""
        return np.diff(self.starts)

    @property
    def region_lengths(self) -> Ids:
        """The number of tokens after the prompt of each response, those of an environment included [R]."""
        return self.lengths if self.regions is None else self.regions.lengths

    def select(self, rows: Ids) -> Sequences:
        """The sequences at ``rows``, in that order."""
        return Sequences(
            prompts=tuple(self.prompts[row] for row in rows),
            tokens=self.tokens[token_index(self.starts, rows)],
            starts=starts_of(self.lengths[rows]),
            temperature=self.temperature,
            regions=None if self.regions is None else self.regions.select(rows),
        )


@dataclass(frozen=True)
class Proxy:
    """Which token-gradient proxy v the features hold (method, section 2).

    ``output_row`` is (1 − p)·h. ``hidden_topk`` is W_y − Σ q_j·W_j over the ``k`` likeliest tokens, with q the
    probabilities renormalised over these. ``hidden_exact`` is W_y − Σ p_j·W_j over the vocabulary. In all of them p is
    the softmax at the sampling temperature, h the input of the head, and W_j row j of its matrix.
    """

    kind: ProxyKind = "output_row"
    k: int = 20  # hidden_topk only


@dataclass(frozen=True)
class Scores:
    """The results of a forward pass without gradient for sampled tokens."""

    logprobs: Floats  # [N] float32, of the sampled tokens at the sampling temperature
    entropies: Floats  # [N] float32, nats, of the distribution each token was drawn from
    features: Features | None  # None without a proxy


@dataclass(frozen=True)
class Probe:
    """Sequences with the log-probabilities of their tokens under some weights, to recognise these weights."""

    sequences: Sequences  # at temperature 1
    logprobs: Floats  # [N] float32, the learner's


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that a learner has published: version, folder and probe.

    ``folder`` is None if nothing was written because the sampler uses the learner's own weights. It holds a model, or
    only an ``adapter`` if only adapters are trained.
    """

    version: int
    folder: Path | None = None
    probe: Probe | None = None  # if the weights are in a folder


@dataclass(frozen=True)
class GraphUse:
    """How often a GPU ran the forward passes and draws of rollouts as recorded graphs."""

    replayed: int = 0
    launched: int = 0  # kernel by kernel
    fault: str | None = None  # why nothing more is recorded; None if nothing is wrong

    @property
    def share(self) -> float:
        """The share that was replayed."""
        return self.replayed / max(self.replayed + self.launched, 1)

    def __add__(self, other: GraphUse) -> GraphUse:
        return GraphUse(self.replayed + other.replayed, self.launched + other.launched, other.fault or self.fault)
