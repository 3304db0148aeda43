"""Exceptions of backends, and errors that several backends raise with the same message."""

from __future__ import annotations


class BackendError(Exception):
    """A problem that a person can fix. The message is one line: what, where, why, and how to fix it."""


class LostPeerError(BackendError):
    """Another process of the run ended; if it gave a reason, that is the cause."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} lost its connection to the other processes of this run, because one of them has ended; go on "
            "with --resume"
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


def too_many_adapted_layers(asked: int, layers: int) -> BackendError:
    """The error for adapters on more layers than the model has."""
    return BackendError(f"model.lora.layers = {asked}, but the model has {layers}; choose 1 to {layers}")


def row_of_zeros(path: str) -> BackendError:
    """The error for DoRA on a weight of which a row is 0."""
    return BackendError(
        f"model.lora.dora divides by the lengths of rows, and a row of '{path}' is 0; set model.lora.dora = false"
    )


def out_of_step(tokens: int) -> BackendError:
    """The error for a micro-batch of ``tokens`` that does not fit while other ranks compute the same layers."""
    return BackendError(
        f"out of memory on a micro-batch of {tokens} tokens; it cannot be made smaller now, because its layers are "
        "split over processes that compute them in step; go on with --resume --set "
        f"update.micro_batch_tokens={max(1, tokens // 2)}"
    )


def outdated_features() -> RuntimeError:
    """The error for features that would have to be recomputed from weights that are gone: a mistake of the caller."""
    return RuntimeError(
        "the policy was updated or loaded while token features of its former weights were in use; those that were not "
        "kept in memory cannot be computed again; reduce and close features before step() and load()"
    )
