"""How sequences become rectangles: micro-batches by token budget, padding, sampling noise. Numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backends.interface import BackendError, Bools, Floats, Ids, Sequences


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded prompt + response of some sequences, B rows of length T.

    ``predicts`` marks the positions whose logits predict a response token: the position before it.
    Read row by row, the marked positions come in the flat order of the tokens at ``rows``.
    """

    rows: Ids  # [B] indices into the sequences
    ids: Ids  # [B, T], 0 where padded
    valid: Bools  # [B, T] False where padded
    predicts: Bools  # [B, T]
    targets: Ids  # [n] the response tokens, flat in the order of rows


def micro_batches(sequences: Sequences, budget: int) -> Iterator[PaddedBatch]:
    """Split into rectangles of at most ``budget`` padded tokens, sequences of like length together.

    Longest first, so that a batch that does not fit in memory fails at once. Responses without
    tokens are left out; a sequence longer than the budget gets a batch of its own.
    """
    lengths = np.array([len(prompt) for prompt in sequences.prompts]) + sequences.lengths
    order = np.argsort(-lengths, kind="stable")
    order = order[sequences.lengths[order] > 0]
    first = 0
    while first < len(order):
        rows = max(1, budget // int(lengths[order[first]]))
        yield pad(sequences, order[first : first + rows])
        first += rows


def pad(sequences: Sequences, rows: Ids) -> PaddedBatch:
    """The padded rectangle of the sequences at ``rows``."""
    parts = [np.concatenate([sequences.prompts[row], sequences.response(row)]) for row in rows]
    width = max(len(part) for part in parts)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    valid = np.zeros((len(rows), width), dtype=bool)
    predicts = np.zeros((len(rows), width), dtype=bool)
    for i, (row, part) in enumerate(zip(rows, parts, strict=True)):
        prompt = len(sequences.prompts[row])
        ids[i, : len(part)] = part
        valid[i, : len(part)] = True
        predicts[i, prompt - 1 : len(part) - 1] = True
    targets = np.concatenate([sequences.response(row) for row in rows])
    return PaddedBatch(rows, ids, valid, predicts, targets)


def too_long(width: int) -> BackendError:
    """What a backend raises when a micro-batch of one sequence, ``width`` tokens, does not fit in memory."""
    return BackendError(
        f"out of memory on a single sequence of {width} tokens; lower max_tokens or head_chunk_tokens, turn on "
        "gradient_checkpointing, train adapters (lora) or choose a smaller model"
    )


def uniforms(seed: int, row: int, count: int) -> Floats:
    """Sampling noise of response ``row``: float64 [count] in [0, 1).

    A function of (seed, row) alone, so that what a response becomes does not depend on which
    others are generated beside it, nor on when it enters the batch. A longer stream begins with
    the shorter one.
    """
    return np.random.Generator(np.random.Philox(key=[seed, row])).random(count)
