"""DelTA's settings as arguments of a TRL trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from trl import GRPOConfig

from backends.settings import MemoryBudget
from delta_cli.credit.methods import method
from delta_cli.credit.weight_functions import WeightFunction
from delta_cli.errors import UserError
from delta_cli.recipe.method import DeltaSection
from delta_cli.training.credit_file import open_weight_function

# Losses in which each token's advantage multiplies the term of that token.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


# The keys of a recipe that become arguments: delta_NAME has the type, the default and the meaning of the key.
OPTIONS = DeltaSection.model_fields | {
    name: MemoryBudget.model_fields[name] for name in ("feature_bytes", "feature_host_bytes")
}


def _with_options(cls: type[Any]) -> type[Any]:
    """Declare an argument for each of OPTIONS."""
    for name, option in OPTIONS.items():
        kind, default, meaning = option.annotation, option.default, option.description
        if name == "temperature":  # TRL's command line has no unions
            kind, default, meaning = float | None, None, "fixed temperature of the score; without it, lagged"
        cls.__annotations__[f"delta_{name}"] = kind
        setattr(cls, f"delta_{name}", field(default=default, metadata={"help": meaning}))
    return cls


@dataclass
@_with_options
class DelTAArguments:
    """The keys of a recipe's section ``delta`` as arguments, for any config class of TRL's GRPO.

    For a config class of your own, write a dataclass ``class MyDelTAConfig(DelTAArguments, MyConfig)``. Raises
    ValueError for a value out of range or a loss that does not accept token weights.
    """

    delta_rollouts_every: int = field(
        default=10,
        metadata={"help": "optimizer steps between rollouts recorded in OUTPUT_DIR/delta for delta inspect; 0: none"},
    )
    delta_credit: str | None = field(
        default=None,
        metadata={"help": "weight function in place of DelTA: a built-in name, or FILE.py:FUNCTION"},
    )
    delta_right_above: float = field(
        default=0.5, metadata={"help": "a recorded response counts as right if its reward is above this"}
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The arguments that _with_options declares."""

    def __post_init__(self) -> None:
        getattr(super(), "__post_init__", lambda: None)()
        self.delta_section()
        self.weight_function()
        for name in ("delta_feature_bytes", "delta_feature_host_bytes", "delta_rollouts_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if isinstance(self, GRPOConfig):
            check_loss(self)

    def weight_function(self) -> WeightFunction | None:
        """The weight function that replaces DelTA; raises ValueError, one line, if there is none of that name."""
        if self.delta_credit is None:
            return None
        try:
            found = open_weight_function(method("dapo", credit=self.delta_credit))
        except UserError as error:
            raise ValueError(f"delta_credit: {error}") from None
        if found is None:
            raise ValueError(f"delta_credit '{self.delta_credit}' is no weight function; name one, or FILE.py:FUNCTION")
        return found

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
