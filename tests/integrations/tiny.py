"""Small GRPO runs on the embedded model, as TRL's trainer and as ours makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_cli.assets import TINY_BASE, model_path
from delta_cli.data.arithmetic import problems
from delta_cli.recipe.data import Arithmetic

MODEL = model_path(TINY_BASE)


def questions(count: int = 64, seed: int = 0) -> Dataset:
    """Two-digit additions in the prompt of the embedded model."""
    found = problems(Arithmetic(operation="add", digits=2), count, seed)
    return Dataset.from_list([{"prompt": p.question + "\n", "answer": p.answer, "id": p.id} for p in found])


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the boxed number is the answer."""
    return [float(f"\\boxed{{{truth}}}" in text) for text, truth in zip(completions, answer, strict=True)]


def tokenizer() -> Any:
    """The embedded model's, padding on the left."""
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


def model() -> Any:
    """The embedded model in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments for GRPOConfig or DelTAConfig: 2 prompts × 4 responses, on the CPU, without logs and checkpoints."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    } | changes


def losses(trainer: Any) -> list[float]:
    """The loss of each logged step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
