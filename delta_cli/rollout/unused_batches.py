"""Batches that were drawn ahead and not yet used, as files of a checkpoint: a resumed run trains on the same ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from backends.interface import Sequences, starts_of
from backends.regions import ResponseRegions
from delta_cli.data.problem import Problem
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.episodes import Episode

RECORDS, ARRAYS = "unused_batches.json", "unused_batches.npz"


def save(folder: Path, batches: Sequence[RolloutBatch], problems: Sequence[Problem], version: int) -> None:
    """Write batches into ``folder``; ``version`` is that of the learner's weights.

    Problems are named by their places in ``problems``.
    """
    places = {id(problem): place for place, problem in enumerate(problems)}
    records: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        sequences = batch.sequences
        prompts = {prompt.tobytes(): prompt for prompt in sequences.prompts}
        numbers = {key: place for place, key in enumerate(prompts)}
        records.append(
            {
                "problems": [places[id(problem)] for problem in batch.problems],
                "texts": batch.texts,
                "verdicts": [asdict(verdict) for verdict in batch.verdicts],
                "temperature": sequences.temperature,
                "staleness": version - batch.version,
                "draws": batch.draws,
                "prompts": [prompt.tolist() for prompt in prompts.values()],
                "prompt_of_response": [numbers[prompt.tobytes()] for prompt in sequences.prompts],
                "episodes": None if batch.episodes is None else [asdict(episode) for episode in batch.episodes],
                "environment_wait": batch.environment_wait,
                "pass_rates": batch.pass_rates,
            }
        )
        arrays |= {
            f"{number} tokens": sequences.tokens,
            f"{number} lengths": sequences.lengths,
            f"{number} truncated": batch.truncated,
            f"{number} logprobs": batch.engine_logprobs,
        }
        if batch.token_versions is not None:
            arrays[f"{number} token_staleness"] = version - batch.token_versions
        if batch.engine_entropies is not None:
            arrays[f"{number} entropies"] = batch.engine_entropies
        if (regions := sequences.regions) is not None:
            arrays |= {f"{number} region {name}": value for name, value in vars(regions).items()}
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
    # A file that does not say has a prompt for each problem, and no episodes.
    places = record.get("prompt_of_response", [row // samples for row in range(len(verdicts))])
    parts = {name: arrays.get(f"{number} region {name}") for name in ("ids", "own", "starts")}
    episodes = record.get("episodes")
    staleness = arrays.get(f"{number} token_staleness")
    return RolloutBatch(
        problems=tuple(problems[place] for place in record["problems"]),
        sequences=Sequences(
            prompts=tuple(prompts[place] for place in places),
            tokens=arrays[f"{number} tokens"],
            starts=starts_of(arrays[f"{number} lengths"]),
            temperature=record["temperature"],
            regions=None if parts["ids"] is None else ResponseRegions(**parts),
        ),
        texts=tuple(record["texts"]),
        verdicts=verdicts,
        truncated=arrays[f"{number} truncated"],
        engine_logprobs=arrays[f"{number} logprobs"],
        version=version - record["staleness"],
        token_versions=None if staleness is None else version - staleness,
        engine_entropies=arrays.get(f"{number} entropies"),
        draws=record["draws"],
        episodes=None if episodes is None else tuple(Episode(**episode) for episode in episodes),
        environment_wait=record.get("environment_wait", 0.0),
        pass_rates=tuple((place, rate) for place, rate in record.get("pass_rates", ())),
    )
