"""Credits that read the solver's marks: what a perfect credit gives, and the worst one."""

from __future__ import annotations

import numpy as np

from backends.arrays import Doubles
from delta_cli.bench.solver import token_marks
from delta_cli.credit.weight_functions import CreditInput


def solver(batch: CreditInput) -> Doubles:
    """1 for operands and results in right responses, 1 for wrong tokens in wrong responses, 0 for all others."""
    marks, advantages = token_marks(batch), batch.token_advantages
    return np.select([advantages > 0, advantages < 0], [marks.decisive, marks.wrong], 1).astype(np.float64)


def flipped(batch: CreditInput) -> Doubles:
    """The solver's weights turned over: 1 for what it gives 0, and 0 for what it gives 1."""
    marks, advantages = token_marks(batch), batch.token_advantages
    return np.select([advantages > 0, advantages < 0], [~marks.decisive, ~marks.wrong], 1).astype(np.float64)


def first_mistake(batch: CreditInput) -> Doubles:
    """1 for the first wrong token of each response, 0 for all others: what the AUCs look for."""
    wrong, found = token_marks(batch).wrong, np.zeros(len(batch.tokens))
    _, first = np.unique(batch.rows[wrong], return_index=True)
    found[np.flatnonzero(wrong)[first]] = 1.0
    return found
