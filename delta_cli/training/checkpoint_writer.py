"""Saves a run's checkpoints, if the recipe asks for it in a thread and from a copy, while training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backends.collective import SOLO, any_of
from backends.interface import Collective, FileDigests, Learner, WriteState
from backends.process import free_memory
from delta_cli.errors import UserError
from delta_cli.recipe.models import CheckpointSection
from delta_cli.runs import checkpoint
from delta_cli.runs.checkpoint import State
from delta_cli.runs.folder import BACKEND_WRITES, RunFolder, writing
from delta_cli.training.rollout_records import RolloutRecorder

ROOM = 0.8  # of the free memory, at most, goes to the copies of the processes on a machine


@dataclass(frozen=True)
class _PendingCheckpoint:
    """A checkpoint that is being written."""

    state: State
    recipe: str
    digests: Future[FileDigests]  # of this rank's files


class CheckpointWriter:
    """Saves checkpoints, at most one at a time. All ranks call the same methods in the same order.

    A checkpoint that is written in the background appears in the run's folder once every rank has written its part,
    at the next ``poll`` or ``finish``; a process that is killed before leaves the one before as the newest.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: CheckpointSection,
        learner: Learner,
        recorder: RolloutRecorder,
        write_batches: Callable[[Path], None],
        ranks: Collective = SOLO,
        on_notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder, self._settings, self._learner, self._recorder = folder, settings, learner, recorder
        self._write_batches = write_batches  # that are drawn and not yet used; rank 0 calls it
        self._ranks, self._on_notice = ranks, on_notice
        self._pool = ThreadPoolExecutor(1, "checkpoints") if settings.async_save else None
        self._pending: _PendingCheckpoint | None = None
        self._noticed = False

    def save(self, state: State, recipe: str) -> None:
        """Save a checkpoint, or begin to. Raises UserError if the disk refuses this one or the one before."""
        self.finish()
        write = self._copy() if self._pool is not None else None
        root = self._folder.checkpoints
        if self._pool is None or write is None:
            self._recorder.finish(state.step)
            self._folder.sync()
            checkpoint.save(root, state, recipe, self._write, self._ranks)
            self._prune(state)
        else:
            partial = checkpoint.begin(root, state.step, self._ranks)
            self._write_batches_into(partial)
            self._pending = _PendingCheckpoint(state, recipe, self._pool.submit(write, partial))

    def _write(self, folder: Path) -> FileDigests:
        """Write what this rank puts into a checkpoint."""
        digests = self._learner.save(folder)
        self._write_batches_into(folder)
        return digests

    def _write_batches_into(self, folder: Path) -> None:
        if self._ranks.rank == 0:
            with writing(folder, *BACKEND_WRITES):
                self._write_batches(folder)

    def _copy(self) -> WriteState | None:
        """What writes a copy of the learner's state; None if a copy does not fit into the memory of some rank."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        write = self._learner.copy_state(int(ROOM * free_memory()) // processes)
        if not any_of(self._ranks, write is None):
            return write
        if not self._noticed:
            self._on_notice(
                "checkpoint.async_save: a copy of weights and moments does not fit into the free memory, so training "
                "waits while checkpoints are written"
            )
            self._noticed = True
        return None

    def poll(self) -> None:
        """Complete the checkpoint that is being written if all ranks have written their parts."""
        if self._pending is None:
            return
        written = self._pending.digests
        refused = written.done() and written.exception() is not None  # raised at once, as the process will end
        if refused or not any_of(self._ranks, not written.done()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError if the disk refuses it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with writing(checkpoint.folder_of(self._folder.checkpoints, pending.state.step), *BACKEND_WRITES):
            digests = pending.digests.result()
        self._recorder.finish(pending.state.step)
        self._folder.sync()
        checkpoint.complete(self._folder.checkpoints, pending.state, pending.recipe, digests, self._ranks)
        self._prune(pending.state)

    def _prune(self, state: State) -> None:
        if self._ranks.rank == 0:
            checkpoint.prune(self._folder.checkpoints, state.step, self._settings.keep, state.best_step)

    def close(self) -> None:
        """End the thread. One process also completes what it writes; several cannot meet any more after an error."""
        if self._ranks.size == 1:
            with suppress(UserError):  # the run ends with an error of its own, or finish() has been called
                self.finish()
        if self._pool is not None:
            self._pool.shutdown(wait=self._ranks.size == 1)
