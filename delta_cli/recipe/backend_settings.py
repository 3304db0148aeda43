"""What a backend needs of a recipe."""

from __future__ import annotations

from backends.interface import BackendSettings, LoraSettings, OptimizerSettings
from delta_cli.assets import model_path
from delta_cli.recipe.models import Recipe


def backend_settings(recipe: Recipe) -> BackendSettings:
    """What a backend needs of a recipe."""
    model, update = recipe.model, recipe.update
    lora = None
    if model.lora is not None:
        lora = LoraSettings(adapter=model.adapter, **dict(model.lora))
    return BackendSettings(
        model=model_path(model.path),
        dtype=model.dtype,
        lora=lora,
        load_in_4bit=model.load_in_4bit,
        optimizer=OptimizerSettings(
            update.beta1,
            update.beta2,
            update.epsilon,
            update.weight_decay,
            update.max_grad_norm,
            update.moments,
            update.offload,
        ),
        gradient_checkpointing=model.gradient_checkpointing,
        keep_reference=update.kl_coefficient > 0,
        rollout_batch=recipe.rollout.batch,
        micro_batch_tokens=update.micro_batch_tokens,
        head_chunk_tokens=update.head_chunk_tokens,
        feature_bytes=update.feature_bytes,
        feature_host_bytes=update.feature_host_bytes,
        seed=recipe.run.seed,
        sharding=recipe.parallel.sharding,
        threads=recipe.run.threads,
    )
