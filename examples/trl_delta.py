"""GRPO with TRL and DelTA's token credit, on the tiny model that ships with delta: an ordinary TRL script.

    python examples/trl_delta.py
    torchrun --nproc-per-node 2 examples/trl_delta.py --per_device_train_batch_size 64

Three marked lines differ from a script without the credit. The command line takes every argument of TRL's GRPOConfig,
and the arguments of the credit, which begin with ``--delta_``.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from delta_cli.assets import model_path
from delta_cli.data.arithmetic import problems
from delta_cli.integrations.trl import DelTAConfig, DelTATrainer  # was: from trl import GRPOConfig, GRPOTrainer
from delta_cli.recipe.data import Arithmetic

DEFAULTS = {
    "output_dir": "runs/trl",
    "max_steps": 20,
    "per_device_train_batch_size": 128,
    "steps_per_generation": 4,  # four updates on each batch of 512 responses
    "num_generations": 16,
    "max_completion_length": 48,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "epsilon_high": 0.28,
    "logging_steps": 4,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
}


def data(split: str, count: int) -> Dataset:
    """Two-digit additions."""
    found = problems(Arithmetic(operation="add", digits=2), count, seed=0, split=split)
    return Dataset.from_list([{"prompt": f"{p.question}\n", "answer": p.answer, "id": p.id} for p in found])


def boxed(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward 1 if the boxed number is right."""
    return [float(f"\\boxed{{{truth}}}" in text) for text, truth in zip(completions, answer, strict=True)]


def main() -> None:
    """Train, save, and print the command that shows the result."""
    parser = TrlParser(DelTAConfig)  # was: TrlParser(GRPOConfig)
    parser.set_defaults(**DEFAULTS)
    [args] = parser.parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny-base"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny-base"), padding_side="left")
    trainer = DelTATrainer(model, boxed, args, data("train", 4000), processing_class=tokenizer)  # was: GRPOTrainer
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"look at it: delta inspect {args.output_dir}/delta --step 1")


if __name__ == "__main__":
    main()
