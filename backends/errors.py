"""Errors that several backends raise in the same words."""

from __future__ import annotations

from backends.interface import BackendError


def too_long(width: int) -> BackendError:
    """For a micro-batch of one sequence, ``width`` tokens, that does not fit in memory."""
    return BackendError(
        f"out of memory on a single sequence of {width} tokens; lower max_tokens or head_chunk_tokens, turn on "
        "gradient_checkpointing, train adapters (lora) or choose a smaller model"
    )


def outdated_features() -> RuntimeError:
    """For features that would have to be computed again from weights that are gone: the caller's mistake."""
    return RuntimeError(
        "the policy was updated or loaded while token features of its former weights were in use, of which some were "
        "not kept and cannot be computed again; reduce and close features before step() and load()"
    )
