"""The ranks that torchrun or ``delta train --processes`` has started, over torch.distributed."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from backends.arrays import Summed
from backends.errors import LostPeerError
from backends.interface import BackendError
from backends.watchdog import Watchdog

JOIN_TIMEOUT = timedelta(minutes=10)  # until every rank has started
# Over gloo a process that dies is noticed at once, because its connections close; one that hangs, by the watchdog.
TIMEOUT = timedelta(days=7)
# NCCL notices neither. Ranks enter its operations together, after they have waited for each other over gloo.
NCCL_TIMEOUT = timedelta(minutes=30)
SLOT, HEADER = 256, 8  # bytes of an item that every rank sends at once, the first of which tell its length
LARGE = 2**20  # bytes from which a sum goes over NCCL, if the ranks have GPUs


class TorchCollective:
    """Communication between ranks: arrays and objects over gloo, large sums over NCCL if the ranks have GPUs."""

    def __init__(self, device: str) -> None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise BackendError(
                    f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                    "start as many processes as there are GPUs"
                )
            torch.cuda.set_device(local)
        self._device = torch.device(device)
        self._timeout = NCCL_TIMEOUT if device == "cuda" else TIMEOUT
        try:
            store, rank, size = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
            # With both, tensors of either device find their way.
            kinds = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=self._timeout)
            self._gloo: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"the processes of this run cannot be joined ({str(error).splitlines()[0]}); start them with "
                "delta train --processes N, or with torchrun"
            ) from error
        self._store, self._counters = store, 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._is_separate = False  # used by another thread than the main one
        self.watchdog: Watchdog | None = Watchdog(self.rank, self.size)
        self.watchdog.start(self)

    def sum(self, array: Summed) -> Summed:
        """The sum over ranks, the same bits on every rank."""
        total = torch.from_numpy(np.array(array))
        over_nccl = self._device.type == "cuda" and total.nbytes >= LARGE and not self._is_separate
        if over_nccl:
            self.barrier()
        total = total.to(self._device if over_nccl else "cpu")
        with self._waiting():
            dist.all_reduce(total, group=None if over_nccl else self._gloo)
        return total.cpu().numpy()

    def subgroup(self, sets: list[list[int]]) -> Any:
        """The group of torch.distributed for the one of these sets of ranks that this rank is in."""
        group, _ = dist.new_subgroups_by_enumeration(sets, timeout=self._timeout)
        return group

    def sum_tensors(self, tensors: Iterable[Tensor], group: Any = None) -> None:
        """Sum tensors over the ranks of a ``subgroup``, or over all, in place, on the device they are on."""
        if self._device.type == "cuda":
            self.barrier()
        with self._waiting():
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first rank's numbers into the others' tensor of the same shape, on the device it is on."""
        with self._waiting():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0)  # gloo does not know every type

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, in the order of ranks.

        Each rank sends as many bytes as its item has: small ones in the message that tells their lengths, larger ones
        in a broadcast of their own. ``all_gather_object`` would have every rank send as much as the longest item.
        """
        mine = np.frombuffer(pickle.dumps(item, protocol=5), np.uint8)
        slot = np.zeros(SLOT, np.uint8)
        slot[:HEADER] = np.array([len(mine)], np.int64).view(np.uint8)
        slot[HEADER:][: len(mine)] = mine[: SLOT - HEADER]
        slots = torch.empty(self.size, SLOT, dtype=torch.uint8)
        with self._waiting():
            dist.all_gather(list(slots.unbind()), torch.from_numpy(slot), group=self._gloo)
            parts = [self._whole(rank, mine, each.numpy()) for rank, each in enumerate(slots)]
            for _, work in parts:
                if work is not None:
                    work.wait()
        return [pickle.loads(part.data) for part, _ in parts]

    def _whole(self, rank: int, mine: NDArray[np.uint8], slot: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Any]:
        """The bytes of a rank's item, of which a slot has come, and the broadcast to wait for, if they need one."""
        length = int(slot[:HEADER].view(np.int64)[0])
        if length <= SLOT - HEADER:
            return slot[HEADER:][:length], None
        whole = mine.copy() if rank == self.rank else np.empty(length, np.uint8)
        return whole, dist.broadcast(torch.from_numpy(whole), rank, group=self._gloo, async_op=True)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.gather(None)

    def tickets(self) -> Callable[[], int]:
        """A counter in the store that the ranks met at; a call takes a fraction of a millisecond on one machine."""
        self._counters += 1
        name = f"tickets {self._gloo.group_name} {self._counters}"
        return lambda: int(self._store.add(name, 1)) - 1

    def separate(self) -> TorchCollective:
        """The same ranks for another thread, over gloo alone. Its calls do not count as this rank's waiting."""
        other = copy.copy(self)
        other._gloo, other._is_separate = dist.new_group(backend="gloo", timeout=TIMEOUT), True
        return other

    def close(self) -> None:
        """Leave the group."""
        if self.watchdog is not None:
            self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While this rank waits for the others; raises LostPeerError if one of them has ended."""
        assert self.watchdog is not None
        if self._is_separate:
            self.watchdog.follow_this_thread()
        try:
            with nullcontext() if self._is_separate else self.watchdog.waiting():
                yield
        except RuntimeError as error:
            raise LostPeerError(self.rank) from error
