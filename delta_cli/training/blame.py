"""The tokens of a wrong response that carry its blame: those of the first equation that does not hold."""

from __future__ import annotations

import numpy as np

from backends.arrays import Bools, Doubles, Ids
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.rewards.equations import find_equations
from delta_cli.rollout.batch import RolloutBatch


def blamed_tokens(batch: RolloutBatch, advantages: Doubles, tokenizer: Tokenizer) -> Bools:
    """Mark the tokens [N] of the first false equation of each response with a negative advantage.

    Text before it contains no mistake, and text after it may be correct given the mistake. ``advantages`` is [R].
    """
    starts = batch.sequences.starts
    blamed = np.zeros(len(batch.sequences.tokens), dtype=bool)
    for row in np.flatnonzero(advantages < 0):
        region, own = batch.sequences.region(int(row))
        found = first_false(region, tokenizer)
        if found is not None:
            marks = np.zeros(len(region), dtype=bool)
            marks[found.start : found.stop] = True
            blamed[starts[row] : starts[row + 1]] = marks[own]
    return blamed


def first_false(tokens: Ids, tokenizer: Tokenizer) -> range | None:
    """The token indices of the first equation that does not hold; None if all hold."""
    pieces = tokenizer.pieces(tokens)
    false = next((each for each in find_equations("".join(pieces)) if not each.holds), None)
    if false is None:
        return None
    ends = np.cumsum([len(piece) for piece in pieces])
    first, last = np.searchsorted(ends, [false.start, false.stop - 1], side="right")
    return range(int(first), int(last) + 1)
