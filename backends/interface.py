"""The boundary of a backend: plain records of numpy arrays, and the protocols of its three jobs.

A **Sampler** samples responses, a **Learner** scores them and updates the weights, a **Collective** connects the
processes that train one model together. A local engine is a Learner that is its own Sampler.

Letters in shapes mean the same everywhere: P prompts, R responses, N response tokens of all of them, S weighted sums
at a time, H hidden size, V vocabulary size. Response tokens are *flat and in order*: the tokens of all responses end
to end, with ``starts`` (int64 [R+1], first 0, last N) marking where each begins. Padding, masks, devices and storage
types stay inside the backend; only numpy crosses.

In an episode of several turns an environment writes tokens too. The N tokens are those that the model wrote;
``backends.regions.ResponseRegions`` says where the environment's lie between them.

A backend never imports ``delta_cli``: it does not know which algorithm runs. The objective reaches it as an
:class:`Objective`, a numpy function that returns a loss and its derivative with respect to the log-probabilities,
which the learner back-propagates into the weights.

If several processes train one model, each has its own responses. Only its own rows, features and share of the gradient
cross this boundary; ``step`` alone combines the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from backends.arrays import Bools as Bools
from backends.arrays import Floats as Floats
from backends.arrays import Ids as Ids
from backends.arrays import Summed
from backends.errors import BackendError as BackendError

if TYPE_CHECKING:
    from backends.regions import ResponseRegions
    from backends.watchdog import Watchdog

ProxyKind = Literal["output_row", "hidden_topk", "hidden_exact"]


# ------------------------------------------------------------------------------------- records


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


class Turns(Protocol):
    """What answers when the model ends a turn of an episode.

    A turn ends as a response without turns does; see :class:`Sampling`. The answer may come later: the sampler goes on
    with other responses meanwhile.
    """

    def turn_ended(self, row: int, region: Ids) -> None:
        """Response ``row`` of the request ended a turn with the last token of ``region``, its tokens so far."""

    def answers(self, wait: bool) -> Sequence[tuple[int, Ids | None]]:
        """The answers that have arrived: a row, and the ids to append to it; None ends the response.

        The ids leave room for at least one more token. With ``wait`` there is nothing else to do: return when an answer
        has arrived, or after some tenths of a second.
        """

    def restart(self, row: int) -> None:
        """Response ``row`` is drawn again from its prompt: the weights that drew it may not have been the newest.

        It has no answer outstanding, and may have been reported as finished. Local engines never call this.
        """


class PromptQueue(Protocol):
    """Prompts that several processes draw, each taking the next one when it has room for its responses."""

    share: int  # prompts whose responses a process draws at a time, at most

    def take(self) -> int | None:
        """The next prompt's index, which no other process gets; None if all are taken."""


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
    """Where each response begins if they lie end to end, and where the last one ends: int64 [R+1]."""
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


class Features(Protocol):
    """The proxies v [N, H] of this process's tokens, wherever they are stored; arithmetic in float32 or better.

    Rows that fit no memory budget are recomputed for every reduction, by a forward pass under the weights they belong
    to; RuntimeError if step() or load() has changed these since.
    """

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""

    def slice(self, start: int, stop: int) -> Features:
        """The features of the tokens start:stop: a view, valid until these features are closed."""

    def close(self) -> None:
        """Free the features; they cannot be used afterwards. Closing twice is harmless."""


@dataclass(frozen=True)
class Scores:
    """The results of a forward pass without gradient for sampled tokens."""

    logprobs: Floats  # [N] float32, of the sampled tokens at the sampling temperature
    entropies: Floats  # [N] float32, nats, of the distribution each token was drawn from
    features: Features | None  # None without a proxy


class Objective(Protocol):
    """The function to minimise. Pure numpy; called for whole responses, once for each."""

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        """Loss and dloss/dlogp [n] for the responses at ``rows`` of the sequences that were handed to ``accumulate``.

        ``logp`` [n] are their current log-probabilities, flat in that order. The losses of all calls add up to the
        loss of the mini-batch.

        Two attributes are optional. An objective whose loss depends on which responses share a micro-batch sets
        ``needs_whole_micro_batch`` and is called once for each micro-batch. One that keeps count of what it has seen
        has a method ``restart()``, which is called before a mini-batch is started over.
        """


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


OnFinished = Callable[[int, Ids], None]  # with the index of a response and its tokens
FileDigests = dict[str, str]  # SHA-256, hexadecimal, by the name of the file
WriteState = Callable[[Path], FileDigests]  # does in any thread what Learner.save does, while training goes on


# ------------------------------------------------------------------------------------ protocols


@dataclass(frozen=True)
class GraphUse:
    """How often a GPU ran the forward passes and draws of rollouts as recorded graphs."""

    replayed: int = 0
    launched: int = 0  # kernel by kernel
    fault: str | None = None  # why nothing more is recorded; None if nothing is wrong

    def __add__(self, other: GraphUse) -> GraphUse:
        return GraphUse(self.replayed + other.replayed, self.launched + other.launched, other.fault or self.fault)


class Sampler(Protocol):
    """Samples responses from a version of the weights."""

    version: int  # of the weights it samples from

    @property
    def inbox(self) -> Path | None:
        """The folder for published weights; None: the sampler uses the learner's own."""

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """Sample ``samples`` responses for each prompt.

        The same seed and rows give the same responses, whenever an environment answers. ``on_finished(row, tokens)`` is
        called as soon as response ``row`` (its index in the result) is complete, in whatever order they finish, with
        all its tokens.
        """

    def load_weights(self, weights: PublishedWeights) -> None:
        """Sample from these weights from now on. Raises BackendError if that is impossible."""


class Learner(Protocol):
    """Log-probabilities, gradients and updates of one model, or of its shard, on one device."""

    name: str  # of the backend
    parameters: int  # in the model
    trainable: int  # of these, updated by step()
    vocabulary: int  # ids the model can read and write
    version: int  # counts updates and loads of the weights
    threads: int | None  # of the CPU; None if the backend does not say
    slower_path: str | None  # why a fast kernel of this device is not used, for the user; None if nothing is missing
    interrupt: Callable[[], None]  # called before every micro-batch; an exception it raises ends score or accumulate

    def score(self, sequences: Sequences, proxy: Proxy | None = None) -> Scores:
        """One forward pass: log-probabilities, entropies and, with a proxy, features."""

    def reference(self, sequences: Sequences) -> Floats:
        """Log-probabilities [N] float32 under the reference policy: the policy as it was loaded.

        Raises BackendError unless the settings have ``keep_reference``.
        """

    def hidden_residuals(self, sequences: Sequences) -> Floats:
        """‖h − h_reference‖ of the final hidden states, which the head reads, for every token; [N] float32.

        Raises BackendError unless the settings have ``keep_reference``.
        """

    def accumulate(self, sequences: Sequences, objective: Objective) -> float:
        """Forward and backward over all sequences, in micro-batches; adds to the gradient.

        Returns the loss, summed over the micro-batches of this process.
        """

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        """Sum the gradient over processes, multiply it by ``scale``, clip it, update the weights, and drop it.

        Returns the norm of the whole gradient after scaling and before clipping, the same on every process. Updates
        nothing if it is not finite.
        """

    def sample_weights(self) -> Floats:
        """A few values of every trained weight, float32 [n]: the same on every process, or the weights have drifted.

        Empty if each process holds only its own part of the weights.
        """

    def save(self, folder: Path) -> FileDigests:
        """Write what this process holds of the trainable weights and the optimizer's state into an existing folder.

        Returns the digests of the files that it hashed while it wrote them and that are flushed to disk. The caller
        hashes the other files.
        """

    def copy_state(self, room: int) -> WriteState | None:
        """Copy what ``save`` writes into host memory; None if that takes more than ``room`` bytes."""

    def load(self, folder: Path) -> None:
        """Restore, bit for bit, what any number of processes wrote with ``save``."""

    def export(self, folder: Path) -> None:
        """Write a model folder (config, tokenizer, safetensors) that transformers and mlx-lm open.

        Every process must call it; rank 0 writes.
        """

    def publish(self, inbox: Path | None) -> PublishedWeights:
        """Publish the present weights for samplers, written into ``inbox`` if there is one."""

    def take_graph_use(self) -> GraphUse | None:
        """How rollouts used graphs since the last call; None if there were none, or the device has no graphs."""

    def peak_memory(self) -> int:
        """The most bytes this process has used on the device so far (on a CPU: resident)."""

    def close(self) -> None:
        """Free the model."""


class Engine(Sampler, Learner, Protocol):
    """A learner that samples from its own weights, without copying them."""

    takes_prompts: bool  # whether requests may have a queue of prompts


class Collective(Protocol):
    """The processes of a run, called ranks. All of them call the same methods in the same order."""

    rank: int  # of this process
    size: int  # how many there are
    watchdog: Watchdog | None  # detects ranks that hang; None for a single process

    def sum(self, array: Summed) -> Summed:
        """The sum over ranks of arrays of one shape, the same bits on every rank."""

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, in rank order: any objects that can be pickled."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def tickets(self) -> Callable[[], int] | None:
        """A function that returns 0, 1, 2, …, each number on one rank only; None if the ranks cannot count together."""

    def separate(self) -> Collective:
        """The same ranks for another thread, whose calls and this one's may come in any order. All ranks call it."""

    def close(self) -> None:
        """Leave the group."""


class RewardModel(Protocol):
    """A model that scores chats."""

    def logits(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[float | None]:
        """The logit of each chat, a list of turns with role and content; None for one above the length limit."""
        ...
