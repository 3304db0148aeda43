"""Runs written as the trainer writes them, with responses that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_base import write_tokenizer

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, to_toml
from delta_cli.runs.folder import RunFolder

HOSTILE = "<script>alert(1)</script>\x1b[31m\x1b]0;owned\x07 & \"'</div>‮"


def record(
    tokenizer: Tokenizer,
    response: str,
    *,
    correct: bool,
    group: int = 0,
    problem: str = "7+8",
    prompt: str = "7+8=?\n",
    advantage: float | None = None,
    coefficients: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A line of rollouts/, its text's tokens followed by the end-of-sequence token."""
    tokens = [*tokenizer.encode(response).tolist(), tokenizer.eos_ids[0]]
    count = len(tokens)
    return {
        "group": group,
        "problem": problem,
        "prompt": prompt,
        "prompt_ids": tokenizer.encode(prompt).tolist(),
        "response": response,
        "tokens": tokens,
        "answer": "15",
        "reward": float(correct),
        "correct": correct,
        "failure": None,
        "advantage": (1.0 if correct else -1.0) if advantage is None else advantage,
        "truncated": False,
        "logprobs": [-0.5] * count,
        "engine_logprobs": [-0.5] * count,
        "entropies": [0.25] * count,
        "coefficients": list(coefficients) if coefficients else np.linspace(0.8, 1.2, count).tolist(),
        "margins": [0.0] * count,
    }


def metrics(step: int, reward: float = 0.5) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    quantiles = {"p05": 0.82, "p25": 0.9, "p50": 1.0, "p75": 1.1, "p95": 1.18}
    return {
        "step": step, "reward_mean": reward, "accuracy": reward, "tokens": 1000, "response_length_mean": 31.25,
        "entropy_mean": 0.3, "clip_fraction": 0.01, "kl_old": 0.002, "grad_norm": 0.4, "loss": 0.0, "seconds": 2.0,
        "tokens_per_second": 500.0, "peak_memory": 512_000_000, "seconds_rollout": 1.0, "seconds_reward": 0.1,
        "seconds_score": 0.2, "seconds_credit": 0.1, "seconds_update": 0.5, "seconds_evaluate": 0.0,
        "seconds_save": 0.1, "coefficient_positive": 1.05, "coefficient_negative": 0.95,
        **{f"coefficient_{name}": value for name, value in quantiles.items()},
    }  # fmt: skip


def start(path: Path) -> tuple[RunFolder, Tokenizer]:
    """A run folder with a recipe and a byte tokenizer."""
    folder = RunFolder(path)
    folder.hold()
    folder.begin(to_toml(Recipe()))
    folder.release()
    folder.model.mkdir()
    write_tokenizer(folder.model)
    return folder, Tokenizer.load(str(folder.model))


def run(path: Path, steps: int = 3, groups: int = 2, samples: int = 4) -> RunFolder:
    """A run of arithmetic: half the responses of a group right, the others with a mistake in a digit."""
    folder, tokenizer = start(path)
    for step in range(1, steps + 1):
        records = []
        for group in range(groups):
            total = 7 + group + 8
            for sample in range(samples):
                correct = sample % 2 == 0
                value = total if correct else total + sample
                text = f"{7 + group}+8={value} \\boxed{{{value}}}"
                problem = f"{7 + group}+8"
                line = record(tokenizer, text, correct=correct, group=group, problem=problem, prompt=f"{problem}=?\n")
                records.append(line)
        folder.write_rollouts(step, records)
        folder.append(folder.metrics, metrics(step, reward=step / steps))
    for step in (0, steps):
        line = {"step": step, "accuracy": 0.4, "low": 0.3, "high": 0.5, "problems": 100, "samples": 1}
        folder.append(folder.evaluations, line)
    return folder
