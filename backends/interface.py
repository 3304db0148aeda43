"""What a backend is: plain records of numpy arrays, and the protocols of the three jobs it does.

A **Sampler** draws responses, a **Learner** scores them and moves the weights, a **Collective** joins
the processes that train one model together. A local engine is a Learner that is its own Sampler.

Letters in shapes mean the same everywhere: P prompts, R responses, N response tokens of all of them,
S weighted sums at a time, H hidden size, V vocabulary size. Response tokens are *flat and in order*: those of
all responses end to end, ``starts`` (int64 [R+1], first 0, last N) marking where each begins.
Padding, masks, devices and storage types stay inside the backend; what crosses is numpy.

A backend never imports ``delta_cli``: it does not know which algorithm runs. The objective reaches
it as an :class:`Objective`, a numpy function that returns a loss and its derivative with respect to
the log-probabilities, which the learner back-propagates into the weights.

Several processes train one model, each on responses of its own. What crosses this boundary is one
process's: its rows, its features, its share of the gradient. ``step`` alone joins the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    from backends.watchdog import Watchdog

ProxyKind = Literal["output_row", "hidden_topk", "hidden_exact"]


# ------------------------------------------------------------------------------------- records


class StopStrings(Protocol):
    """Strings that end a response as an end-of-sequence token does; see ``backends.stop_strings.StopText``."""

    @property
    def strings(self) -> tuple[str, ...]:
        """Any of them ends a response."""

    def completed_by(self, tokens: Ids | Sequence[int]) -> bool:
        """Whether the last of ``tokens``, a response so far, completes one."""


@dataclass(frozen=True)
class Sampling:
    """How to draw responses. ``temperature`` 0 takes the likeliest token.

    Of the distribution at the temperature first ``min_p`` takes away tokens less likely than that share of the
    likeliest one's probability, then ``top_k`` all but the k likeliest, then ``top_p`` all but the likeliest that
    reach it together, of what is left by then. Tokens of one probability stay or go together under the first two.

    A response ends with the first token that is one of ``stop_ids`` or completes a string of ``stop``.
    That token is the last of the response, as it was sampled.
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
        """Whether a response ends with the last of ``tokens``, the limit aside."""
        if not len(tokens):
            return False
        return int(tokens[-1]) in self.stop_ids or (self.stop is not None and self.stop.completed_by(tokens))

    @property
    def truncates(self) -> bool:
        """Whether it draws from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def softmax_temperature(self) -> float:
        """That of the distribution whose log-probabilities are told: 1 where the likeliest token is taken."""
        return self.temperature or 1.0


def _nothing() -> None:
    """What is called where nobody asks to be."""


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts to answer. The noise of a response is a function of the seed and of its row in the whole batch.

    ``rows`` numbers the responses, prompt-major, in the batch that several processes draw together, so that a
    response does not depend on who draws it; None: 0, 1, 2, … ``interrupt`` is called every few tokens; what it
    raises ends the drawing. ``entropies`` and ``proxy`` ask for what else an engine knows of tokens as it draws them.
    """

    prompts: tuple[Ids, ...]  # P, of at least one id each
    sampling: Sampling
    rows: Ids | None = None  # [R] = [P · samples]
    interrupt: Callable[[], None] = _nothing
    entropies: bool = False
    proxy: Proxy | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and len(self.rows) != len(self):
            raise ValueError(f"rows must be [R] = [{len(self)}], not {list(self.rows.shape)}")

    def __len__(self) -> int:
        return len(self.prompts) * self.sampling.samples

    @property
    def global_rows(self) -> Ids:
        """The row of each response in the whole batch, [R]."""
        return np.arange(len(self)) if self.rows is None else self.rows


@dataclass(frozen=True)
class Completions:
    """Sampled responses, prompt-major: those of the first prompt, then those of the second, …

    ``tokens`` are the ids as they were sampled, the token that ended a response included;
    ``logprobs`` are the sampling engine's own, at the sampling temperature, of the whole distribution;
    ``truncated`` marks responses that ran into ``max_tokens`` without an end, see :class:`Sampling`;
    ``version`` is that of the weights they were drawn from;
    ``entropies`` are those of the distributions that ``logprobs`` are of, ``features`` what scoring would have made:
    where they were asked for, the engine knows them, and those of all tokens fit the budgets.
    """

    tokens: Ids  # [N]
    starts: Ids  # [R+1]
    logprobs: Floats  # [N] float32
    truncated: Bools  # [R]
    version: int = 0
    entropies: Floats | None = None  # [N] float32, nats
    features: Features | None = None  # of N tokens


def starts_of(lengths: Sequence[int] | Ids) -> Ids:
    """Where each of several responses begins when they lie end to end, and where the last ends: int64 [R+1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, ready for a forward pass.

    ``temperature`` is the one the responses were drawn at: every log-probability and entropy is that of
    softmax(logits / temperature). 0, of responses that took the likeliest token, becomes 1."""

    prompts: tuple[Ids, ...]  # R arrays of at least one id; responses of a group share one array
    tokens: Ids  # [N]
    starts: Ids  # [R+1]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", self.temperature or 1.0)

    def __len__(self) -> int:
        return len(self.prompts)

    def response(self, row: int) -> Ids:
        """The token ids of one response."""
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> Ids:
        """Response tokens of each response, [R]."""
        return np.diff(self.starts)

    def select(self, rows: Ids) -> Sequences:
        """The sequences at ``rows``, in that order."""
        return Sequences(
            prompts=tuple(self.prompts[row] for row in rows),
            tokens=self.tokens[token_index(self.starts, rows)],
            starts=starts_of(self.lengths[rows]),
            temperature=self.temperature,
        )


def token_index(starts: Ids, rows: Ids) -> Ids:
    """Flat positions of the tokens of the responses at ``rows``, in that order."""
    lengths = starts[rows + 1] - starts[rows]
    offsets = np.repeat(starts[rows] - starts_of(lengths)[:-1], lengths)
    return np.arange(lengths.sum(), dtype=np.int64) + offsets


@dataclass(frozen=True)
class Proxy:
    """Which token-gradient proxy v the features hold (method, section 2).

    ``output_row``: (1 − p)·h; ``hidden_topk``: W_y − Σ over the ``k`` likeliest of q_j·W_j, q
    renormalised over them; ``hidden_exact``: W_y − Σ over the vocabulary of p_j·W_j. In all of
    them p is the softmax at the sampling temperature, and h and W are the head's input and rows.
    """

    kind: ProxyKind = "output_row"
    k: int = 20  # hidden_topk only


class Features(Protocol):
    """The proxies v [N, H] of one process's tokens, wherever they are kept; arithmetic in float32 or better.

    Those that no budget had room for are computed anew for every reduction, by a forward under the weights
    they belong to: RuntimeError where these have changed since, by step() or load().
    """

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""

    def slice(self, start: int, stop: int) -> Features:
        """The features of tokens start:stop, a view that is valid until this one is closed."""

    def close(self) -> None:
        """Free the memory; the features cannot be used afterwards. Closing twice is harmless."""


@dataclass(frozen=True)
class Scores:
    """What one forward without gradient tells about sampled tokens."""

    logprobs: Floats  # [N] float32, of the sampled tokens at the sampling temperature
    entropies: Floats  # [N] float32, nats, of the distribution each token was drawn from
    features: Features | None  # None when no proxy was asked for


class Objective(Protocol):
    """What is minimised, as the learner sees it. Pure numpy; called for whole responses, each of them once."""

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
    """Sequences and what their tokens' log-probabilities are under some weights, to know these by."""

    sequences: Sequences  # at temperature 1
    logprobs: Floats  # [N] float32, the learner's


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that a learner has published: their version, the folder they lie in, and what they answer.

    ``folder`` is None where they were not written because the sampler computes with the learner's own.
    It holds a model, or an ``adapter`` alone where only adapters are trained.
    """

    version: int
    folder: Path | None = None
    probe: Probe | None = None  # of weights in a folder


OnFinished = Callable[[int, Ids], None]
FileDigests = dict[str, str]  # SHA-256, hexadecimal, by the name of the file


# ------------------------------------------------------------------------------------ protocols


class Sampler(Protocol):
    """Draws responses from some version of the weights."""

    version: int  # of the weights that responses are drawn from now

    @property
    def inbox(self) -> Path | None:
        """The folder that published weights are to be written into; None: the learner's own are at hand."""

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """Draw ``samples`` responses for each prompt.

        The same seed and rows give the same responses. ``on_finished(row, tokens)`` is called as soon as
        response ``row`` (its index in the result) is complete, in whatever order they finish.
        """

    def load_weights(self, weights: PublishedWeights) -> None:
        """Draw from these weights from now on. Raises BackendError where that cannot be."""


class Learner(Protocol):
    """Log-probabilities, gradients and updates of one model on one device, or of its shard there."""

    name: str  # of the backend
    parameters: int  # in the model
    trainable: int  # of them, updated by step()
    vocabulary: int  # ids the model can read and write
    version: int  # of the weights: how often they were updated or loaded
    threads: int | None  # of the processor that it computes with; None where it does not say
    interrupt: Callable[[], None]  # called before every micro-batch; what it raises ends score or accumulate

    def score(self, sequences: Sequences, proxy: Proxy | None = None) -> Scores:
        """One forward: log-probabilities, entropies and, with a proxy, features."""

    def reference(self, sequences: Sequences) -> Floats:
        """Log-probabilities [N] float32 under the policy as it was loaded.

        Raises BackendError unless the settings said ``keep_reference``.
        """

    def accumulate(self, sequences: Sequences, objective: Objective) -> float:
        """Forward and backward over all sequences, in micro-batches; adds to the gradient.

        Returns the loss, the sum over the micro-batches of this process.
        """

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        """Sum the gradient over processes, multiply it by ``scale``, clip it, update the weights, drop it.

        Returns the norm of the whole gradient after scaling and before clipping, the same on every
        process. Where it is not finite, nothing is updated.
        """

    def sample_weights(self) -> Floats:
        """A few values of every trained weight, float32 [n]: the same on every process, or the weights have drifted.

        Empty if each process holds only its own part of the weights.
        """

    def save(self, folder: Path) -> FileDigests:
        """Write what this process holds of the trainable weights and the optimizer's state into an existing folder.

        Returns the digests of files that were hashed as they were written, and are on disk; the caller hashes others.
        """

    def load(self, folder: Path) -> None:
        """Restore what any number of processes wrote with ``save``, bit for bit."""

    def export(self, folder: Path) -> None:
        """Write a model folder (config, tokenizer, safetensors) that transformers and mlx-lm open.

        Every process calls it, and the first one writes.
        """

    def publish(self, inbox: Path | None) -> PublishedWeights:
        """The present weights for samplers, written into ``inbox`` where there is one."""

    def peak_memory(self) -> int:
        """Bytes: the most this process has used on the device (on a CPU: resident) so far."""

    def close(self) -> None:
        """Free what the model holds."""


class Engine(Sampler, Learner, Protocol):
    """A learner that samples from its own weights: the same version, at no cost."""


class Collective(Protocol):
    """The processes of a run, called ranks. All of them call the same methods in the same order."""

    rank: int  # of this process
    size: int  # how many there are
    watchdog: Watchdog | None  # what notices ranks that hang; None on a single process

    def sum(self, array: Summed) -> Summed:
        """The sum over ranks of arrays of one shape, the same bits on every rank."""

    def gather(self, item: Any) -> list[Any]:
        """What every rank handed in, in the order of ranks: any object that can be pickled."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def close(self) -> None:
        """Leave the group."""
