"""The weight of the entropy bonus during a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from backends.arrays import Floats
from delta_cli.credit.entropy import next_coefficient
from delta_cli.recipe.models import UpdateSection


class EntropyBonus:
    """The coefficient of the entropy bonus, which follows update.entropy_target if the recipe has one."""

    def __init__(self, settings: UpdateSection) -> None:
        self.settings = settings
        self.coefficient = settings.entropy_coefficient
        self.applied = settings.entropy_coefficient  # in the present step

    @property
    def active(self) -> bool:
        """Whether the run may have a bonus."""
        return self.settings.entropy_coefficient > 0 or self.settings.entropy_target is not None

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Restore the coefficient from the metrics of earlier steps."""
        for record in records:
            self.coefficient = record.get("entropy_coefficient", self.coefficient)

    def adapt(self, entropies: Floats) -> None:
        """Set the coefficient of a step from the entropies of its tokens [N], before its updates."""
        settings = self.settings
        if settings.entropy_target is None:
            return
        entropy = float(np.mean(entropies, dtype=np.float64))
        self.coefficient = next_coefficient(
            self.coefficient, entropy, settings.entropy_target, settings.entropy_step, settings.entropy_max
        )
        self.applied = self.coefficient if entropy <= settings.entropy_target else 0.0

    def record(self) -> dict[str, float]:
        """The metric of the bonus; empty without one."""
        return {"entropy_coefficient": self.coefficient} if self.active else {}
