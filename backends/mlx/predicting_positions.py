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
    # The batch counts positions in its own arrays, prompts first; hidden states may be wider than these arrays.
    prompt_width, response_width = max(batch.prompts.shape[1], 1), max(batch.responses.shape[1], 1)
    hidden_prompt_width = calls[0].shape[1]
    hidden_response_width = calls[-1].shape[1] if len(calls) > 1 else response_width
    in_responses = batch.predicts - batch.prompts.size
    of_prompts = batch.predicts // prompt_width * hidden_prompt_width + batch.predicts % prompt_width
    of_responses = in_responses // response_width * hidden_response_width + in_responses % response_width
    first_response = len(batch.prompts) * hidden_prompt_width
    return mx.array(np.where(in_responses < 0, of_prompts, first_response + of_responses))


def padded_width(width: int) -> int:
    """The width that inputs are padded to."""
    return width + (-width % BUCKET if mx.metal.is_available() else 0)
