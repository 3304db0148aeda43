"""Every key of a recipe: its type, range, unit and meaning, in one place.

The help, the key reference and the JSON schema are generated from these models; nothing about a
key is written anywhere else.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from backends.settings import ROLLOUT_BATCH, MemoryBudget, Model, Optimizer, Parallel, Section, key
from delta_cli.credit.methods import PRESET_CREDIT
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.method import Delta, MethodSection
from delta_cli.recipe.reward import Reward, RewardTables, check_rewards, verifiers

ENGINE_CAP = 2.0  # update.importance_cap with an external engine


class Rollout(Section):
    """How responses are drawn."""

    prompts: int = key(32, "prompts a step", "prompts", ge=1, le=65536)
    responses: int = key(16, "responses for each prompt", "responses", ge=1, le=4096)
    max_tokens: int = key(48, "longest response", "tokens", ge=1, le=10**6)
    max_prompt_tokens: int = key(2048, "longest prompt; problems with a longer one are left out", "tokens", ge=1)
    temperature: float = key(1.0, "sampling temperature; log-probabilities are taken at the same", gt=0, le=10)
    stop: tuple[str, ...] = key(
        (),
        "strings of which the first ends a response, as its end-of-sequence token does; in evaluations too",
        strict=False,
    )
    batch: int = key(ROLLOUT_BATCH, "responses generated at a time", "responses", ge=1)
    long_prompts: Literal["drop", "cut"] = key("drop", "longer than max_prompt_tokens: left out, or cut on the left")
    dynamic_sampling: bool = key(False, "draw again until every kept group has rewards that differ")
    dynamic_sampling_limit: int = key(4, "dynamic_sampling: give up after so many draws a step", "draws", ge=1, le=100)

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
                    f"rollout.{name}: training draws from the whole distribution, because log-probabilities of a "
                    f"truncated one are not the policy's; remove it (evaluation.{name} is for evaluations)"
                )
        return table


class Schedule(Section):
    """The learning rate, and how many updates a batch of rollouts is used for."""

    learning_rate: float = key(1e-6, "AdamW learning rate", ge=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "learning rate after the warm-up")
    warmup: int = key(0, "steps over which the learning rate rises from 0", "steps", ge=0)
    mini_batches: int = key(4, "updates a batch of rollouts, each on as many whole prompts", ge=1, le=1024)
    epochs: int = key(1, "times each batch of rollouts is gone through", ge=1, le=64)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run of ``steps``."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(steps - self.warmup, 1)
        factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
        return self.learning_rate * factor[self.schedule]


class Update(MemoryBudget, Optimizer, Schedule):  # pydantic orders the keys from the last base to the first
    """How the weights move."""

    old_logprobs: Literal["auto", "recompute", "rollout"] = key(
        "auto",
        "old log-probabilities, entropies and features. recompute: one forward pass before the update; rollout: those "
        "the local engine kept while it sampled; auto: rollout in float32, where they are equal, else recompute",
    )
    kl_coefficient: float = key(0.0, "weight of the k3 estimate of KL to the initial policy", ge=0, le=100)
    importance_cap: float | None = key(None, "cap of the weight that corrects the sampling engine's mismatch", gt=0)
    drop_truncated: bool = key(False, "leave truncated responses out of loss and denominator")


class Evaluation(Section):
    """Evaluation while training, with the prompt template of training."""

    every: Annotated[int, Field(ge=0)] | Literal["never"] = key(
        10, 'steps between evaluations; 0: only before the first and after the last; "never": none', "steps"
    )
    at_start: bool = key(True, "evaluate before the first step")
    suite: str | None = key(None, "suite to evaluate on; absent: the problems that data.held_out keeps apart")
    problems: int = key(128, "problems of each benchmark, at most", "problems", ge=1)
    samples: int = key(1, "responses for each problem", "responses", ge=1, le=4096)
    temperature: float = key(1.0, "sampling temperature; 0: the likeliest token", ge=0, le=10)
    top_p: float = key(1.0, "nucleus sampling, of what top_k and min_p leave", gt=0, le=1)
    top_k: int = key(0, "only so many of the likeliest tokens; 0: all", "tokens", ge=0)
    min_p: float = key(0.0, "only tokens with at least this share of the likeliest one's probability", ge=0, le=1)
    max_tokens: int | None = key(None, "longest response; absent: as in training", "tokens", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same response every time; set evaluation.samples = 1")
        return self


class Checkpoint(Section):
    """What is kept to go on from."""

    every: int = key(10, "steps between checkpoints; the last step always saves one", "steps", ge=1)
    keep: int = key(2, "newest checkpoints kept", ge=1)
    keep_best: Literal["eval_accuracy", "accuracy", "reward_mean"] | None = key(
        None, "metric whose best checkpoint, of those that were saved, is kept too"
    )
    rollouts_every: int = key(1, "steps between recorded rollout batches; 0: none", "steps", ge=0)


class Tracking(Section):
    """Where the metrics go besides metrics.jsonl."""

    kind: Literal["none", "tensorboard", "wandb", "trackio"] = key("none", "tracker; each needs the extra of its name")
    project: str = key("delta", "wandb and trackio: the project that the run appears in", min_length=1)


class Engine(Section):
    """What draws the responses: the trainer's own backend, or vLLM servers that the new weights are loaded into."""

    kind: Literal["local", "vllm"] = key("local", "local: the backend itself; vllm: servers of vLLM, see docs/vllm.md")
    url: tuple[str, ...] = key((), "vllm: addresses of running servers, over which requests are spread", strict=False)
    launch: bool = key(False, "vllm: start a server on this machine, and end it with the run")
    python: str | None = key(None, "launch: Python of the environment that has vLLM; absent: this one")
    arguments: tuple[str, ...] = key((), "launch: more options of vLLM's command line", strict=False)
    memory: float | None = key(
        None,
        "launch: share of the GPU's memory it may take; absent: vLLM's own, on a CPU half of what is free",
        gt=0,
        lt=1,
    )
    colocated: bool = key(False, "vllm: the server frees the GPU they share while the trainer works")
    async_steps: int = key(0, "vllm: draw the next batch while this one is trained on", "batches", ge=0, le=1)
    concurrency: int = key(256, "vllm: requests at a time, for each server", "requests", ge=1, le=4096)
    deadline: float = key(1800.0, "vllm: longest wait for one response", "seconds", gt=0)
    tolerance: float | None = key(
        None, "vllm: largest mean gap to the trainer after new weights; absent: 0.001, with bfloat16 0.15", "nats", gt=0
    )
    inbox: str | None = key(None, "vllm: folder for new weights; absent: in memory where there is room, else the run's")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "local":
            if changed := self.model_fields_set - {"kind"} - {name for name, value in self if value == _default(name)}:
                raise ValueError(f'engine.{min(changed)} is about vLLM; set engine.kind = "vllm", or remove it')
        elif self.launch == bool(self.url):
            raise ValueError('engine.kind = "vllm" needs either engine.url of running servers or engine.launch = true')
        if self.async_steps and self.colocated:
            raise ValueError(
                "engine.async_steps draws while the trainer works: they cannot share a GPU (engine.colocated)"
            )
        return self


def _default(name: str) -> Any:
    return Engine.model_fields[name].default


class Run(Section):
    """The run as a whole."""

    steps: int = key(100, "updates of the rollout policy", "steps", ge=1, le=10**7)
    seed: int = key(0, "all randomness is a function of seed, step and purpose", ge=0, lt=2**31)
    threads: int | None = key(
        None, "processor threads of each process; absent: OMP_NUM_THREADS, or the cores it may use", ge=1, le=1024
    )


class Recipe(Section):
    """A training run, completely described."""

    run: Run = Run()
    model: Model = Model()
    data: DataSection = DataSection()
    rollout: Rollout = Rollout()
    reward: RewardTables = Reward()
    method: MethodSection = MethodSection()
    delta: Delta = Delta()
    update: Update = Update()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    parallel: Parallel = Parallel()
    engine: Engine = Engine()

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """Every reward; of the form [reward] the one."""
        return (self.reward,) if isinstance(self.reward, Reward) else self.reward

    @property
    def verifiers(self) -> tuple[Reward, ...]:
        """The rewards that say whether a response is right, one at least."""
        return verifiers(self.rewards)

    @property
    def scores_as_drawn(self) -> bool:
        """Whether what drawing knew of the tokens stands for scoring them: no forward is made for that."""
        if self.update.old_logprobs != "auto":
            return self.update.old_logprobs == "rollout"
        alike = self.engine.kind == "local" and self.model.dtype == "float32"
        return alike and self.update.importance_cap is None

    @model_validator(mode="before")
    @classmethod
    def _credit_of_the_preset(cls, table: Any) -> Any:
        """Absent keys of [delta] are the preset's."""
        section = table.get("method") if isinstance(table, dict) else None
        preset = section.get("preset") if isinstance(section, dict) else None
        if isinstance(preset, str) and preset in PRESET_CREDIT and isinstance(table.get("delta", {}), dict):
            return table | {"delta": PRESET_CREDIT[preset] | table.get("delta", {})}
        return table

    @model_validator(mode="before")
    @classmethod
    def _correct_for_the_engine(cls, table: Any) -> Any:
        """With an engine of its own arithmetic update.importance_cap is on unless the recipe gives another."""
        engine = table.get("engine") if isinstance(table, dict) else None
        if isinstance(engine, dict) and engine.get("kind") == "vllm" and isinstance(table.get("update", {}), dict):
            return table | {"update": {"importance_cap": ENGINE_CAP} | table.get("update", {})}
        return table

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Choices that do not go together, each refused with the reason."""
        method = self.method.resolve()
        if self.rollout.prompts % self.update.mini_batches:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} cannot be split into update.mini_batches = "
                f"{self.update.mini_batches} equal parts; choose a divisor"
            )
        if method.credit == "future_kl" and self.update.mini_batches * self.update.epochs == 1:
            raise ValueError(
                "method.credit = future_kl weighs tokens by how far the policy has moved since the rollout, which is "
                "nowhere in a single update a batch; set update.mini_batches or update.epochs above 1"
            )
        if self.rollout.responses == 1 and method.advantage != "group_normalised":
            raise ValueError(
                f"method.advantage = {method.advantage} compares responses of one prompt; set rollout.responses above 1"
            )
        if self.rollout.dynamic_sampling and self.rollout.responses == 1:
            raise ValueError(
                "rollout.dynamic_sampling keeps groups whose rewards differ; set rollout.responses above 1"
            )
        if self.evaluation.every == "never" and self.checkpoint.keep_best == "eval_accuracy":
            raise ValueError(
                'evaluation.every = "never" leaves no eval_accuracy to choose by; set checkpoint.keep_best = "accuracy"'
            )
        check_rewards(self.rewards, self.rollout.max_tokens)
        if self.update.old_logprobs == "rollout" and self.engine.kind != "local":
            raise ValueError(
                'engine.kind = "vllm" tells no features or entropies; set update.old_logprobs = "recompute"'
            )
        if self.update.old_logprobs == "rollout" and self.update.importance_cap is not None:
            raise ValueError(
                'update.importance_cap compares with a forward; set update.old_logprobs = "recompute", or remove it'
            )
        if self.engine.async_steps and self.parallel.processes > 1:
            raise ValueError(
                "engine.async_steps needs one training process; set engine.async_steps = 0 or parallel.processes = 1"
            )
        return self
