"""Try every family, or those of the given model_types, and write docs/models.md: ``python -m tests.families``."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import transformers

from tests.families.checks import Outcome, try_family
from tests.families.families import FAMILIES
from tests.families.table import write


def main() -> None:
    """Print each outcome, then write the table."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    outcomes: dict[tuple[str, str], Outcome] = {}
    chosen = set(sys.argv[1:]) or {family.key for family in FAMILIES}
    for family in (family for family in FAMILIES if family.key in chosen):
        for backend in ("cpu", "mlx"):
            with tempfile.TemporaryDirectory() as folder:
                outcomes[family.key, backend] = outcome = try_family(family, backend, Path(folder))
            print(f"{family.key:42} {backend:4} {'passed' if outcome.passed else outcome.reason}", flush=True)
    write(outcomes)


main()
