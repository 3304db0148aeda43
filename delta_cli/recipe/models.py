"""The sections of a recipe, and the recipe: the type, range, unit and meaning of every key, in one place.

The help, the key reference and the JSON schema are generated from these models. The sections that a backend reads are
in ``backends/settings.py``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from backends.settings import (
    ROLLOUT_BATCH,
    EngineSection,
    MemoryBudget,
    Model,
    Optimizer,
    Parallel,
    Section,
    key,
)
from delta_cli.credit.divergences import KlEstimator
from delta_cli.credit.methods import PRESET_KEYS
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.recipe.method import CorrectionSection, DeltaSection, MethodSection
from delta_cli.recipe.reward import Reward, RewardTables, check_rewards, verifiers

VLLM_CORRECTION = "decoupled_token_is"  # default of correction.preset with vLLM


class RunSection(Section):
    """The run as a whole."""

    steps: int = key(100, "training steps, each on one batch of rollouts", "steps", ge=1, le=10**7)
    seed: int = key(0, "seed of everything random in the run", ge=0, lt=2**31)
    threads: int | None = key(
        None,
        "processor threads of each process; absent: OMP_NUM_THREADS, or the cores it may use (one for a tiny model)",
        ge=1,
        le=1024,
    )
    deterministic: bool = key(
        False, "PyTorch on CUDA: kernels that repeat a run bit for bit; slower; a processor always repeats it"
    )


class RolloutSection(Section):
    """How responses are sampled."""

    prompts: int = key(32, "prompts in each step", "prompts", ge=1, le=65536)
    responses: int = key(16, "responses to each prompt", "responses", ge=1, le=4096)
    max_tokens: int = key(48, "longest response", "tokens", ge=1, le=10**6)
    max_prompt_tokens: int = key(2048, "longest prompt; problems with a longer one are left out", "tokens", ge=1)
    temperature: float = key(1.0, "sampling temperature; log-probabilities are taken at the same", gt=0, le=10)
    stop: tuple[str, ...] = key(
        (),
        "strings that end a response, as the end-of-sequence token does, in evaluations too",
        strict=False,
    )
    batch: int = key(ROLLOUT_BATCH, "responses sampled at the same time", "responses", ge=1)
    long_prompts: Literal["drop", "cut"] = key(
        "drop", "what happens to prompts above max_prompt_tokens: drop the problem, or cut the prompt on the left"
    )
    dynamic_sampling: bool = key(
        False, "replace groups whose rewards are all equal by new prompts until the batch has none"
    )
    dynamic_sampling_limit: int = key(
        4,
        "dynamic_sampling: most batches sampled in one step before it goes on with what it has",
        "draws",
        ge=1,
        le=100,
    )

    @model_validator(mode="after")
    def _no_empty_stop(self) -> Self:
        if not all(self.stop):
            raise ValueError(
                "rollout.stop: an empty string would end every response before it begins; remove it from the list"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, table: Any) -> Any:
        for name in ("top_p", "top_k", "min_p"):
            if isinstance(table, dict) and name in table:
                raise ValueError(
                    f"rollout.{name}: training samples from the whole distribution, because log-probabilities of a "
                    f"truncated one are not the policy's; remove it (evaluation.{name} is for evaluations)"
                )
        return table


class UpdateSchedule(Section):
    """The learning rate, and how many updates are made on a batch of rollouts."""

    learning_rate: float = key(1e-6, "AdamW learning rate", ge=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "learning rate after the warm-up")
    warmup: int = key(0, "steps over which the learning rate rises from 0", "steps", ge=0)
    mini_batches: int = key(
        4, "mini-batches that a batch of rollouts is split into by prompts; one update on each", ge=1, le=1024
    )
    epochs: int = key(1, "passes through each batch of rollouts", ge=1, le=64)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, in a run of ``steps``."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(steps - self.warmup, 1)
        factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
        return self.learning_rate * factor[self.schedule]


class UpdateSection(MemoryBudget, Optimizer, UpdateSchedule):  # pydantic takes the keys of the last base first
    """How the weights are updated."""

    old_logprobs: Literal["auto", "recompute", "rollout"] = key(
        "auto",
        "where old log-probabilities, entropies and features come from. recompute: one forward pass before the update; "
        "rollout: what the local engine kept while it sampled; auto: rollout in float32, where both are equal, "
        "otherwise recompute",
    )
    kl_coefficient: float = key(0.0, "weight of the KL divergence to the initial policy", ge=0, le=100)
    kl_estimator: KlEstimator = key(
        "k3",
        "estimate of that divergence from one token; k3_bias_corrected is TRL's, low_var_kl verl's, and a + takes the "
        "gradient of k2",
    )
    entropy_coefficient: float = key(0.0, "weight of the entropy bonus; with entropy_target, its first value", ge=0)
    entropy_target: float | None = key(
        None,
        "mean entropy of a token below which the bonus counts, its weight growing by entropy_step a step; absent: the "
        "bonus always counts",
        "nats",
        ge=0,
    )
    entropy_step: float = key(0.005, "entropy_target: how much the bonus's weight changes in a step", gt=0)
    entropy_max: float = key(1.0, "entropy_target: largest weight of the bonus", gt=0)
    drop_truncated: bool = key(False, "leave truncated responses out of the loss and its denominator")


class EvaluationSection(Section):
    """Evaluation during training, with the prompt template of training."""

    every: Annotated[int, Field(ge=0)] | Literal["never"] = key(
        10, 'steps between evaluations; 0: only before the first and after the last step; "never": none', "steps"
    )
    at_start: bool = key(True, "evaluate before the first step")
    suite: str | None = key(None, "suite to evaluate on; absent: the held-out problems")
    problems: int = key(128, "problems of each benchmark, at most", "problems", ge=1)
    samples: int = key(1, "responses to each problem", "responses", ge=1, le=4096)
    temperature: float = key(1.0, "sampling temperature; 0: the likeliest token", ge=0, le=10)
    top_p: float = key(1.0, "nucleus sampling, among the tokens that top_k and min_p leave", gt=0, le=1)
    top_k: int = key(0, "sample from this many of the likeliest tokens; 0: all", "tokens", ge=0)
    min_p: float = key(
        0.0, "sample from tokens with at least this share of the likeliest token's probability", ge=0, le=1
    )
    max_tokens: int | None = key(None, "longest response; absent: as in training", "tokens", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same response every time; set evaluation.samples = 1")
        return self


class CheckpointSection(Section):
    """What is saved, to resume from and to look at."""

    every: int = key(10, "steps between checkpoints; the last step always saves one", "steps", ge=1)
    keep: int = key(2, "how many of the newest checkpoints are kept", ge=1)
    keep_best: Literal["eval_accuracy", "accuracy", "reward_mean"] | None = key(
        None, "also keep the checkpoint with the best value of this metric"
    )
    async_save: bool = key(
        False, "write checkpoints in the background, from a copy in host memory, while training goes on"
    )
    rollouts_every: int = key(1, "steps between recorded rollout batches; 0: none", "steps", ge=0)


class TrackingSection(Section):
    """Where metrics go besides metrics.jsonl."""

    kind: Literal["none", "tensorboard", "wandb", "trackio", "mlflow", "swanlab"] = key(
        "none", "experiment tracker; each needs the pip extra of its name"
    )
    project: str = key("delta", "project that the run appears in; for MLflow the experiment", min_length=1)


class Recipe(Section):
    """A training run, completely described."""

    run: RunSection = RunSection()
    model: Model = Model()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardTables = Reward()
    method: MethodSection = MethodSection()
    delta: DeltaSection = DeltaSection()
    correction: CorrectionSection = CorrectionSection()
    update: UpdateSection = UpdateSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    parallel: Parallel = Parallel()
    engine: EngineSection = EngineSection()

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """Every reward, also if there is only one table [reward]."""
        return (self.reward,) if isinstance(self.reward, Reward) else self.reward

    @property
    def verifiers(self) -> tuple[Reward, ...]:
        """The rewards that decide whether a response is right, at least one."""
        return verifiers(self.rewards)

    @property
    def scores_as_drawn(self) -> bool:
        """Whether scoring reuses what the sampler kept of each token instead of running a forward pass."""
        if self.update.old_logprobs != "auto":
            return self.update.old_logprobs == "rollout"
        alike = self.engine.kind == "local" and self.model.dtype == "float32"
        return alike and not self.correction.resolve().active

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_preset(cls, table: Any) -> Any:
        """Keys of [method] and [delta] that are absent take the preset's values."""
        section = table.get("method") if isinstance(table, dict) else None
        preset = section.get("preset") if isinstance(section, dict) else None
        keys = PRESET_KEYS.get(preset, {}) if isinstance(preset, str) else {}
        given = {name: table.get(name, {}) for name in keys}
        return table | {name: keys[name] | found for name, found in given.items() if isinstance(found, dict)}

    @model_validator(mode="before")
    @classmethod
    def _correct_for_vllm(cls, table: Any) -> Any:
        """With vLLM, whose log-probabilities differ from the trainer's, a correction is on by default."""
        engine = table.get("engine") if isinstance(table, dict) else None
        if isinstance(engine, dict) and engine.get("kind") == "vllm" and isinstance(table.get("correction", {}), dict):
            return table | {"correction": {"preset": VLLM_CORRECTION} | table.get("correction", {})}
        return table

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that contradict each other, with the reason."""
        method = self.method.resolve()
        if self.rollout.prompts % self.update.mini_batches:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} cannot be split into update.mini_batches = "
                f"{self.update.mini_batches} equal parts; choose a divisor"
            )
        if method.credit == "future_kl" and self.update.mini_batches * self.update.epochs == 1:
            raise ValueError(
                "method.credit = future_kl weighs tokens by how far the policy has moved since the rollout, and a "
                "single update per batch does not move it; set update.mini_batches or update.epochs above 1"
            )
        if self.rollout.responses == 1 and method.advantage != "group_normalised":
            raise ValueError(
                f"method.advantage = {method.advantage} compares responses to one prompt; set rollout.responses above 1"
            )
        if self.rollout.dynamic_sampling and self.rollout.responses == 1:
            raise ValueError(
                "rollout.dynamic_sampling keeps groups whose rewards differ; set rollout.responses above 1"
            )
        if self.evaluation.every == "never" and self.checkpoint.keep_best == "eval_accuracy":
            raise ValueError(
                'checkpoint.keep_best = "eval_accuracy" needs evaluations, and evaluation.every = "never" makes none; '
                'set checkpoint.keep_best = "accuracy"'
            )
        check_rewards(self.rewards, self.rollout.max_tokens)
        if self.environment.kind == "verifiers" and any(reward.group for reward in self.rewards):
            raise ValueError(
                "reward.group needs all responses to a prompt at once, and episodes of verifiers are graded singly; "
                "remove it"
            )
        if self.environment.kind == "verifiers" and self.engine.in_flight:
            raise ValueError(
                "engine.in_flight needs the version of every token, which episodes of verifiers do not keep; set "
                "engine.in_flight = false"
            )
        if any(reward.kind == "environment" for reward in self.rewards) and not self.environment.used:
            raise ValueError('reward.kind = "environment" is the reward of an environment; add [environment]')
        if self.update.old_logprobs == "rollout" and (
            self.engine.kind != "local" or self.environment.kind == "verifiers"
        ):
            where = 'engine.kind = "vllm"' if self.engine.kind != "local" else 'environment.kind = "verifiers"'
            raise ValueError(
                f'update.old_logprobs = "rollout" needs entropies and features, which {where} does not return; set '
                'update.old_logprobs = "recompute"'
            )
        if self.update.old_logprobs == "rollout" and self.correction.resolve().active:
            raise ValueError(
                "[correction] compares the sampler with a forward pass; set update.old_logprobs = "
                '"recompute", or correction.preset = "none"'
            )
        return self
