"""The recipe to resume a run with: its own, with changes that do not decide the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.loading import differences, with_overrides

# What may change when a run is resumed: its length, what is watched and kept, how it fits into the machine, and the
# learning rate, which may have to be lowered after a run diverged.
CHANGEABLE = (
    *("run.steps", "run.threads", "evaluation.", "checkpoint.", "tracking.", "reward.workers", "reward.timeout"),
    *("rollout.batch", "update.micro_batch_tokens", "update.head_chunk_tokens"),
    *("update.feature_bytes", "update.feature_host_bytes", "update.offload", "parallel."),
    *("model.gradient_checkpointing", "update.learning_rate"),
)


def recipe_of_run(
    folder: Path,
    given: Path | None,
    overrides: Sequence[str],
    over: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """The run's own recipe, or the ``given`` one, with overrides and the keys in ``over``.

    Calls ``say`` with the changes. Raises UserError if there is no run, or if a key would change that decides the
    result.
    """
    own = folder / "recipe.toml"
    if not own.is_file():
        raise UserError(f"{folder}: holds no run to resume; to start one there, leave out --resume")
    before = load_recipe(own)
    if given:
        after = load_recipe(given, overrides)
    else:
        after = load_recipe(own, over=dict(over)) if over else with_overrides(before, overrides)
    changes = differences(before, after)
    refused = [line for name, line in changes if not name.startswith(CHANGEABLE)]
    allowed = [line for name, line in changes if name.startswith(CHANGEABLE)]
    if refused:
        also = f" ({'; '.join(allowed)} would be allowed)" if allowed else ""
        raise UserError(
            f"{own}: resuming would change {'; '.join(refused)}{also}. Only {', '.join(CHANGEABLE)} may change; "
            "start a new run for the rest"
        )
    if allowed:
        say(f"changed: {'; '.join(allowed)}")
    return after
