"""Whether what is trained on is what was sampled: episodes of three families' chats on a local engine.

    python benchmarks/episode_tokens.py --out benchmarks/results/episode_tokens.json

A random model draws turns; the family's renderer, or a chat template, puts a tool's result after each. In every episode
the ids must be those that were sampled and appended, in order, and the log-probabilities those of a forward pass over
the whole episode. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import show, write
from safetensors.numpy import load_file, save_file

from backends import registry
from backends.interface import Ids, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.dialogue import Dialogue, RendererDialogue, TemplateDialogue, ToolCall
from delta_cli.environments.python_tool import SCHEMA
from tests.environments.test_dialogue import FAMILIES, make_tokenizer

NAMES = ("template", "qwen3", "glm-4.5")
PROMPTS, TOKENS, TURNS = 4, 240, 5
TOLERANCE = 1e-5  # nats
LIKELIER, RARER = 0.4, -0.8  # weights of the head that make the end of a turn likely and other special tokens rare


class Results:
    """Appends a tool's result to each turn, as the family writes it, and notes every id; see ``Turns``."""

    def __init__(self, dialogue: Dialogue, prompts: Sequence[Ids], samples: int) -> None:
        self.dialogue, self.prompts, self.samples = dialogue, prompts, samples
        self.noted: dict[int, list[Ids]] = {}  # by row: turns and what was appended to them, in turns
        self.refused = 0
        self._ready: list[tuple[int, Ids | None]] = []

    def turn_ended(self, row: int, region: Ids) -> None:
        noted = self.noted.setdefault(row, [])
        noted.append(region[sum(map(len, noted)) :].copy())
        call = ToolCall("python", {"code": "1"}, None, "call_0")
        ids = self.dialogue.extend(self.prompts[row // self.samples], region, [(call, f"result {len(noted)}")])
        self.refused += ids is None
        if ids is None or len(noted) >= 2 * TURNS - 1 or len(region) + len(ids) >= TOKENS:
            self._ready.append((row, None))
            return
        noted.append(ids.copy())
        self._ready.append((row, ids))

    def answers(self, wait: bool) -> list[tuple[int, Ids | None]]:
        found, self._ready = self._ready, []
        return found

    def restart(self, row: int) -> None:
        raise AssertionError("a local engine draws nothing again")


def write_model(folder: Path, tokenizer: Tokenizer, end: int) -> None:
    """A random model that ends a turn after about thirty tokens."""
    shape: dict[str, Any] = {"layers": 2, "hidden": 64, "head_dim": 16, "intermediate": 128, "max_positions": 4096}
    write_qwen3(folder, vocab_size=tokenizer.vocab_size, tie=False, eos_id=end, scale=0.05, **shape)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 1.0  # of every token, so that a column of the head is a bias
    head = weights["lm_head.weight"]
    head[:, 0] = 0.0
    head[256:, 0] = RARER
    head[end, 0] = LIKELIER
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")


def measure(family: str, episodes: int, backend: str) -> dict[str, Any]:
    """What became of the ids and log-probabilities of a family's episodes."""
    tokenizer = make_tokenizer(FAMILIES[family][0])
    dialogue: Dialogue = (
        TemplateDialogue(tokenizer, [SCHEMA])
        if family == "template"
        else RendererDialogue(tokenizer, "some/model", family, [SCHEMA], False)  # thinking that is open refuses
    )
    prompts = tuple(dialogue.prompt(f"What is {number} + 1?") for number in range(PROMPTS))
    samples = episodes // PROMPTS
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch) / "model", tokenizer, tokenizer.eos_ids[0])
        engine = registry.create(backend, BackendSettings.of(str(Path(scratch) / "model")))
        results = Results(dialogue, prompts, samples)
        sampling = Sampling(TOKENS, tuple(dialogue.stop_ids), samples=samples)
        drawn = engine.rollout(RolloutRequest(prompts, sampling, turns=results))
        rows = tuple(prompt for prompt in prompts for _ in range(samples))
        sequences = Sequences(rows, drawn.tokens, drawn.starts, 1.0, drawn.regions)
        gap = float(np.abs(engine.score(sequences).logprobs - drawn.logprobs).max())
        engine.close()
    different = sum(not same_ids(sequences, row, results.noted.get(row, [])) for row in range(len(rows)))
    turns = [(len(results.noted.get(row, [])) + 1) // 2 for row in range(len(rows))]
    return {
        "episodes": len(rows),
        "turns_mean": float(np.mean(turns)),
        "own_tokens": len(drawn.tokens),
        "environment_tokens": int(sequences.region_lengths.sum()) - len(drawn.tokens),
        "extensions_refused": results.refused,
        "episodes_with_other_ids": different,
        "largest_gap_nats": gap,
    }


def same_ids(sequences: Sequences, row: int, noted: Sequence[Ids]) -> bool:
    """Whether a region is the noted turns and answers, in order and marked as such, and perhaps a turn cut off."""
    ids, own = sequences.region(row)
    at = 0
    for number, part in enumerate(noted):
        stop = at + len(part)
        if not np.array_equal(ids[at:stop], part) or own[at:stop].tolist() != [number % 2 == 0] * len(part):
            return False
        at = stop
    return bool(own[at:].all()) and np.array_equal(sequences.response(row), ids[own])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--episodes", type=int, default=1000, help="of each family")
    parser.add_argument("--out")
    options = parser.parse_args()
    found = {family: measure(family, options.episodes, options.backend) for family in NAMES}
    rows = [
        {"family": name}
        | {
            key.replace("_", " "): f"{value:.3g}" if isinstance(value, float) else str(value)
            for key, value in each.items()
        }
        for name, each in found.items()
    ]
    show(f"episodes on {options.backend}", rows)
    write(options.out, {"backend": options.backend, "tolerance_nats": TOLERANCE, "families": found})
    sys.exit(any(each["episodes_with_other_ids"] or each["largest_gap_nats"] > TOLERANCE for each in found.values()))


if __name__ == "__main__":
    main()
