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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backends.arrays import Bools as Bools
from backends.arrays import Floats as Floats
from backends.arrays import Ids as Ids
from backends.arrays import Summed
from backends.errors import BackendError as BackendError
from backends.records import Completions as Completions
from backends.records import GraphUse as GraphUse
from backends.records import Probe as Probe
from backends.records import Proxy as Proxy
from backends.records import ProxyKind as ProxyKind
from backends.records import PublishedWeights as PublishedWeights
from backends.records import RolloutRequest as RolloutRequest
from backends.records import Sampling as Sampling
from backends.records import Scores as Scores
from backends.records import Sequences as Sequences
from backends.records import StopStrings as StopStrings
from backends.records import starts_of as starts_of
from backends.records import token_index as token_index

if TYPE_CHECKING:
    from backends.watchdog import Watchdog


class Turns(Protocol):
    """The environments' side of episodes: it answers each turn that the model ends.

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


OnFinished = Callable[[int, Ids], None]  # with the index of a response and its tokens
FileDigests = dict[str, str]  # SHA-256, hexadecimal, by the name of the file
WriteState = Callable[[Path], FileDigests]  # does in any thread what Learner.save does, while training goes on


# ------------------------------------------------------------------------------------ protocols


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
