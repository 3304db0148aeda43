"""Write the responses of a step to the run's ``rollouts/`` while the next step is already going on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from backends.arrays import Ids
from backends.collective import SOLO
from backends.interface import Collective
from delta_cli.credit import TokenCoefficients
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.runs.folder import JsonObject, RunFolder
from delta_cli.training.update import ScoredBatch


class RolloutRecorder:
    """Records the responses of steps in a thread; every rank writes a share of them and rank 0 joins the shares.

    If the ranks do not share the run's folder, rank 0 writes all. All ranks call the same methods in the same order.
    """

    def __init__(self, folder: RunFolder, tokenizer: Tokenizer, ranks: Collective = SOLO) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._ranks = ranks if folder.shared else SOLO  # that write
        self._writes = folder.shared or ranks.rank == 0
        self._pool = ThreadPoolExecutor(1, "rollout records")
        self._pending: tuple[int, Future[None]] | None = None

    def record(
        self, step: int, batch: ScoredBatch, coefficients: TokenCoefficients, staleness: int | None = None
    ) -> None:
        """Start to write the responses of ``step``, once those of the step before are on disk."""
        self.finish()
        if not self._writes:
            return
        groups = np.array_split(np.arange(len(batch.rollout.problems)), self._ranks.size)[self._ranks.rank]
        records = rollout_records(batch, coefficients, self._tokenizer, batch.rollout.rows(groups), staleness)
        write = self._pool.submit(self._folder.write_rollout_part, step, self._ranks.rank, records)
        self._pending = step, write

    def finish(self, last: int | None = None) -> None:
        """Wait until the responses are on disk; of a step after ``last``, not. Raises UserError if it refuses them."""
        if self._pending is None or (last is not None and self._pending[0] > last):
            return
        (step, write), self._pending = self._pending, None
        write.result()
        self._ranks.barrier()  # every share is on disk
        self._folder.join_rollout_parts(step, self._ranks.size)

    def close(self) -> None:
        """End the thread. One process also completes the last file; several cannot meet any more after an error."""
        if self._ranks.size == 1:
            with suppress(UserError):  # the run ends with an error of its own, or finish() has been called
                self.finish()
        self._pool.shutdown()


def rollout_records(
    scored: ScoredBatch, coefficients: TokenCoefficients, tokenizer: Tokenizer, rows: Ids, staleness: int | None = None
) -> Iterator[JsonObject]:
    """One record for each response at ``rows``: texts, ids, reward, advantage, and the numbers of every token.

    ``staleness`` is the number of updates between the weights that drew the tokens and the step's, if batches are
    drawn ahead.
    """
    batch, starts = scored.rollout, scored.rollout.sequences.starts
    columns = {
        "logprobs": scored.old_logprobs,
        "entropies": scored.entropies,
        "coefficients": coefficients.weights,
        "margins": coefficients.margins,
    }
    for row in rows.tolist():
        text, verdict = batch.texts[row], batch.verdicts[row]
        group = row // batch.samples
        problem, prompt = batch.problems[group], batch.sequences.prompts[row]
        first, last = int(starts[row]), int(starts[row + 1])
        yield {
            "group": group,
            "problem": problem.id,
            "prompt": tokenizer.decode(prompt, skip_special=False),
            "prompt_ids": prompt.tolist(),
            "response": text,
            "tokens": batch.sequences.tokens[first:last].tolist(),
            "answer": problem.answer,
            "reward": None if batch.failed[row] else verdict.reward,
            **({"rewards": dict(verdict.parts)} if verdict.parts else {}),
            "correct": verdict.correct,
            "failure": verdict.failure,
            "advantage": float(scored.advantages[row]),
            "truncated": bool(batch.truncated[row]),
            **({} if staleness is None else {"staleness": staleness}),
            **({} if batch.token_versions is None else {"weight_versions": _spans(batch.token_versions[first:last])}),
            **_episode(batch, row),
        } | {name: np.round(np.asarray(values[first:last], np.float64), 6).tolist() for name, values in columns.items()}


def _spans(versions: Ids) -> list[JsonObject]:
    """Which weights drew the tokens from ``start`` to before ``end``, in vLLM's form."""
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": int(versions[start]), "start": start, "end": end} for start, end in pairwise(bounds)]


def _episode(batch: RolloutBatch, row: int) -> JsonObject:
    """How an episode went, and its whole region; nothing for a response of one turn."""
    if batch.episodes is None:
        return {}
    region, own = batch.sequences.region(row)
    return {"episode": asdict(batch.episodes[row]), "region": region.tolist(), "own": own.astype(int).tolist()}
