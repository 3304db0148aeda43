"""The input of a plan: a recipe, a model's shape, GPUs, and the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from delta_cli.doctor import assumptions
from delta_cli.doctor.gpus import Gpu
from delta_cli.doctor.memory import FLOAT, trained
from delta_cli.doctor.model_shape import ModelShape
from delta_cli.doctor.sharding import ShardingLayout, choose_sharding
from delta_cli.doctor.workload import Workload
from delta_cli.recipe import Recipe

SamplerKind = Literal["local", "vllm"]
SAMPLERS: dict[str, SamplerKind] = {"local": "local", "vllm": "vllm"}


@dataclass(frozen=True)
class PlanRequest:
    """The input of a plan."""

    recipe: Recipe
    shape: ModelShape
    config: Mapping[str, Any]
    gpu: Gpu
    processes: int = 1
    engine: SamplerKind = "local"
    mean_tokens: float | None = None  # of a response; None: a share of the limit

    @property
    def room(self) -> int:
        """Bytes of a GPU that a run may use."""
        return int(self.gpu.memory * (1 - assumptions.RESERVE))

    @cached_property
    def layout(self) -> ShardingLayout:
        """How the run is distributed over processes."""
        count = trained(self.recipe, self.shape)
        return choose_sharding(self.processes, self.recipe.parallel, count, self.gpu.node)

    def work(self, groups: int) -> Workload:
        """The work of this many groups of the recipe."""
        rollout = self.recipe.rollout
        mean = self.mean_tokens or max(1.0, assumptions.MEAN_SHARE * rollout.max_tokens)
        prompt = min(assumptions.MEAN_PROMPT, rollout.max_prompt_tokens)
        return Workload(groups, rollout.responses, prompt, mean, rollout.max_tokens)

    @cached_property
    def drawn(self) -> Workload:
        """What the process with the most groups samples and scores."""
        return self.work(self.layout.most(self.recipe.rollout.prompts))

    @cached_property
    def mini_batch(self) -> Workload:
        """What the process with the most groups trains on per mini-batch."""
        return self.work(self.layout.most(self.recipe.rollout.prompts // self.recipe.update.mini_batches))

    def micro_batches(self, work: Workload) -> int:
        """Forward passes for the packed rows of the work."""
        return max(1, math.ceil(work.packed / self.recipe.update.micro_batch_tokens))

    @property
    def updates(self) -> int:
        """Updates per step."""
        return self.recipe.update.mini_batches * self.recipe.update.epochs

    @property
    def width(self) -> int:
        """Bytes per number of the compute."""
        return 2 if self.recipe.model.dtype != "float32" else FLOAT

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in the type of the compute."""
        return self.width * self.shape.parameters

    @property
    def trained_bytes(self) -> int:
        """Of the gradient, float32."""
        return FLOAT * trained(self.recipe, self.shape)

    @property
    def read_bytes(self) -> int:
        """Of the weights that a forward of one token reads: not the table of embeddings."""
        shape = self.shape
        return self.width * (shape.layers * shape.layer_matrices + shape.vocabulary * shape.hidden)
