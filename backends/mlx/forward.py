"""Which positions of the trunk's output predict response tokens, and how wide its input is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from backends.batching import PaddedBatch, SharedPromptBatch

MlxMicroBatch = PaddedBatch | SharedPromptBatch

BUCKET = 32  # widths are multiples of this on Metal, so that buffers of few sizes are reused instead of piling up


def predicting_positions(batch: MlxMicroBatch, calls: list[mx.array]) -> mx.array:
    """The positions that predict the response tokens, [n], in the hidden states [·, T, H] of all calls, flattened."""
    if isinstance(batch, PaddedBatch):
        row, column = np.nonzero(batch.predicts)
        return mx.array(row * calls[0].shape[1] + column)
    prompts, responses = batch.prompts.size, max(batch.responses.shape[1], 1)
    places, wide = batch.predicts, calls[0].shape[1]
    inside = places < prompts
    before = places // max(batch.prompts.shape[1], 1) * wide + places % max(batch.prompts.shape[1], 1)
    after = places - prompts
    begin = len(batch.prompts) * wide
    wider = calls[-1].shape[1] if len(calls) > 1 else responses
    return mx.array(np.where(inside, before, begin + after // responses * wider + after % responses))


def padded_width(width: int) -> int:
    """The width that inputs are padded to."""
    return width + (-width % BUCKET if mx.metal.is_available() else 0)
