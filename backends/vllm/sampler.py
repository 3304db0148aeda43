"""A sampler over vLLM servers: whole responses only, from weights that are proven to be the newest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.collective import SOLO, from_first
from backends.interface import (
    BackendError,
    Collective,
    Completions,
    Floats,
    Ids,
    OnFinished,
    PublishedWeights,
    RolloutRequest,
    starts_of,
)
from backends.vllm.api import ServerError, VllmApi, environment_words
from backends.vllm.folder import servable
from backends.vllm.launcher import ServerLauncher
from backends.vllm.request_pool import ResponseRequest, ServedResponse, draw
from backends.vllm.weight_check import ProbeAnswers, WeightCheck

ROUNDS = 4  # of drawing what is missing, before a rollout is given up
RESTARTS = 3  # of our own server, without a rollout in between
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}  # nats between engine and trainer, mean over a probe's tokens


@dataclass(frozen=True)
class VllmSettings:
    """How responses are drawn with vLLM."""

    urls: tuple[str, ...] = ()  # of running servers; none: one is launched
    inbox: Path | None = None  # folder for published weights; None: the servers' own weights are drawn from
    concurrency: int = 256  # requests at a time, for each server
    deadline: float = 1800.0  # seconds for a response
    return_seconds: float = 120.0  # that a server of somebody else's, which went away, has to come back
    tolerance: float = TOLERANCES["float32"]  # nats
    colocated: bool = False  # the server sleeps while the trainer works
    vocabulary: int | None = None  # ids that the trainer's model can read


@dataclass
class VllmServer:
    """A server, and what is known of it."""

    api: VllmApi
    version: int | None  # of the weights it is proven to hold; None: not known
    answers: ProbeAnswers | None = None  # to the probe, when it was last proven
    examined: bool = False
    asleep: bool = False

    def wake(self) -> None:
        """Have its device's memory back. Raises ServerError."""
        if self.asleep:
            self.api.wake()
            self.asleep = False


class VllmSampler:
    """Draws responses from vLLM; see ``backends.interface.Sampler``.

    PublishedWeights are verified after every load, and again after every rollout: a server that was started anew in
    between has old ones, and its responses are drawn again. A response that was reported then is reported
    once more, and the last holds. Only the first rank launches servers and loads weights.
    """

    def __init__(
        self, settings: VllmSettings, launcher: ServerLauncher | None = None, collective: Collective = SOLO
    ) -> None:
        self.settings = settings
        self.version = -1
        self._launcher = launcher
        self._collective = collective
        self._verifier = WeightCheck(settings.tolerance)
        self._servers: list[VllmServer] = []
        self._weights: PublishedWeights | None = None
        self._restarts = 0

    @property
    def inbox(self) -> Path | None:
        """The folder that the learner publishes into."""
        return self.settings.inbox

    def connect(self, model: str | None = None) -> None:
        """Reach the servers, or launch one on ``model``; raises BackendError."""
        if self._servers:
            return
        if self._launcher is not None:
            self._servers = [VllmServer(self._launcher.start(model), self.version)]
            return
        patience = self.settings.deadline
        self._servers = [VllmServer(VllmApi(url, patience=patience), self.version) for url in self.settings.urls]
        for server in self._servers:
            try:
                server.api.check_version()
                server.api.find_model()
            except ServerError as error:
                raise BackendError(
                    f"{server.api.url}: no vLLM answers there ({error}); start it, or set engine.launch = true"
                ) from error

    def close(self) -> None:
        """End a server of our own."""
        if self._launcher is not None:
            self._launcher.stop()
        self._servers = []

    # -------------------------------------------------------------------------------- weights

    def load_weights(self, weights: PublishedWeights) -> None:
        """Draw from these weights from now on; every server is asked whether it does."""
        if weights.version == self.version:
            return
        if weights.folder is None or weights.probe is None:
            raise BackendError("vLLM draws from published weights, and these were not written into its inbox")
        self._weights = weights
        self._verifier.publish(weights)
        failure: BackendError | None = None
        if self._collective.rank == 0:
            try:
                self._load(weights.folder)
            except BackendError as error:
                failure = error
        if self._collective.size > 1:
            failure = self._follow(failure)
        if failure is not None:
            raise failure
        self.version = weights.version

    def _load(self, published: Path) -> None:
        folder, adapter = servable(published)
        fresh = not self._servers and self._launcher is not None
        self.connect(None if adapter else str(folder))
        reason = ""
        for server in self._servers:
            server.version = None
            try:
                self._bring(server, holds_model=fresh)
            except ServerError as error:
                reason = f"{server.api.url}: {error}"
        if all(server.version is None for server in self._servers):
            self._servers[0] = self._again(self._servers[0], reason)

    def _follow(self, failure: BackendError | None) -> BackendError | None:
        """On every rank: what the first one found."""
        held = [(server.api.url, server.api.model, server.version) for server in self._servers]
        failure, held = from_first(self._collective, (failure, held))
        if self._collective.rank > 0:
            self._servers = [VllmServer(VllmApi(url, model), version, examined=True) for url, model, version in held]
        return failure

    def _bring(self, server: VllmServer, holds_model: bool = False) -> None:
        """Have a server draw from the newest weights. Raises ServerError, and BackendError where it does not.

        ``holds_model``: it was launched on the folder, so that a whole model needs no loading.
        """
        assert self._weights is not None
        assert self._weights.folder is not None
        folder, adapter = servable(self._weights.folder)
        server.wake()
        if adapter or not holds_model:
            server.api.load(folder, adapter)
        answers = self._ask(server)
        if fault := self._verifier.fault(answers, server.answers):
            raise BackendError(
                f"{server.api.url}: vLLM took version {self._weights.version} of the weights, it said, but {fault}; "
                f"start it again on {folder}, or raise engine.tolerance where only the precision differs"
            )
        if not server.examined:
            self._examine(server)
        server.answers = self._verifier.remember(answers, server.answers)
        server.version = self._weights.version

    def _examine(self, server: VllmServer) -> None:
        assert self._weights is not None
        assert self._weights.probe is not None
        if not server.api.is_tempered(self._weights.probe.sequences.prompts[0]):
            raise BackendError(
                f"{server.api.url}: tells log-probabilities that are not those at the sampling temperature; start it "
                f"with {' '.join(environment_words())}"
            )
        server.examined = True

    def _ask(self, server: VllmServer) -> Floats:
        """A server's answers to the probe, [N]."""
        assert self._weights is not None
        assert self._weights.probe is not None
        probe = self._weights.probe.sequences
        parts = [np.concatenate([prompt, probe.response(row)]) for row, prompt in enumerate(probe.prompts)]
        return np.concatenate([server.api.score(part) for part in parts])

    # -------------------------------------------------------------------------------- rollout

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """Draw ``samples`` responses for each prompt."""
        sampling, report = request.sampling, on_finished or _ignore
        prompts = [prompt for prompt in request.prompts for _ in range(sampling.samples)]
        rows = request.global_rows.tolist()
        jobs = [ResponseRequest(place, prompts[place], seed_of(sampling.seed, row)) for place, row in enumerate(rows)]
        found: dict[int, ServedResponse] = {}
        reason = ""
        for _ in range(ROUNDS):
            missing = [job for job in jobs if job.place not in found]
            if not missing:
                break
            used = self._ready(reason, request.interrupt)
            drawn, lost = draw(
                [server.api for server in used],
                missing,
                sampling,
                concurrency=self.settings.concurrency,
                deadline=self.settings.deadline,
                vocabulary=self.settings.vocabulary,
                on_answer=report,
                tick=request.interrupt,
            )
            reason = "; ".join(f"{used[number].api.url}: {why}" for number, why in lost.items()) or reason
            found |= self._trusted(used, drawn, lost)
        if len(found) < len(jobs):
            raise BackendError(
                f"vLLM: {len(jobs) - len(found)} of {len(jobs)} responses could not be drawn "
                f"({reason or 'servers came back with old weights each time'}); go on with --resume when it is mended"
            )
        self._restarts = 0
        self._rest()
        return self._completions(request, [found[place] for place in range(len(jobs))])

    def _trusted(
        self, used: Sequence[VllmServer], drawn: dict[int, ServedResponse], lost: dict[int, str]
    ) -> dict[int, ServedResponse]:
        """What came from servers that have had the newest weights all along.

        Our own server cannot be started anew without our knowing; others are asked, lost ones too.
        """
        trusted = set()
        for number, server in enumerate(used):
            ours = self._launcher is not None and self._collective.size == 1
            if self._weights is None or ours or self._holds(server):
                trusted.add(number)
            else:
                server.version = None
            if number in lost:
                server.version = None
        return {place: each for place, each in drawn.items() if each.server in trusted}

    def _holds(self, server: VllmServer) -> bool:
        try:
            return self._verifier.fault(self._ask(server), None) is None
        except ServerError:
            return False

    def _ready(self, reason: str, interrupt: Callable[[], None]) -> list[VllmServer]:
        """The servers that hold the newest weights, at least one: brought back where there is none."""
        if not self._servers:
            raise BackendError("vLLM was asked for responses before it was given weights")
        ready = []
        for server in self._servers:
            try:
                if server.version == self.version:
                    server.wake()
                    ready.append(server)
            except ServerError as error:
                reason = f"{server.api.url}: {error}"
        if not ready:
            ready = self._servers[:1] = [self._again(self._servers[0], reason, interrupt)]
        return ready

    def _again(self, server: VllmServer, reason: str, interrupt: Callable[[], None] = lambda: None) -> VllmServer:
        """A server that was lost, with the newest weights: started anew where it is ours, else waited for."""
        if self._collective.rank > 0:
            raise BackendError(f"{server.api.url}: does not answer any more ({reason}); go on with --resume")
        if self._launcher is None:
            return self._await(server, reason, interrupt)
        reason = self._launcher.ended() or reason
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise BackendError(
                f"vLLM was lost {RESTARTS + 1} times in a row: {reason}; go on with --resume when it is mended"
            )
        server = VllmServer(self._launcher.start(), self.version, examined=server.examined)
        if self._weights is not None:
            try:
                self._bring(server, holds_model=True)
            except ServerError as error:
                raise BackendError(f"vLLM was started again, but {error}; its log is {self._launcher.log}") from error
        return server

    def _await(self, server: VllmServer, reason: str, interrupt: Callable[[], None]) -> VllmServer:
        """A server of somebody else's, once it answers again."""
        end = time.monotonic() + self.settings.return_seconds
        server.asleep = False  # it may have been started anew
        while time.monotonic() < end:
            interrupt()
            try:
                if self._weights is not None:
                    self._bring(server)
                elif not server.api.healthy():
                    raise ServerError("not up")
                else:
                    server.version = self.version
                return server
            except ServerError as error:
                reason = str(error)
                time.sleep(0.5)
        raise BackendError(
            f"{server.api.url}: did not come back within {self.settings.return_seconds:.0f} s ({reason}); start it "
            "again, then go on with --resume"
        )

    def _rest(self) -> None:
        """Give the device to the trainer."""
        if not self.settings.colocated:
            return
        for server in self._servers:
            try:
                server.api.sleep()
                server.asleep = True
            except ServerError as error:
                raise BackendError(
                    f"{server.api.url}: does not free the GPU's memory ({error}); set engine.colocated = false, or "
                    "start it with --enable-sleep-mode"
                ) from error

    def _completions(self, request: RolloutRequest, drawn: Sequence[ServedResponse]) -> Completions:
        tokens = [each.answer.tokens for each in drawn]
        logprobs = np.concatenate([np.zeros(0, np.float32), *(each.answer.logprobs for each in drawn)])
        if request.sampling.truncates:  # vLLM's are those of the truncated distribution, which nobody asked for
            logprobs = np.full_like(logprobs, np.nan)
        return Completions(
            tokens=np.concatenate([np.zeros(0, np.int64), *tokens]),
            starts=starts_of([len(part) for part in tokens]),
            logprobs=logprobs,
            truncated=np.array([not request.sampling.ends(part) for part in tokens], dtype=bool),
            version=self.version,
        )


def seed_of(seed: int, row: int) -> int:
    """The noise of a response is a function of the rollout's seed and the row in the whole batch alone."""
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _ignore(place: int, tokens: Ids) -> None:
    pass
