"""GRPOTrainer with DelTA: the advantages of completions become token advantages; nothing else changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from delta_cli.integrations.trl.config import arguments_of, check_loss
from delta_cli.integrations.trl.credit import credit, statistics
from delta_cli.integrations.trl.records import GradedCompletions, RunRecorder, most_amplified
from delta_cli.integrations.trl.scoring import FeatureScorer, ScoredCompletions
from delta_cli.seeds import generator

ForwardOutputs = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies and what TRL adds, [B, T]

_Base: Any = object  # Any, because the mixin overrides methods of the trainer that follows it among the bases

COLUMN = "most amplified token"  # of the completions table

# Inputs of the forward for batches with images, besides ids and masks.
_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class DelTAMixin(_Base):
    """Adds token credit to a GRPOTrainer: put it before the trainer among the bases, or call :func:`with_delta`.

    The advantages A [B] of completions are multiplied by the coefficients of their tokens, which gives [B, T]; TRL's
    losses accept this shape. Evaluation keeps TRL's advantages.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_loss(self.args)
        arguments = arguments_of(self.args)
        self._delta_section = arguments.delta_section()
        self._delta_function = arguments.weight_function()
        self._delta_scorer = FeatureScorer(self, arguments)
        self._delta_recorder = RunRecorder(self, arguments)
        self._delta_watching = False  # whether the policy's next forward is TRL's scoring of this batch
        self._delta_scored: ScoredCompletions | None = None
        self._delta_graded: GradedCompletions | None = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch with advantages [B, T]."""
        training = self.model.training
        self._delta_watching = training and self._delta_trl_scores()
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if not training:
                self._delta_log_column([None] * len(inputs))
                return output
            with profiling_context(self, "DelTA"):
                self._delta_credit(output, len(inputs))
        finally:
            self._delta_watching, self._delta_scored, self._delta_graded = False, None, None
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **inputs: Any,
    ) -> ForwardOutputs:
        """TRL's forward; features are collected from the one that scores a generation batch with the policy."""
        forward: Callable[..., Any] = super()._get_per_token_logps_and_entropies
        if not (self._delta_watching and model is self.model):
            scores: ForwardOutputs = forward(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **inputs,
            )
            return scores
        self._delta_watching = False  # the next forward may be that of the reference model
        found = self._delta_scorer.score(
            forward,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy or self._delta_needs_entropies,
            **inputs,
        )
        self._delta_scored = found
        return found.logps, found.entropies if compute_entropy else None, None

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> Tensor:
        """TRL's rewards, which are kept for the records."""
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        self._delta_graded = GradedCompletions(inputs, completion_ids_list, total)
        return rewards

    def _delta_credit(self, output: dict[str, Any], rows: int) -> None:
        """Turn the batch's advantages into token advantages; log and record the coefficients."""
        begun = time.perf_counter()
        scored = self._delta_scored
        if scored is None or output.get("old_per_token_logps") is not scored.logps:
            scored = self._delta_score(output)
        rng = generator(self.args.seed, self.state.global_step, "coefficients")
        found = credit(
            output,
            scored,
            self._delta_section,
            self.accelerator,
            self.num_generations,
            rng,
            self._delta_function,
            self._tokenizer.decode,
            self.state.global_step,
        )
        output["advantages"] = output["advantages"].unsqueeze(1) * found.weights
        seconds = time.perf_counter() - begun

        numbers = statistics(found, scored, self.accelerator)
        for name, value in numbers.items():
            if name == "degenerate":
                self._metrics["train"]["delta/degenerate"].append(float(value is not None))
            elif name.startswith(("coefficient", "margin")) and value is not None:
                self._metrics["train"][f"delta/{name}"].append(value)
        column = most_amplified(self._tokenizer, output["completion_ids"], found) if self.log_completions else []
        self._delta_log_column(column if len(column) == rows else [None] * rows)
        if self._delta_graded is not None:
            self._delta_recorder.record(output, self._delta_graded, scored, found, numbers, seconds)

    def _delta_score(self, output: dict[str, Any]) -> ScoredCompletions:
        """Run the scoring forward that TRL skipped, with the inputs it would get."""
        with self._delta_scorer.scoring():
            return self._delta_scorer.score(
                super()._get_per_token_logps_and_entropies,
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=self._delta_needs_entropies,
                **{name: output[name] for name in _MULTIMODAL if name in output},
            )

    @property
    def _delta_needs_entropies(self) -> bool:
        return self._delta_recorder.due or self._delta_function is not None

    def _delta_trl_scores(self) -> bool:
        """Whether TRL scores the generation batch itself."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        return not aligned or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _delta_log_column(self, values: list[str | None]) -> None:
        """Add to the column of the completions table; evaluations do too, because all columns have one length."""
        if self.log_completions:
            self._logs["extra"][COLUMN].extend(gather_object(values))


class DelTATrainer(DelTAMixin, GRPOTrainer):
    """GRPOTrainer with DelTA token credit; DelTAConfig has its arguments."""

    _tag_names: ClassVar[list[str]] = [*GRPOTrainer._tag_names, "delta"]


def with_delta(trainer: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """Add token credit to a trainer class of your own; its arguments may include DelTAArguments.

    Raises TypeError if the class is no GRPOTrainer.
    """
    if not issubclass(trainer, GRPOTrainer):
        raise TypeError(f"with_delta needs a subclass of TRL's GRPOTrainer, not {trainer.__name__}")
    if issubclass(trainer, DelTAMixin):
        return trainer
    names = {
        "__module__": trainer.__module__,
        "__doc__": f"{trainer.__name__} with DelTA token credit.",
        "_tag_names": [*trainer._tag_names, "delta"],
    }
    return type(f"DelTA{trainer.__name__}", (DelTAMixin, trainer), names)
