"""One vLLM server as the sampler sees it: which weights it has, and how that is made sure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.interface import BackendError, Floats, Probe, PublishedWeights
from backends.vllm.api import STARTED, ServerError, VllmApi
from backends.vllm.command import how_to_start
from backends.vllm.folder import servable
from backends.vllm.weight_check import ProbeAnswers, WeightCheck

RESPONSE_SECONDS = 10.0  # in which a server that was lost must draw one token before it is used again


@dataclass
class VllmServer:
    """A server and what is known of it."""

    api: VllmApi
    version: int | None = None  # of the weights it is proven to hold; None: not known
    label: str = STARTED  # of these weights, as the server has it
    answers: ProbeAnswers | None = None  # its log-probabilities for the probe, when it was last proven
    examined: bool = False  # its log-probabilities are of the right kind
    asleep: bool = False
    lost: bool = False  # it failed, and has not been brought back since

    def wake(self) -> None:
        """Have its device's memory back. Raises ServerError."""
        if self.asleep:
            self.api.wake()
            self.asleep = False

    def lose(self) -> None:
        """Use it no more until it is brought back."""
        self.version, self.lost = None, True

    def bring(
        self,
        weights: PublishedWeights,
        check: WeightCheck,
        label: str,
        *,
        holds_model: bool,
        send: Callable[[Path], None] | None,
    ) -> None:
        """Have the server draw from these weights, which it gets under the label, and prove that it does.

        ``holds_model``: it was started on their folder, so that a whole model need not be loaded. ``send``: what brings
        the folder's weights to it if it cannot read them. Raises ServerError, and BackendError if the server took the
        weights but does not compute with them.
        """
        assert weights.folder is not None
        assert weights.probe is not None
        self.version = None
        folder, adapter = servable(weights.folder)
        self._revive()
        self.wake()
        if adapter or not holds_model:
            self._load(folder, adapter, label, send)
        else:
            self.api.set_label(label)
        found = self.answer(weights.probe)
        if fault := check.fault(found, self.answers):
            raise BackendError(
                f"{self.api.url}: vLLM reported that it loaded version {weights.version} of the weights, but {fault}; "
                f"start it again on {folder}, or raise engine.tolerance if only the precision differs"
            )
        self._examine(weights.probe)
        self.answers = check.remember(found, self.answers)
        self.version, self.label = weights.version, label

    def doubt(self, weights: PublishedWeights, check: WeightCheck, *, ours: bool, lost: bool) -> str | None:
        """Why the server may not have held these weights all along, as a clause; None if it has.

        Its label shows a restart and another client that labels its weights; log-probabilities show one that does
        not. They are not asked of a server of ``ours``, which only this run can reach. A server that was ``lost`` must
        show first that it works.
        """
        assert weights.probe is not None
        try:
            if lost:
                self.api.check_alive(RESPONSE_SECONDS)
            label = self.api.label()
            if label == STARTED != self.label:
                return "was started again meanwhile, with its first weights"
            if label != self.label:
                return f"has weights that another client loaded meanwhile (labelled '{label[:60]}')"
            return None if ours else check.fault(self.answer(weights.probe), None)
        except ServerError as error:
            return f"does not say which weights it has ({error})"

    def answer(self, probe: Probe) -> Floats:
        """Its log-probabilities for the probe's tokens, [N]."""
        sequences = probe.sequences
        parts = [np.concatenate([prompt, sequences.response(row)]) for row, prompt in enumerate(sequences.prompts)]
        return np.concatenate([self.api.score(part) for part in parts])

    def _revive(self) -> None:
        """Make sure that a server that failed works before anything waits for it."""
        if self.lost:
            self.asleep = False  # it may have been started again
            self.api.check_alive(RESPONSE_SECONDS)
            self.lost = False

    def _load(self, folder: Path, adapter: bool, label: str, send: Callable[[Path], None] | None) -> None:
        try:
            self.api.load(folder, adapter, label, send)
        except ServerError as error:
            if send is not None:
                raise
            raise ServerError(f"{error}; can the server read {folder}? engine.inbox says where weights go") from error

    def _examine(self, probe: Probe) -> None:
        if not self.examined and not self.api.logprobs_follow_temperature(probe.sequences.prompts[0]):
            raise BackendError(
                f"{self.api.url}: its log-probabilities are not those at the sampling temperature; start it with "
                f"{how_to_start()}"
            )
        self.examined = True
