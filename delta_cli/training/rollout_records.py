"""The lines of a run's ``rollouts/`` files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from delta_cli.credit import TokenCoefficients
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.runs.folder import JsonObject
from delta_cli.training.update import ScoredBatch


def rollout_records(scored: ScoredBatch, coefficients: TokenCoefficients, tokenizer: Tokenizer) -> Iterator[JsonObject]:
    """One record per response: texts, ids, reward, advantage, and the numbers of every token."""
    batch, starts = scored.rollout, scored.rollout.sequences.starts
    columns = {
        "logprobs": scored.old_logprobs,
        "entropies": scored.entropies,
        "coefficients": coefficients.weights,
        "margins": coefficients.margins,
    }
    rounded = {name: np.round(np.asarray(values, np.float64), 6).tolist() for name, values in columns.items()}
    for row, (text, verdict) in enumerate(zip(batch.texts, batch.verdicts, strict=True)):
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
            "reward": verdict.reward,
            **({"rewards": dict(verdict.parts)} if verdict.parts else {}),
            "correct": verdict.correct,
            "failure": verdict.failure,
            "advantage": float(scored.advantages[row]),
            "truncated": bool(batch.truncated[row]),
        } | {name: values[first:last] for name, values in rounded.items()}
