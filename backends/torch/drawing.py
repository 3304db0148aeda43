"""The next token of each active response, drawn from its hidden state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from backends.interface import RolloutRequest
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.head import TorchHead
from backends.torch.sampling import draw


class TokenDrawer:
    """Draws tokens for at most ``most`` responses at a time.

    ``exact`` asks for the feature rows of a hidden_* proxy; otherwise the hidden states are the feature rows.
    """

    def __init__(self, head: TorchHead, request: RolloutRequest, most: int, graphs: GraphRunner, exact: bool) -> None:
        self._head, self._graphs, self._most = head, graphs, most
        self._sampling = request.sampling
        self._proxy = request.proxy if exact else None
        self._kinds = 1 + request.entropies  # numbers of a token
        self._buffers = head.buffers(most, 2)

    def __call__(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens [n] for hidden states [n, H] and noise [n], their numbers [1 or 2, n] and rows [n, H].

        The numbers are a token's log-probability and, if requested, the entropy of its distribution.
        """
        count = len(hidden)
        rows = self._graphs.rows(count, self._most)
        if rows > count:
            hidden, noise = pad(hidden, (0, 0, 0, rows - count)), pad(noise, (0, rows - count))
        ids, numbers, features = self._graphs.run("draw", self._draw, hidden, noise)
        if not self._graphs.records:
            return ids, numbers, features
        return ids[:count].clone(), numbers[:, :count].clone(), features[:count].clone()

    def _draw(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = len(hidden)
        ids = torch.empty(count, dtype=torch.int64, device=noise.device)
        numbers = torch.empty(self._kinds, count, device=noise.device)
        rows = torch.empty(count, hidden.shape[1], device=hidden.device) if self._proxy else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, count, self._head.chunk):
                part = slice(first, first + self._head.chunk)
                wanted = None if rows is None else rows[part]
                self._draw_chunk(hidden[part], noise[part], ids[part], numbers[:, part], wanted)
        return ids, numbers, hidden if rows is None else rows

    def _draw_chunk(self, hidden: Tensor, noise: Tensor, ids: Tensor, numbers: Tensor, rows: Tensor | None) -> None:
        """Fill in ids [c], numbers [k, c] and, for hidden_* features, the gradients [c, H]."""
        sampling = self._sampling
        logits, weights = (buffer[: len(hidden)] for buffer in self._buffers)
        self._head.logits(hidden, sampling.softmax_temperature, logits)
        chosen, total = draw(logits, noise, sampling, weights)
        ids.copy_(chosen)
        numbers[0] = logits.gather(1, ids[:, None])[:, 0] - total.log()
        if rows is not None and self._proxy is not None:
            rows.copy_(self._head.gradients(hidden, logits, weights, total, ids, self._proxy))
        if len(numbers) > 1:
            numbers[1] = total.log() - logits.mul_(weights).sum(1) / total
