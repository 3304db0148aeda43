"""The run folder for ``delta inspect`` and ``delta report``, and a column in TRL's completions table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from backends.local_engine import peak_resident
from delta_cli.integrations.trl.config import DelTAArguments, options
from delta_cli.integrations.trl.credit import BatchCredit
from delta_cli.integrations.trl.scoring import ScoredCompletions
from delta_cli.runs.folder import JsonObject, RunFolder

NAMES = ("id", "problem_id", "uid")  # columns that may name a problem
ANSWERS = ("answer", "solution", "ground_truth", "final_answer")  # columns that may hold its answer


@dataclass(frozen=True)
class GradedCompletions:
    """The input of TRL's reward functions and their rewards."""

    rows: list[JsonObject]  # B rows of the data set
    completions: list[list[int]]  # B, token ids as sampled
    rewards: torch.Tensor  # [all processes' B] weighted sum; NaN if no function gave one


class RunRecorder:
    """Writes ``OUTPUT_DIR/delta``: metrics of generation batches, and rollouts every ``delta_rollouts_every`` steps."""

    def __init__(self, trainer: GRPOTrainer, arguments: DelTAArguments) -> None:
        self._trainer = trainer
        self._arguments = arguments
        self._folder = RunFolder(Path(trainer.args.output_dir) / "delta")
        self._begun = False
        self._last: int | None = None  # step of the last metrics
        self._recorded: int | None = None  # step of the last rollouts
        self._clock = time.perf_counter()

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1

    @property
    def due(self) -> bool:
        """Whether the rollouts of the current generation batch will be written, which needs their entropies."""
        every, step = self._arguments.delta_rollouts_every, self._step
        return every > 0 and step != self._last and (self._recorded is None or step - self._recorded >= every)

    def record(
        self,
        output: JsonObject,
        graded: GradedCompletions,
        scored: ScoredCompletions,
        found: BatchCredit,
        statistics: JsonObject,
        seconds: float,
    ) -> None:
        """Record a generation batch; of several in one optimizer step, the first."""
        accelerator, step, due = self._trainer.accelerator, self._step, self.due
        fresh = len(graded.completions) == len(found.advantages)  # a subclass may have dropped completions
        if not self._arguments.delta_rollouts_every or step == self._last or not fresh:
            return
        self._last = step
        metrics = self._metrics(graded, accelerator) | statistics | {"seconds_credit": seconds}
        if accelerator.is_main_process:
            self._begin(step - 1)
            self._folder.append(self._folder.metrics, {"step": step} | metrics)
        if due:
            self._recorded = step
            lines = list(self._lines(output, graded, scored, found))
            lines = gather_object(lines) if accelerator.num_processes > 1 else lines
            if accelerator.is_main_process:
                self._folder.write_rollouts(step, lines)

    def _begin(self, done: int) -> None:
        """Create the folder; after a resume, drop records of later steps."""
        if self._begun:
            return
        self._begun = True
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._folder.begin(self._recipe(), done)
        self._trainer._tokenizer.save_pretrained(self._folder.model)
        generation = {"eos_token_id": self._trainer.eos_token_ids}
        (self._folder.model / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")

    def _recipe(self) -> str:
        """What reports show about the run, as TOML."""
        args, model = self._trainer.args, self._trainer.model
        tables = {
            "run": {"steps": self._trainer.state.max_steps, "seed": args.seed},
            "model": {"path": str(getattr(model.config, "_name_or_path", "") or type(model).__name__)},
            "method": {"preset": f"delta in TRL, loss {args.loss_type}"},
            "rollout": {"responses": args.num_generations, "max_tokens": args.max_completion_length},
            "update": {"learning_rate": args.learning_rate},
            "delta": {name.removeprefix("delta_"): value for name, value in options(self._arguments).items()},
        }
        lines = []
        for name, table in tables.items():
            lines += [
                f"[{name}]",
                *(f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None),
            ]
        return "\n".join(lines) + "\n"

    def _metrics(self, graded: GradedCompletions, accelerator: Any) -> JsonObject:
        """Metrics of all processes' responses, with the names of ``delta train``."""
        mine = [[len(ids), self._truncated(ids)] for ids in graded.completions]
        table = accelerator.gather(torch.tensor(mine, device=accelerator.device)).cpu().numpy()
        rewards = graded.rewards.double().cpu().numpy()
        known = rewards[~np.isnan(rewards)]
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        cuda = accelerator.device.type == "cuda"
        return {
            "reward_mean": float(known.mean()) if len(known) else None,
            "accuracy": float((rewards > self._arguments.delta_right_above).mean()),
            "response_length_mean": float(table[:, 0].mean()),
            "response_length_max": int(table[:, 0].max()),
            "truncated": float(table[:, 1].mean()),
            "learning_rate": float(self._trainer._get_learning_rate()),
            "seconds": elapsed,
            "tokens_per_second": float(table[:, 0].sum()) / elapsed,
            "peak_memory": torch.cuda.max_memory_allocated(accelerator.device) if cuda else peak_resident(),
        }

    def _truncated(self, ids: list[int]) -> bool:
        trainer = self._trainer
        return ids[-1] not in (*trainer.eos_token_ids, trainer._tokenizer.pad_token_id)

    def _lines(
        self, output: JsonObject, graded: GradedCompletions, scored: ScoredCompletions, found: BatchCredit
    ) -> Iterator[JsonObject]:
        """This process's responses in the format of docs/files.md."""
        tokenizer, mine = self._trainer._tokenizer, len(graded.completions)
        first = self._trainer.accelerator.process_index * mine
        rewards = graded.rewards[first : first + mine].tolist()
        numbers = _per_token(scored, found)
        for row, (ids, reward) in enumerate(zip(graded.completions, rewards, strict=True)):
            prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            group = (first + row) // self._trainer.num_generations
            known = reward == reward
            yield {
                "group": group,
                "problem": _first_of(NAMES, graded.rows[row], str(group + 1)),
                "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
                "prompt_ids": prompt,
                "response": tokenizer.decode(ids, skip_special_tokens=True),
                "tokens": ids,
                "answer": _first_of(ANSWERS, graded.rows[row], ""),
                "reward": reward if known else 0.0,
                "correct": reward > self._arguments.delta_right_above,
                "failure": None if known else "no reward",
                "advantage": float(found.advantages[row]),
                "truncated": self._truncated(ids),
            } | {name: values[row, : len(ids)].tolist() for name, values in numbers.items()}


def _per_token(scored: ScoredCompletions, found: BatchCredit) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of recorded responses, [B, T] each; tokens that do not count have coefficient 1 and margin 0."""
    assert scored.entropies is not None  # because the batch was due
    margins = np.zeros(found.counted.shape)
    margins[found.counted] = found.coefficients.margins
    columns = {
        "logprobs": scored.logps.double().cpu().numpy(),
        "entropies": scored.entropies.double().cpu().numpy(),
        "coefficients": found.weights.double().cpu().numpy(),
        "margins": margins,
    }
    return {name: values.round(6) for name, values in columns.items()}


def _first_of(names: tuple[str, ...], row: JsonObject, otherwise: str) -> str:
    return next((str(row[name]) for name in names if row.get(name) is not None), otherwise)


def most_amplified(tokenizer: Any, ids: torch.Tensor, found: BatchCredit) -> list[str | None]:
    """For each of B completions the token with the largest coefficient and this coefficient; None without contrast."""
    result: list[str | None] = []
    for row, counted in zip(ids, found.counted, strict=True):
        at = len(result)
        if found.coefficients.degenerate or not counted.any():
            result.append(None)
            continue
        place = int(np.argmax(np.where(counted, found.weights[at].cpu().numpy(), -np.inf)))
        result.append(f"{tokenizer.decode([int(row[place])])!r} {float(found.weights[at, place]):.2f}")
    return result
