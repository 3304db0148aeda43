"""The ranks that torchrun, or ``delta train --processes``, has started, over torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backends.arrays import Summed
from backends.errors import LostPeerError
from backends.interface import BackendError

# Ranks may wait for each other as long as the longest response of another one takes to draw. A process that
# dies is noticed at once, because its connections close.
TIMEOUT = timedelta(hours=12)


class TorchCollective:
    """What crosses between ranks as numpy arrays and objects goes over gloo, whatever the device of the model."""

    def __init__(self, device: str) -> None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise BackendError(
                    f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                    "start as many processes as there are GPUs"
                )
            torch.cuda.set_device(local)
        try:
            # With both, tensors of either device find their way.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
            self._group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"the processes of this run cannot be joined ({str(error).splitlines()[0]}); start them with "
                "delta train --processes N, or with torchrun"
            ) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, array: Summed) -> Summed:
        """The sum over ranks, the same bits on every rank."""
        total = torch.from_numpy(np.array(array))
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise LostPeerError(self.rank) from error
        return total.numpy()

    def gather(self, item: Any) -> list[Any]:
        """What every rank handed in, in the order of ranks."""
        items: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(items, item, group=self._group)
        except RuntimeError as error:
            raise LostPeerError(self.rank) from error
        return items

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.gather(None)

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
