"""Draws responses from vLLM servers: whole responses only, and only from weights that are proven to be the newest."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from backends.collective import SOLO, from_first
from backends.interface import (
    BackendError,
    Collective,
    Completions,
    Ids,
    OnFinished,
    PublishedWeights,
    RolloutRequest,
)
from backends.regions import ResponseRegions
from backends.settings import EngineSection
from backends.vllm.api import ServerError, VllmApi
from backends.vllm.drafts import ResponseDraft, drafts_of
from backends.vllm.folder import servable
from backends.vllm.launcher import OnNotice, ServerLauncher
from backends.vllm.request_pool import draw
from backends.vllm.server import VllmServer
from backends.vllm.weight_check import TOLERANCES, WeightCheck
from backends.vllm.weight_sender import WeightSender

ROUNDS = 4  # of drawing what is missing, before a rollout is given up
RESTARTS = 3  # of our own server, without a complete rollout in between
RETURN_SECONDS = 120.0  # in which a server that we did not start must come back
RETRY_SECONDS = 0.5  # between two looks at whether it has


class VllmSampler:
    """Draws responses from vLLM; see ``backends.interface.Sampler``.

    Weights are verified after every load and again after every rollout. A server that was started again in between,
    or was given other weights, is loaded once more and its responses are drawn again; such a response is reported to
    ``on_finished`` a second time, and the later report counts. ``on_notice`` gets a line about each such event.

    Several ranks draw their own rows from the same servers. All of them call ``connect``, ``load_weights`` and
    ``rollout`` together. Only the first launches servers and loads weights, and after a rollout each server is
    verified by one rank.
    """

    def __init__(
        self,
        engine: EngineSection,
        launcher: ServerLauncher | None = None,
        *,
        inbox: Path | None = None,
        log: Path | None = None,
        dtype: str = "float32",
        vocabulary: int | None = None,
        ranks: Collective = SOLO,
        on_notice: OnNotice = lambda line: None,
    ) -> None:
        self.engine = engine
        self.inbox = inbox  # the folder that the learner publishes into; None: the servers' own weights are drawn from
        self.version = -1
        self._vocabulary = vocabulary  # ids that the trainer's model can read
        self._launcher, self._ranks, self._on_notice = launcher, ranks, on_notice
        self._check = WeightCheck(engine.tolerance or TOLERANCES.get(dtype, TOLERANCES["bfloat16"]))
        self._servers: list[VllmServer] = []
        self._senders: dict[str, WeightSender] = {}  # by the server's address, on the rank that loads weights
        self._log = log or Path(os.devnull)  # of the processes that send weights
        self._weights: PublishedWeights | None = None
        self._restarts = 0
        self._changes = threading.RLock()  # of weights, against a rollout that looks which server has which
        self._name = f"delta-{os.urandom(4).hex()}"  # of this sampler, in labels of weights

    def connect(self, model: str | None = None) -> None:
        """Reach the servers, or launch one on ``model``. Raises BackendError."""
        self._on_first(lambda: self._connect(model))

    def _connect(self, model: str | None) -> None:
        if self._servers:
            return
        if self._launcher is not None:
            self._servers = [VllmServer(self._launcher.start(model), self.version)]
            return
        servers = [VllmServer(VllmApi(url, self.engine), self.version) for url in self.engine.url]
        for server in servers:
            try:
                server.api.check_version()
                server.api.find_model()
            except ServerError as error:
                raise BackendError(
                    f"{server.api.url}: no vLLM answers there ({error}); start it, or set engine.launch = true"
                ) from error
        self._servers = servers

    def close(self) -> None:
        """End a server of our own, and the processes that send weights."""
        for sender in self._senders.values():
            sender.stop()
        self._senders = {}
        if self._launcher is not None:
            self._launcher.stop()
        self._servers = []

    # -------------------------------------------------------------------------------- weights

    def load_weights(self, weights: PublishedWeights) -> None:
        """Draw from these weights from now on, and prove of every server that it does.

        With ``engine.in_flight`` another thread may be inside ``rollout``; what it draws from now on is theirs, too.
        """
        with self._changes:
            self._load_weights(weights)

    def _load_weights(self, weights: PublishedWeights) -> None:
        if weights.version == self.version:
            return
        if weights.folder is None or weights.probe is None:
            raise BackendError("vLLM draws from published weights, and these were not written into its inbox")
        self._weights = weights
        self._check.publish(weights)
        self._on_first(self._load)
        self.version = weights.version

    def _load(self) -> None:
        assert self._weights is not None
        assert self._weights.folder is not None
        fresh = not self._servers and self._launcher is not None
        folder, adapter = servable(self._weights.folder)
        self._connect(None if adapter else str(folder))
        reason = ""
        for server in self._servers:
            was_lost = server.lost
            try:
                self._bring(server, holds_model=fresh)
                if was_lost:
                    self._notice(f"{server.api.url}: draws again, from version {self._weights.version}")
            except ServerError as error:
                reason = str(error)
                if not was_lost:
                    self._notice(f"{reason}; the server is left until it takes weights again")
                server.lose()
        if all(server.version is None for server in self._servers):
            self._servers[0] = self._bring_back(self._servers[0], reason)

    def _bring(self, server: VllmServer, *, holds_model: bool = False) -> None:
        assert self._weights is not None
        label = f"{self._name}-{self._weights.version}"
        send = None
        if self.engine.transfer == "nccl":
            url = server.api.url
            send = self._senders.setdefault(url, WeightSender(url, self.engine, self._log)).send
        server.bring(self._weights, self._check, label, holds_model=holds_model, send=send)

    def _on_first(self, work: Callable[[], None]) -> None:
        """Do something on the first rank; every rank then knows the servers as they are, or raises its exception."""
        failure: Exception | None = None
        if self._ranks.rank == 0:
            try:
                work()
            except Exception as error:
                if self._ranks.size == 1:
                    raise
                failure = error
        known, self._servers = from_first(self._ranks, (_portable(failure), self._servers))
        if failure := failure or known:
            raise failure

    def _notice(self, line: str) -> None:
        if self._ranks.rank == 0:
            self._on_notice(line)

    # -------------------------------------------------------------------------------- rollout

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """Draw ``samples`` responses for each prompt."""
        drafts = drafts_of(request)
        reason = ""
        for _ in range(ROUNDS):
            with self._changes:
                self._on_first(partial(self._revive, reason, request.interrupt))
                used = [server for server in self._servers if server.version == self.version]
            missing = [draft for draft in drafts if not draft.finished]
            reason = self._draw(used, missing, request, on_finished or _ignore)
            left = sum(not draft.finished for draft in drafts)
            if sum(self._ranks.gather(left)) == 0:
                break
        else:
            raise BackendError(
                f"vLLM: responses are still missing after {ROUNDS} rounds ({left} of {len(drafts)} here; {reason}); "
                "go on with --resume when it is mended"
            )
        self._restarts = 0
        self._rest()
        return self._completions(request, drafts)

    def _draw(
        self,
        used: Sequence[VllmServer],
        missing: Sequence[ResponseDraft],
        request: RolloutRequest,
        report: OnFinished,
    ) -> str:
        """One round, with servers that hold the newest weights; why any draft was not finished or was started over.

        Raises the exception of any rank.
        """
        lost: dict[int, str] = {}
        failure: Exception | None = None
        try:
            lost = draw([server.api for server in used], missing, request, self.engine, self._vocabulary, report)
        except Exception as error:  # raised below, after the other ranks know of it
            failure = error
        rounds = self._ranks.gather((lost, _portable(failure)))
        if failure := failure or next((error for _, error in rounds if error is not None), None):
            raise failure
        lost = {number: why for part, _ in rounds for number, why in part.items()}
        with self._changes:
            doubts = self._doubts(used, lost)
            for number in doubts | lost:
                used[number].lose()
        for number, why in (doubts | lost).items():
            then = "its responses are drawn again" if number in doubts else "its requests go to another server"
            self._notice(f"{why}; {then}")
        for draft in missing:
            if not draft.servers.isdisjoint(doubts):
                draft.restart()
                if request.turns is not None:
                    request.turns.restart(draft.place)
            draft.servers.clear()  # those of the next round may have other numbers
        return next(iter((lost | doubts).values()), "")

    def _doubts(self, used: Sequence[VllmServer], lost: Mapping[int, str]) -> dict[int, str]:
        """Why servers may not have held the newest weights all along, by number. Each rank asks some of the servers.

        A server of our own cannot have been started again without our knowing, so one that died is believed.
        """
        found: dict[int, str] = {}
        ours = self._launcher is not None
        for number in range(self._ranks.rank, len(used), self._ranks.size):
            if self._weights is None or (ours and number in lost):
                continue
            if doubt := used[number].doubt(self._weights, self._check, ours=ours, lost=number in lost):
                found[number] = f"{used[number].api.url}: {doubt}"
        return {number: why for part in self._ranks.gather(found) for number, why in part.items()}

    def _revive(self, reason: str, interrupt: Callable[[], None]) -> None:
        """See that at least one server holds the newest weights and is awake."""
        if not self._servers:
            raise BackendError("vLLM was asked for responses before it was given weights")
        for server in self._servers:
            try:
                if server.version == self.version:
                    server.wake()
            except ServerError as error:
                reason = str(error)
                server.lose()
        if not any(server.version == self.version for server in self._servers):
            self._servers[0] = self._bring_back(self._servers[0], reason, interrupt)

    def _bring_back(self, server: VllmServer, reason: str, interrupt: Callable[[], None] = lambda: None) -> VllmServer:
        """A server that was lost, with the newest weights: started again if it is ours, else waited for."""
        if self._launcher is None:
            return self._wait_for(server, reason, interrupt)
        reason = self._launcher.ended() or reason
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise BackendError(
                f"vLLM was lost {RESTARTS + 1} times in a row: {reason}; go on with --resume when it is mended"
            )
        self._notice(f"{reason}; vLLM is started again")
        started = VllmServer(self._launcher.start(), self.version, examined=server.examined)
        if self._weights is not None:
            try:
                self._bring(started, holds_model=True)
            except ServerError as error:
                raise BackendError(f"vLLM was started again, but {error}; its log is {self._launcher.log}") from error
        return started

    def _wait_for(self, server: VllmServer, reason: str, interrupt: Callable[[], None]) -> VllmServer:
        """A server that we did not start, once it answers again."""
        seconds = min(self.engine.deadline, RETURN_SECONDS)
        end = time.monotonic() + seconds
        server.lose()
        while time.monotonic() < end:
            interrupt()
            try:
                if self._weights is not None:
                    self._bring(server)
                elif not server.api.healthy():
                    raise ServerError(f"{server.api.url}: is not up")
                else:
                    server.version, server.lost = self.version, False
                return server
            except ServerError as error:
                reason = str(error)
                time.sleep(RETRY_SECONDS)
        raise BackendError(
            f"{server.api.url}: did not come back within {seconds:.3g} s ({reason}); start it again, then go on with "
            "--resume"
        )

    def _rest(self) -> None:
        """Give the device to the trainer, if they share it."""
        if self.engine.colocated:
            self._ranks.barrier()  # another rank may still draw
            self._on_first(self._sleep)

    def _sleep(self) -> None:
        for server in self._servers:
            try:
                server.api.sleep()
                server.asleep = True
            except ServerError as error:
                raise BackendError(
                    f"{server.api.url}: does not free the GPU's memory ({error}); set engine.colocated = false, or "
                    "start it with --enable-sleep-mode"
                ) from error

    def _completions(self, request: RolloutRequest, drafts: Sequence[ResponseDraft]) -> Completions:
        regions = ResponseRegions.of([draft.region for draft in drafts], [draft.own for draft in drafts])
        logprobs = np.concatenate([np.zeros(0, np.float32), *(draft.logprobs for draft in drafts)])
        if request.sampling.truncates:  # vLLM's are those of the truncated distribution, which is not the policy's
            logprobs = np.full_like(logprobs, np.nan)
        versions = np.concatenate([draft.versions for draft in drafts]) if self.engine.in_flight else None
        return Completions(
            tokens=regions.own_tokens,
            starts=regions.own_starts,
            logprobs=logprobs,
            truncated=np.array([draft.truncated for draft in drafts], dtype=bool),
            version=self.version if versions is None else int(versions.min(initial=self.version)),
            versions=versions,
            regions=None if request.turns is None else regions,
        )


def _portable(error: Exception | None) -> Exception | None:
    """An exception that other processes can be sent."""
    try:
        found: Exception | None = pickle.loads(pickle.dumps(error))
    except Exception:  # of a class that cannot be sent
        return RuntimeError(repr(error))
    return found


def _ignore(place: int, tokens: Ids) -> None:
    """No-op callback."""
