"""What backends raise, and errors that several of them raise in the same words."""

from __future__ import annotations


class BackendError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix."""


class LostPeerError(BackendError):
    """Another process of the run ended; what it said, if anything, is the reason."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} lost the other processes of this run, of which one has ended; go on with --resume"
        )


_TORCH_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")  # by name, so that torch is not imported


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process of the run has ended."""
    return isinstance(error, LostPeerError) or type(error).__name__ in _TORCH_PEERS or "gloo" in str(error)


def too_long(width: int) -> BackendError:
    """For a micro-batch of one sequence, ``width`` tokens, that does not fit in memory."""
    return BackendError(
        f"out of memory on a single sequence of {width} tokens; lower max_tokens or head_chunk_tokens, turn on "
        "gradient_checkpointing, train adapters (lora) or choose a smaller model"
    )


def out_of_step(tokens: int) -> BackendError:
    """For a micro-batch of so many tokens that does not fit while other ranks compute the same layers."""
    return BackendError(
        f"out of memory on a micro-batch of {tokens} tokens, in the middle of layers that are split over processes, so "
        f"it cannot be made smaller now; go on with --resume --set update.micro_batch_tokens={max(1, tokens // 2)}"
    )


def outdated_features() -> RuntimeError:
    """For features that would have to be computed again from weights that are gone: the caller's mistake."""
    return RuntimeError(
        "the policy was updated or loaded while token features of its former weights were in use, of which some were "
        "not kept and cannot be computed again; reduce and close features before step() and load()"
    )
