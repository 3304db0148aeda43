"""Exceptions of backends, and errors that several backends raise with the same message."""

from __future__ import annotations


class BackendError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix."""


class LostPeerError(BackendError):
    """Another process of the run ended; if it gave a reason, that is the cause."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} lost the other processes of this run, of which one has ended; go on with --resume"
        )


_TORCH_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")  # by name, so that torch is not imported


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process of the run has ended."""
    return isinstance(error, LostPeerError) or type(error).__name__ in _TORCH_PEERS or "gloo" in str(error)


def too_long(width: int) -> BackendError:
    """The error for a single sequence of ``width`` tokens that does not fit in memory."""
    return BackendError(
        f"out of memory on a single sequence of {width} tokens; lower max_tokens or head_chunk_tokens, turn on "
        "gradient_checkpointing, train adapters (lora) or choose a smaller model"
    )


def out_of_step(tokens: int) -> BackendError:
    """The error for a micro-batch that does not fit while other ranks compute the same layers."""
    return BackendError(
        f"out of memory on a micro-batch of {tokens} tokens, in the middle of layers that are split over processes, so "
        f"it cannot be made smaller now; go on with --resume --set update.micro_batch_tokens={max(1, tokens // 2)}"
    )


def outdated_features() -> RuntimeError:
    """The error for features that would have to be recomputed from weights that are gone: a mistake of the caller."""
    return RuntimeError(
        "the policy was updated or loaded while token features of its former weights were in use, of which some were "
        "not kept and cannot be computed again; reduce and close features before step() and load()"
    )
