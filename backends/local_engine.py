"""The base class of local engines: checks of ids, retries when memory runs out, versions of the weights."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from backends.errors import out_of_step, outdated_features, too_long
from backends.interface import (
    BackendError,
    Completions,
    Floats,
    GraphUse,
    Ids,
    Objective,
    OnFinished,
    Probe,
    Proxy,
    PublishedWeights,
    RolloutRequest,
    Scores,
    Sequences,
)
from backends.settings import BackendSettings

Result = TypeVar("Result")

PROBES, PROBE_TOKENS = 4, 15  # responses, and tokens of each, in the probe of published weights
PROBE_SEED = 20605


class MicroBatch(Protocol):
    """The sequences of one forward pass, as far as a retry must know them."""

    @property
    def rows(self) -> Ids:
        """Indices into the sequences."""

    @property
    def tokens(self) -> int:
        """Its size against the token budget."""

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""


AnyMicroBatch = TypeVar("AnyMicroBatch", bound=MicroBatch | None)


class Recovery:
    """Repeats forward passes with half the micro-batch if memory runs out.

    ``tokens`` is the budget of a micro-batch, which stays at the size that fitted. ``is_out_of_memory`` recognises
    such errors, ``release`` frees the framework's cached memory. Nothing is repeated unless ``alone``: otherwise other
    ranks would wait forever inside the same forward pass.
    """

    def __init__(
        self, tokens: int, is_out_of_memory: Callable[[BaseException], bool], release: Callable[[], None]
    ) -> None:
        self.tokens = tokens
        self.alone = True
        self.interrupt: Callable[[], None] = lambda: None
        self._is_out_of_memory = is_out_of_memory
        self._release = release
        self._present: MicroBatch | None = None

    def track(self, batches: Iterable[AnyMicroBatch]) -> Iterator[AnyMicroBatch]:
        """Iterate over micro-batches and remember the present one."""
        for batch in batches:
            self.interrupt()
            self._present = batch
            yield batch

    def run(self, attempt: Callable[[], Result], restart: Callable[[], None] = lambda: None) -> Result:
        """``attempt()``; if memory runs out, call ``restart`` and try again."""
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if self._present is None or not self._is_out_of_memory(error):
                    raise
                if not self.alone:
                    raise out_of_step(self._present.tokens) from error
                if len(self._present.rows) == 1:
                    raise too_long(self._present.longest) from error
                self.tokens = self._present.tokens // 2
            finally:
                self._present = None
                self._release()
            restart()  # here, because inside the handler the exception keeps the failed attempt's tensors alive


def check_ids(prompts: Sequence[Ids], tokens: Ids | None, vocabulary: int) -> None:
    """Raise ValueError for an empty prompt or an id that the model does not have."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty; a prompt has at least one token")
    for array in (*{id(prompt): prompt for prompt in prompts}.values(), *(() if tokens is None else (tokens,))):
        if len(array) and not (array.min() >= 0 and array.max() < vocabulary):
            raise ValueError(
                f"token id {int(array.max() if array.max() >= vocabulary else array.min())} is not in the model's "
                f"vocabulary of {vocabulary}; the tokenizer does not belong to this model"
            )


def check_sequences(sequences: Sequences, vocabulary: int) -> None:
    """Raise ValueError for an empty prompt or an id that the model does not have."""
    check_ids(sequences.prompts, sequences.tokens, vocabulary)
    if sequences.regions is not None:
        check_ids((), sequences.regions.ids, vocabulary)


def probe_sequences(vocabulary: int) -> Sequences:
    """A few random responses, always the same, which reveal whether weights have changed."""
    rng = np.random.default_rng(PROBE_SEED)
    ids = rng.integers(0, vocabulary, size=(PROBES, PROBE_TOKENS + 1))
    starts = np.arange(PROBES + 1, dtype=np.int64) * PROBE_TOKENS
    return Sequences(tuple(row[:1] for row in ids), ids[:, 1:].ravel(), starts)


class LocalEngine(ABC):
    """A learner that samples from its own weights; see :class:`backends.interface.Engine`."""

    inbox: Path | None = None
    takes_prompts = False

    def __init__(
        self,
        settings: BackendSettings,
        name: str,
        is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, MemoryError),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.version = 0
        self.threads: int | None = None
        self.slower_path: str | None = None
        self.graph_use: GraphUse | None = None
        self.parameters = self.trainable = self.vocabulary = 0
        self.recovery = Recovery(settings.memory.micro_batch_tokens, is_out_of_memory, release)

    @property
    def interrupt(self) -> Callable[[], None]:
        """Called before every micro-batch."""
        return self.recovery.interrupt

    @interrupt.setter
    def interrupt(self, interrupt: Callable[[], None]) -> None:
        self.recovery.interrupt = interrupt

    # ------------------------------------------------------------------------- the interface

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """Draw ``samples`` responses for each prompt from the present weights."""
        check_ids(request.prompts, None, self.vocabulary)
        return self._rollout(request, on_finished)

    def load_weights(self, weights: PublishedWeights) -> None:
        """Accept the present weights; this engine has no others. Raises BackendError for another version."""
        if weights.version != self.version:
            raise BackendError(
                f"weights of version {weights.version} were asked for, but the {self.name} engine draws from its own "
                f"weights, which have version {self.version}"
            )

    def publish(self, inbox: Path | None) -> PublishedWeights:
        """Publish the present weights; writes them, with a probe, only if another process is to read them."""
        if inbox is None:
            return PublishedWeights(self.version)
        self._write(inbox)
        sequences = probe_sequences(self.vocabulary)
        return PublishedWeights(self.version, inbox, Probe(sequences, self.score(sequences).logprobs))

    def score(self, sequences: Sequences, proxy: Proxy | None = None) -> Scores:
        """One forward pass: log-probabilities, entropies and, with a proxy, features."""
        check_sequences(sequences, self.vocabulary)
        return self.recovery.run(lambda: self._score(sequences, proxy))

    def reference(self, sequences: Sequences) -> Floats:
        """Log-probabilities [N] float32 under the reference policy."""
        self._check_reference(sequences)
        return self.recovery.run(lambda: self._reference(sequences))

    def hidden_residuals(self, sequences: Sequences) -> Floats:
        """How far each token's final hidden state is from the reference policy's, [N] float32."""
        self._check_reference(sequences)
        return self.recovery.run(lambda: self._hidden_residuals(sequences))

    def _check_reference(self, sequences: Sequences) -> None:
        check_sequences(sequences, self.vocabulary)
        if not self.settings.keep_reference:
            raise BackendError("this run has no reference policy; load the model with keep_reference = true")

    def accumulate(self, sequences: Sequences, objective: Objective) -> float:
        """Forward and backward passes over all sequences; starts over with smaller micro-batches if memory runs out."""
        check_sequences(sequences, self.vocabulary)
        restore = self._keep_gradient()

        def restart() -> None:
            restore()
            if hasattr(objective, "restart"):
                objective.restart()

        return self.recovery.run(lambda: self._accumulate(sequences, objective), restart)

    def add_graph_use(self, used: GraphUse | None) -> None:
        """Count the graphs of a rollout; None if the device has none."""
        if used is not None:
            self.graph_use = (self.graph_use or GraphUse()) + used

    def take_graph_use(self) -> GraphUse | None:
        """How rollouts used graphs since the last call."""
        found, self.graph_use = self.graph_use, None
        return found

    # --------------------------------------------------------------------- for the engines

    def recompute(self, sequences: Sequences, proxy: Proxy) -> Callable[[int, int, Callable[[Any], Result]], Result]:
        """A function of ``start``, ``stop`` and ``reduce`` that recomputes the features of those tokens.

        It raises RuntimeError once the present weights have changed.
        """
        return partial(self._recompute, sequences, proxy, self.version)

    def _recompute(
        self, sequences: Sequences, proxy: Proxy, version: int, start: int, stop: int, reduce: Callable[[Any], Result]
    ) -> Result:
        if version != self.version:
            raise outdated_features()
        return self.recovery.run(lambda: reduce(self._rows(sequences, proxy, start, stop)))

    def _write(self, inbox: Path) -> None:
        """Write what samplers need into ``inbox``: the whole model, or only the adapters. Every rank must call it."""
        self.export(inbox)

    @abstractmethod
    def _rollout(self, request: RolloutRequest, on_finished: OnFinished | None) -> Completions: ...

    @abstractmethod
    def _score(self, sequences: Sequences, proxy: Proxy | None) -> Scores: ...

    @abstractmethod
    def _reference(self, sequences: Sequences) -> Floats: ...

    @abstractmethod
    def _hidden_residuals(self, sequences: Sequences) -> Floats: ...

    def _rows(self, sequences: Sequences, proxy: Proxy, start: int, stop: int) -> Iterable[tuple[Ids, Any]]:
        """Yield flat positions and unscaled features of the tokens start:stop, some at a time."""
        raise NotImplementedError(f"the {self.name} engine keeps all features")

    @abstractmethod
    def _accumulate(self, sequences: Sequences, objective: Objective) -> float: ...

    @abstractmethod
    def _keep_gradient(self) -> Callable[[], None]:
        """A function that restores the present gradient."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a model folder that transformers and mlx-lm open."""


def clip_factor(norm: float, limit: float) -> float:
    """The factor that brings a gradient of this norm down to ``limit``, at most 1; without a limit (0) it is 1."""
    return limit / norm if 0 < limit < norm else 1.0


def peak_resident() -> int:
    """The most bytes of memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, getrusage inherits the peak of the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
