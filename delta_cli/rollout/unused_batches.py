"""Batches that were drawn ahead and not yet used, as files of a checkpoint: a resumed run trains on the same ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from backends.interface import Sequences, starts_of
from delta_cli.data.problem import Problem
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch

RECORDS, ARRAYS = "unused_batches.json", "unused_batches.npz"


def save(folder: Path, batches: Sequence[RolloutBatch], problems: Sequence[Problem], version: int) -> None:
    """Write batches into ``folder``; ``version`` is that of the learner's weights.

    Problems are named by their places in ``problems``. Episodes of several turns are not written, and nothing after
    the first batch that has any: a resumed run draws them again.
    """
    places = {id(problem): place for place, problem in enumerate(problems)}
    records: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        if batch.sequences.regions is not None:
            break
        sequences = batch.sequences
        prompts = sequences.prompts[:: batch.samples]
        records.append(
            {
                "problems": [places[id(problem)] for problem in batch.problems],
                "texts": batch.texts,
                "verdicts": [asdict(verdict) for verdict in batch.verdicts],
                "temperature": sequences.temperature,
                "staleness": version - batch.version,
                "draws": batch.draws,
                "prompts": [prompt.tolist() for prompt in prompts],
            }
        )
        arrays |= {
            f"{number} tokens": sequences.tokens,
            f"{number} lengths": sequences.lengths,
            f"{number} truncated": batch.truncated,
            f"{number} logprobs": batch.engine_logprobs,
        }
        if batch.engine_entropies is not None:
            arrays[f"{number} entropies"] = batch.engine_entropies
    (folder / RECORDS).write_text(json.dumps(records) + "\n", encoding="utf-8")
    np.savez(folder / ARRAYS, **arrays)


def load(folder: Path, problems: Sequence[Problem], version: int) -> list[RolloutBatch]:
    """The batches that :func:`save` wrote; ``version`` is now that of the learner's weights. Empty if it wrote none."""
    if not (folder / RECORDS).exists():
        return []
    records = json.loads((folder / RECORDS).read_text(encoding="utf-8"))
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        return [_batch(number, record, arrays, problems, version) for number, record in enumerate(records)]


def _batch(number: int, record: dict[str, Any], arrays: Any, problems: Sequence[Problem], version: int) -> RolloutBatch:
    verdicts = tuple(Verdict(**verdict) for verdict in record["verdicts"])
    samples = len(verdicts) // len(record["problems"])
    prompts = [np.array(prompt, np.int64) for prompt in record["prompts"]]
    return RolloutBatch(
        problems=tuple(problems[place] for place in record["problems"]),
        sequences=Sequences(
            prompts=tuple(prompt for prompt in prompts for _ in range(samples)),
            tokens=arrays[f"{number} tokens"],
            starts=starts_of(arrays[f"{number} lengths"]),
            temperature=record["temperature"],
        ),
        texts=tuple(record["texts"]),
        verdicts=verdicts,
        truncated=arrays[f"{number} truncated"],
        engine_logprobs=arrays[f"{number} logprobs"],
        version=version - record["staleness"],
        engine_entropies=arrays.get(f"{number} entropies"),
        draws=record["draws"],
    )
