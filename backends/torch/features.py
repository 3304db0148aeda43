"""Token features on the device within a byte budget, in host memory beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from backends.interface import Floats, Ids

_CHUNK = 1024  # tokens whose rows are float64 at a time


class TorchFeatures:
    """The proxies v_t = scale_t · row_t of N tokens, in flat order.

    Tokens up to a cut live on the device, the others in host memory (pinned, for CUDA). Where a token
    lives depends on its flat position alone, so results do not depend on how the batch was computed.
    Reductions are in float64: they take the time of reading the rows, and a float32 product was
    measured to be off by 4e-5 after a few thousand tokens.
    """

    def __init__(self, on_device: Tensor, on_host: Tensor, scale: Tensor) -> None:
        self._on_device = on_device  # [C, H]
        self._on_host = on_host  # [N − C, H]
        self._scale = scale  # [N] float32, on the device

    @classmethod
    def allocate(cls, count: int, size: int, dtype: torch.dtype, device: torch.device, budget: int) -> TorchFeatures:
        """Room for ``count`` features of ``size`` numbers, at most ``budget`` bytes of it on the device."""
        cut = min(count, budget // (size * dtype.itemsize))
        on_device = torch.empty(cut, size, dtype=dtype, device=device)
        on_host = torch.empty(count - cut, size, dtype=dtype, pin_memory=device.type == "cuda" and cut < count)
        return cls(on_device, on_host, torch.ones(count, device=device))

    def put(self, positions: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Store rows [n, H] of the tokens at flat ``positions``, to be multiplied by ``scale`` [n]."""
        cut = len(self._on_device)
        for store, first, mine in (
            (self._on_device, 0, positions < cut),
            (self._on_host, cut, positions >= cut),
        ):
            if mine.any():
                there = torch.from_numpy(positions[mine] - first).to(store.device)
                here = torch.from_numpy(np.flatnonzero(mine)).to(rows.device)
                store[there] = rows[here].to(store.device, store.dtype)
        if scale is not None:
            self._scale[torch.from_numpy(positions).to(scale.device)] = scale

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""
        factors = self._vector(weights) * self._scale
        total = torch.zeros(len(factors), self._on_device.shape[1], dtype=torch.float64, device=factors.device)
        for part, rows in _chunks((self._on_device, self._on_host), factors.device):
            total += factors[:, part] @ rows
        return total.cpu().numpy()

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""
        vector = self._vector(direction)
        return self._each(lambda rows, scale: (rows @ vector) * scale)

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""
        return self._each(lambda rows, scale: torch.linalg.vecdot(rows, rows) * scale**2)

    def slice(self, start: int, stop: int) -> TorchFeatures:
        """The features of tokens start:stop; shares the memory."""
        cut = len(self._on_device)
        on_host = self._on_host[max(0, start - cut) : max(0, stop - cut)]
        return TorchFeatures(self._on_device[start:stop], on_host, self._scale[start:stop])

    def close(self) -> None:
        """Free the memory."""
        self.__dict__.clear()

    def _vector(self, array: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(self._scale.device)

    def _each(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> Floats:
        """One number for every token, from its row and scale."""
        result = torch.empty(len(self._scale), dtype=torch.float64, device=self._scale.device)
        for part, rows in _chunks((self._on_device, self._on_host), result.device):
            result[part] = reduce(rows, self._scale[part])
        return result.cpu().numpy()


def _chunks(stores: Iterable[Tensor], device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the flat order with their rows, float64 on ``device``."""
    first = 0
    for store in stores:
        for rows in store.split(_CHUNK):
            if len(rows):
                yield slice(first, first + len(rows)), rows.to(device, non_blocking=True).double()
                first += len(rows)
