"""Keys of TRL, verl and mlx-lm-lora with their names here, for error messages and for docs/coming_from.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Alias(NamedTuple):
    """A key of another trainer and what it is called here."""

    theirs: str
    ours: str  # empty if there is no such key here
    note: str = ""  # how the values differ, or why there is no key
    gone: bool = False  # only older versions of the trainer have it


TRL = (
    Alias("model_name_or_path", "model.path"),
    Alias("dataset_name", "data.source"),
    Alias("dataset_config", "data.config"),
    Alias("dataset_train_split", "data.split"),
    Alias("num_generations", "rollout.responses"),
    Alias("per_device_train_batch_size", "rollout.prompts", "counts responses there, prompts here"),
    Alias("gradient_accumulation_steps", "update.micro_batch_tokens", "here any number gives the same result"),
    Alias("steps_per_generation", "update.mini_batches"),
    Alias("num_iterations", "update.epochs"),
    Alias("max_completion_length", "rollout.max_tokens"),
    Alias("max_prompt_length", "rollout.max_prompt_tokens", gone=True),
    Alias("temperature", "rollout.temperature"),
    Alias("top_p", "evaluation.top_p", "training draws from the whole distribution"),
    Alias("top_k", "evaluation.top_k", "training draws from the whole distribution"),
    Alias("min_p", "evaluation.min_p", "training draws from the whole distribution"),
    Alias("beta", "update.kl_coefficient"),
    Alias("use_bias_correction_kl", "update.kl_estimator", '"k3_bias_corrected"; true by default there'),
    Alias("epsilon", "method.eps_low"),
    Alias("epsilon_high", "method.eps_high"),
    Alias("delta", "method.dual_clip"),
    Alias("loss_type", "method.preset", "grpo, dr_grpo, dapo, cispo, sapo, …"),
    Alias("importance_sampling_level", "method.preset", "sequence is gspo"),
    Alias("scale_rewards", "method.advantage"),
    Alias("mask_truncated_completions", "update.drop_truncated"),
    Alias("top_entropy_quantile", "method.entropy_share", "with method.credit = entropy"),
    Alias("reward_funcs", "reward.kind", "a function of yours: custom; several: tables [[reward]]"),
    Alias("reward_weights", "reward.weight", "of each table [[reward]]"),
    Alias("chat_template_kwargs", "data.thinking", "for enable_thinking"),
    Alias("max_steps", "run.steps"),
    Alias("num_train_epochs", "run.steps", "counts steps here: problems / rollout.prompts are an epoch"),
    Alias("learning_rate", "update.learning_rate"),
    Alias("lr_scheduler_type", "update.schedule"),
    Alias("warmup_steps", "update.warmup", "below 1 it is a share of all steps there; here it counts steps"),
    Alias("warmup_ratio", "update.warmup", "in steps", gone=True),
    Alias("weight_decay", "update.weight_decay"),
    Alias("adam_beta1", "update.beta1"),
    Alias("adam_beta2", "update.beta2"),
    Alias("adam_epsilon", "update.epsilon"),
    Alias("max_grad_norm", "update.max_grad_norm"),
    Alias("bf16", "model.dtype", '"bfloat16"'),
    Alias("gradient_checkpointing", "model.gradient_checkpointing"),
    Alias("use_peft", "model.lora", "lora = { rank = 16 }"),
    Alias("lora_r", "model.lora.rank"),
    Alias("lora_alpha", "model.lora.scale", "alpha / rank"),
    Alias("lora_target_modules", "model.lora.targets"),
    Alias("use_dora", "model.lora.dora"),
    Alias("use_vllm", "engine.kind", '"vllm"'),
    Alias("vllm_server_base_url", "engine.url", "a list"),
    Alias("vllm_mode", "engine.launch", "or engine.url; engine.colocated"),
    Alias("vllm_gpu_memory_utilization", "engine.memory"),
    Alias(
        "vllm_importance_sampling_mode",
        "correction.preset",
        "the same names; the default there is sequence_mask, here decoupled_token_is",
    ),
    Alias("vllm_importance_sampling_clip_max", "correction.high", "3.0 in TRL's presets, 2.0 in verl's"),
    Alias("vllm_importance_sampling_clip_min", "correction.low"),
    Alias("vllm_importance_sampling_cap", "correction.high", "deprecated there for …_clip_max"),
    Alias("entropy_coef", "update.entropy_coefficient", "estimated from the sampled tokens"),
    Alias("entropy_target", "update.entropy_target", "use_adaptive_entropy there"),
    Alias("entropy_coef_delta", "update.entropy_step"),
    Alias("entropy_coef_max", "update.entropy_max"),
    Alias("eval_steps", "evaluation.every"),
    Alias("save_steps", "checkpoint.every"),
    Alias("save_total_limit", "checkpoint.keep"),
    Alias("logging_steps", "", "every step is recorded"),
    Alias("report_to", "tracking.kind"),
    Alias("seed", "run.seed"),
    Alias("output_dir", "", "the option --run-dir"),
)
VERL = (
    Alias("data.train_files", "data.source"),
    Alias("data.val_files", "evaluation.suite", "or data.held_out"),
    Alias("data.prompt_key", "data.question"),
    Alias("data.train_batch_size", "rollout.prompts"),
    Alias("data.sampler.class_path", "data.curriculum", "a class of yours there; here by pass rate", gone=True),
    Alias("data.max_prompt_length", "rollout.max_prompt_tokens"),
    Alias("data.max_response_length", "rollout.max_tokens"),
    Alias("actor_rollout_ref.model.path", "model.path"),
    Alias("actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing"),
    Alias("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    Alias("actor_rollout_ref.rollout.n", "rollout.responses"),
    Alias("actor_rollout_ref.rollout.name", "engine.kind", "local, or vllm"),
    Alias("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    Alias("actor_rollout_ref.rollout.val_kwargs.n", "evaluation.samples"),
    Alias("actor_rollout_ref.rollout.val_kwargs.top_p", "evaluation.top_p"),
    Alias("actor_rollout_ref.rollout.val_kwargs.top_k", "evaluation.top_k", "-1 there is 0 here"),
    Alias("actor_rollout_ref.rollout.gpu_memory_utilization", "engine.memory"),
    Alias("actor_rollout_ref.actor.optim.lr", "update.learning_rate"),
    Alias("actor_rollout_ref.actor.optim.weight_decay", "update.weight_decay"),
    Alias("actor_rollout_ref.actor.ppo_mini_batch_size", "update.mini_batches", "prompts of one there, how many here"),
    Alias("actor_rollout_ref.actor.ppo_epochs", "update.epochs"),
    Alias("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "update.micro_batch_tokens"),
    Alias("actor_rollout_ref.actor.clip_ratio_low", "method.eps_low"),
    Alias("actor_rollout_ref.actor.clip_ratio_high", "method.eps_high"),
    Alias("actor_rollout_ref.actor.clip_ratio_c", "method.dual_clip"),
    Alias("actor_rollout_ref.actor.loss_agg_mode", "method.aggregation"),
    Alias("actor_rollout_ref.actor.kl_loss_coef", "update.kl_coefficient"),
    Alias("actor_rollout_ref.actor.kl_loss_type", "update.kl_estimator", "the same names; kl is k1, mse is k2"),
    Alias("actor_rollout_ref.actor.entropy_coeff", "update.entropy_coefficient", "estimated from the sampled tokens"),
    Alias("algorithm.rollout_correction", "correction.preset", "the same names; rollout_is, rollout_rs: its keys"),
    Alias("actor_rollout_ref.actor.grad_clip", "update.max_grad_norm"),
    Alias("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "update.offload"),
    Alias("algorithm.adv_estimator", "method.preset", "grpo, rloo, …"),
    Alias("algorithm.norm_adv_by_std_in_grpo", "method.advantage"),
    Alias("algorithm.filter_groups.enable", "rollout.dynamic_sampling"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.len", "reward.overlong_buffer"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", "reward.overlong_factor"),
    Alias("reward.custom_reward_function.path", "reward.custom_file"),
    Alias("reward.custom_reward_function.name", "reward.custom_function"),
    Alias("trainer.total_training_steps", "run.steps"),
    Alias("trainer.save_freq", "checkpoint.every"),
    Alias("trainer.test_freq", "evaluation.every"),
    Alias("trainer.val_before_train", "evaluation.at_start"),
    Alias("trainer.n_gpus_per_node", "parallel.processes"),
    Alias("trainer.logger", "tracking.kind"),
    Alias("trainer.project_name", "tracking.project"),
)
MLX_LM_LORA = (
    Alias("model", "model.path"),
    Alias("data", "data.source"),
    Alias("iters", "run.steps"),
    Alias("batch_size", "rollout.prompts"),
    Alias("group_size", "rollout.responses"),
    Alias("max_completion_length", "rollout.max_tokens"),
    Alias("max_seq_length", "rollout.max_tokens", "and rollout.max_prompt_tokens"),
    Alias("temperature", "rollout.temperature"),
    Alias("beta", "update.kl_coefficient"),
    Alias("epsilon", "method.eps_low"),
    Alias("epsilon_high", "method.eps_high"),
    Alias("grpo_loss_type", "method.preset", 'grpo, dr_grpo; bnpo is method.aggregation = "token_mean"'),
    Alias("importance_sampling_level", "method.preset", "sequence is gspo"),
    Alias("reward_functions", "reward.kind", "several: tables [[reward]]"),
    Alias("reward_weights", "reward.weight", "of each table [[reward]]"),
    Alias("reward_functions_file", "reward.custom_file"),
    Alias("learning_rate", "update.learning_rate"),
    Alias("lr_schedule", "update.schedule"),
    Alias("num_layers", "model.lora.layers"),
    Alias("lora_parameters", "model.lora", "rank and scale are called so here too"),
    Alias("train_type", "model.lora", "lora = { rank = 16 }, with dora = true for dora; without it all weights"),
    Alias("grad_checkpoint", "model.gradient_checkpointing"),
    Alias("steps_per_eval", "evaluation.every"),
    Alias("save_every", "checkpoint.every"),
    Alias("adapter_path", "", "the option --run-dir; adapters are in its model/adapter"),
    Alias("resume_adapter_file", "", "the option --resume"),
    Alias("seed", "run.seed"),
)
TRAINERS: Mapping[str, tuple[Alias, ...]] = {"TRL": TRL, "verl": VERL, "mlx-lm-lora": MLX_LM_LORA}
VERSIONS = {"TRL": "1.16.0", "verl": "0.9.1", "mlx-lm-lora": "5.10.2"}  # tests/docs/test_coming_from.py compares
PAGE = "docs/coming_from.md"
SHOWN = 4  # in a message


def known_elsewhere(name: str) -> Alias | None:
    """The other trainer's key with this name, written in full or by its last part; None if there is none."""
    every = [alias for aliases in TRAINERS.values() for alias in aliases]
    return next((alias for alias in every if name in (alias.theirs, alias.theirs.rpartition(".")[2])), None)


def translated(alias: Alias) -> str:
    """A sentence that says what the key is called here."""
    if not alias.ours:
        return f"{alias.theirs}: {alias.note}"
    return f"{alias.theirs} is {alias.ours} here" + (f" ({alias.note})" if alias.note else "")


def other_trainers_keys(table: Mapping[str, Any], sections: set[str]) -> list[Alias]:
    """The keys of a table that belong to other trainers; names that start with one of our ``sections`` do not count."""
    names = [name for name in _names(table) if name.partition(".")[0] not in sections]
    return [alias for name in names if (alias := known_elsewhere(name)) is not None]


def _names(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in table.items():
        dotted = f"{prefix}{name}"
        found += [dotted, *(_names(value, f"{dotted}.") if isinstance(value, dict) else [])]
    return found
