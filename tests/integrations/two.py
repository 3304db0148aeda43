"""What each of several processes does; started by torch.distributed.run, once for all tests.

``python -m torch.distributed.run --nproc-per-node 2 two.py FOLDER`` trains the embedded model with TRL's
trainer and with ours, and leaves in FOLDER what the tests compare.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trl import GRPOConfig, GRPOTrainer

from delta_cli.integrations.trl import DelTAConfig, DelTATrainer, trainer
from delta_cli.integrations.trl.config import LOSS_TYPES
from tests.integrations.tiny import losses, model, questions, right, settings, tokenizer, weights

ONES = {"delta_lambda_min": 1.0, "delta_lambda_max": 1.0, "delta_rollouts_every": 0}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
PARITY: dict[str, dict[str, Any]] = {loss: {"loss_type": loss, "steps_per_generation": 2} for loss in LOSS_TYPES} | {
    "forward of ours": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "adapters": {"gradient_accumulation_steps": 2, "lora": True, "learning_rate": 1e-2},
    "kl": {"beta": 0.1},
}
# Ten completions a process and groups of four: the third group lies on both.
CREDIT: dict[str, dict[str, Any]] = {
    "straddling": {"per_device_train_batch_size": 10},
    "exact": {"per_device_train_batch_size": 10, "delta_proxy": "hidden_exact", "temperature": 0.8},
    "anew": {"per_device_train_batch_size": 10, "delta_feature_bytes": 0, "delta_feature_host_bytes": 0},
    "truncated": {"per_device_train_batch_size": 8, "mask_truncated_completions": True, "max_completion_length": 21},
    "groups": {"per_device_train_batch_size": 8, "delta_scope": "group"},
    "groups straddling": {"per_device_train_batch_size": 10, "delta_scope": "group"},
    "top": {"per_device_train_batch_size": 10, "delta_weighting": "top", "delta_share": 0.3},
}


def train(cls: Any, config: Any, folder: Path, **changes: Any) -> Any:
    """One run on this process."""
    lora = changes.pop("lora", False)
    args = config(**settings(folder, **{"per_device_train_batch_size": 4, **changes}))
    more = {}
    if lora:
        import peft

        more = {"peft_config": peft.LoraConfig(**LORA)}
    run = cls(model(), right, args=args, train_dataset=questions(), processing_class=tokenizer(), **more)
    run.train()
    return run


def parity(folder: Path) -> dict[str, Any]:
    """Losses and weights of both trainers in every variant."""
    result = {}
    for name, changes in PARITY.items():
        runs = [
            train(GRPOTrainer, GRPOConfig, folder, **changes),
            train(DelTATrainer, DelTAConfig, folder, **ONES, **changes),
        ]
        result[name] = [(losses(run), weights(run)) for run in runs]
    return result


def credits(folder: Path) -> dict[str, Any]:
    """Batch and coefficients of the first step of every case."""
    credit = trainer.credit
    found: list[Any] = []

    def spy(output: dict[str, Any], *rest: Any) -> Any:
        before = {name: value.clone() for name, value in output.items() if torch.is_tensor(value)}
        result = credit(output, *rest)
        found.append((before, result.weights))
        return result

    trainer.credit = spy
    result = {}
    for name, changes in CREDIT.items():
        run = train(DelTATrainer, DelTAConfig, folder / name, **{"max_steps": 1, "delta_rollouts_every": 1, **changes})
        result[name] = (*found.pop(), run.state.log_history[0])
    trainer.credit = credit
    return result


def main() -> None:
    """All of it, into a file for each process."""
    folder = Path(sys.argv[1])
    gc.freeze()  # every training collects garbage, which takes long with all that is imported
    result = {"parity": parity(folder / "runs"), "credit": credits(folder)}
    torch.save(result, folder / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
