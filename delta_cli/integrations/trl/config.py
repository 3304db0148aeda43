"""DelTA's settings as arguments of a TRL trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import ValidationError
from trl import GRPOConfig

from delta_cli.recipe.method import DeltaSection

# Losses in which each token's advantage multiplies the term of that token.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass
class DelTAArguments:
    """The keys of a recipe's section ``delta`` as arguments, for any config class of TRL's GRPO.

    For a config class of your own, write a dataclass ``class MyDelTAConfig(DelTAArguments, MyConfig)``. Raises
    ValueError for a value out of range or a loss that does not accept token weights.
    """

    delta_proxy: Literal["output_row", "hidden_topk", "hidden_exact"] = _option(
        "output_row", "Token-gradient proxy: (1 - p)h, or the gradient with respect to h, truncated or exact."
    )
    delta_topk: int = _option(20, "Tokens of the truncated gradient; read with delta_proxy hidden_topk.")
    delta_scope: Literal["batch", "group"] = _option(
        "batch", "Centroids over the generation batch of all processes, or inside each prompt's group."
    )
    delta_refinements: int = _option(1, "Passes that refine the centroids.")
    delta_lambda_min: float = _option(0.8, "Least coefficient.")
    delta_lambda_max: float = _option(1.2, "Largest coefficient.")
    delta_temperature: float | None = _option(None, "Fixed temperature of the scores; None: lagged, from the margins.")
    delta_centroid: Literal["mean", "median"] = _option(
        "mean", "Centroid of a side; the median gives less weight to distant tokens."
    )
    delta_one_sided: Literal["none", "zero"] = _option(
        "none", "If a side is missing: weights of 1, or a contrast to a centroid at zero."
    )
    delta_shards: int = _option(1, "Parts of the batch, each with its own centroids and mean.")
    delta_score: Literal["sigmoid", "hard", "random"] = _option(
        "sigmoid", "Score of a margin; the others are ablations."
    )
    delta_contrast: Literal["between", "within"] = _option("between", "Margins between the sides; within: ablation.")
    delta_weighting: Literal["range", "alpha", "top", "bottom", "random"] = _option(
        "range", "From score to coefficient; the others are ablations."
    )
    delta_share: float = _option(0.5, "Share of tokens that train, with weighting top, bottom or random.")
    delta_normalise: Literal["sum", "count"] = _option(
        "sum", "sum: scale coefficients to mean 1; count: leave them unscaled."
    )
    delta_feature_bytes: int = _option(2**33, "Bytes of token features kept on the device.")
    delta_feature_host_bytes: int = _option(
        2**36, "Bytes of token features kept in host memory; the rest is recomputed for each reduction."
    )
    delta_rollouts_every: int = _option(
        10, "Optimizer steps between rollouts recorded in OUTPUT_DIR/delta for delta inspect and report; 0: none."
    )
    delta_right_above: float = _option(0.5, "A recorded response counts as right if its reward is above this.")

    def __post_init__(self) -> None:
        getattr(super(), "__post_init__", lambda: None)()
        self.delta_section()
        for name in ("delta_feature_bytes", "delta_feature_host_bytes", "delta_rollouts_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if isinstance(self, GRPOConfig):
            check_loss(self)

    def delta_section(self) -> DeltaSection:
        """The arguments as a recipe's section; raises ValueError, one line, for a value out of range."""
        values = {name: getattr(self, f"delta_{name}") for name in DeltaSection.model_fields}
        if values["temperature"] is None:
            values["temperature"] = "lagged"
        try:
            return DeltaSection(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"][:1])) or "value"
            raise ValueError(f"delta_{name}: {first['msg']}") from None


@dataclass
class DelTAConfig(DelTAArguments, GRPOConfig):
    """GRPOConfig with DelTA's arguments, which all begin with ``delta_``."""


def arguments_of(args: GRPOConfig) -> DelTAArguments:
    """DelTA's part of a trainer's arguments; the paper's settings if they have none."""
    if isinstance(args, DelTAArguments):
        return args
    return DelTAArguments()


def check_loss(args: GRPOConfig) -> None:
    """Raise ValueError for a loss in which token weights would not have their effect."""
    if args.importance_sampling_level == "sequence":
        raise ValueError(
            "importance_sampling_level 'sequence' gives all tokens of a completion one ratio and one gradient, so "
            "token weights would shrink to their mean; set importance_sampling_level='token'"
        )
    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type '{args.loss_type}' is not known to accept token advantages; choose one of "
            f"{', '.join(LOSS_TYPES)}"
        )


def options(arguments: DelTAArguments) -> dict[str, Any]:
    """DelTA's arguments by name, as given."""
    return {each.name: getattr(arguments, each.name) for each in fields(DelTAArguments)}
