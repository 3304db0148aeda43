"""The language-model head in chunks of tokens, so that logits [tokens, V] never exist as a whole.

With l = (h·Wᵀ + b) / temperature, where most models have no b, and p = softmax(l), the derivative of log p(y) with
respect to h is (W_y − Σ_j p_j·W_j) / temperature, and with respect to W it is (onehot(y) − p)ᵀ·h / temperature.

The objective needs whole responses. If these fit into a chunk, it is evaluated while their probabilities are still in
memory, so that log-probabilities and both gradients take three matrix products. For a longer response the derivative
with respect to h, which does not depend on the objective, is computed in the first pass; only the gradient of a
trained head computes the logits a second time. If logits are capped, l = c·tanh(h·Wᵀ / c), each row of W is scaled by
the slope 1 − (l / c)² of its logit, and all responses take the second way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from backends.batching import PackedBatch, response_chunks
from backends.interface import Ids, Objective, Proxy


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of n sampled tokens at the sampling temperature, all float32."""

    logprobs: Tensor  # [n]
    logsumexp: Tensor  # [n] of the logits divided by the temperature
    entropies: Tensor | None  # [n] nats
    # [n, H] W_y − Σ_j q_j·W_j, where q is p (hidden_exact) or p on its top k (hidden_topk); rows times their slopes
    hidden_gradients: Tensor | None


@dataclass(frozen=True)
class TorchHead:
    """The output matrix in the dtype of its products; their results are float32."""

    weight: Tensor  # [V, H] float32, or bfloat16 on CUDA
    chunk: int  # tokens whose logits exist at a time
    softcap: float | None = None  # logits stay within ± this
    bias: Tensor | None = None  # [V] the layer's own, whose gradient is added to it wherever the weight's is computed

    def logits(self, hidden: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
        """Logits of hidden states [c, H] divided by the temperature, float32 [c, V]."""
        logits = _product(hidden.to(self.weight.dtype), self.weight.T, out)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if temperature == 1 else logits.div_(temperature)

    def _slopes(self, logits: Tensor, temperature: float) -> Tensor | None:
        """d(capped logit)/d(product) for logits from :meth:`logits`, with their shape; None means 1 everywhere."""
        return None if self.softcap is None else 1 - (logits * (temperature / self.softcap)).square_()

    @torch.no_grad()
    def statistics(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropies: bool,
        proxy: Proxy | None = None,
        parts: Sequence[slice] | None = None,
    ) -> HeadStatistics:
        """Statistics of tokens ``targets`` [n] predicted from ``hidden`` [n, H]; gradients only for a hidden_* proxy.

        ``parts`` are the slices of tokens whose logits exist at the same time, each at most a chunk.
        """
        count, size = hidden.shape
        new = hidden.new_empty
        result = HeadStatistics(
            logprobs=new(count, dtype=torch.float32),
            logsumexp=new(count, dtype=torch.float32),
            entropies=new(count, dtype=torch.float32) if entropies else None,
            hidden_gradients=new(count, size, dtype=torch.float32) if proxy and proxy.kind != "output_row" else None,
        )
        buffers = self.buffers(count, 2 if entropies else 1)
        for part in parts or self._chunks(count):
            self._chunk_statistics(result, part, hidden[part], targets[part], temperature, proxy, buffers)
        return result

    def _chunk_statistics(
        self,
        result: HeadStatistics,
        part: slice,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        proxy: Proxy | None,
        buffers: list[Tensor],
    ) -> None:
        """Fill in ``result[part]``; ``buffers`` are overwritten."""
        logits = self.logits(hidden, temperature, buffers[0][: len(hidden)])
        slopes = self._slopes(logits, temperature) if proxy and proxy.kind != "output_row" else None
        peak = logits.amax(1, keepdim=True)
        logits.sub_(peak)
        chosen = logits.gather(1, targets[:, None])[:, 0]
        if proxy and proxy.kind == "hidden_topk":
            values, ids = logits.topk(min(proxy.k, logits.shape[1]))
            result.hidden_gradients[part] = self._truncated_gradient(targets, values.softmax(1), ids, slopes)  # type: ignore[index]
        if result.entropies is None:
            exponentials = logits.exp_()
            total = exponentials.sum(1)
        else:
            exponentials = torch.exp(logits, out=buffers[1][: len(hidden)])
            total = exponentials.sum(1)
            result.entropies[part] = total.log() - logits.mul_(exponentials).sum(1) / total
        result.logprobs[part] = chosen - total.log()
        result.logsumexp[part] = peak[:, 0] + total.log()
        if proxy and proxy.kind == "hidden_exact":
            if slopes is not None:
                exponentials.mul_(slopes)
            mean_row = _product(exponentials.to(self.weight.dtype), self.weight).div_(total[:, None])
            result.hidden_gradients[part] = self._rows(targets, slopes) - mean_row  # type: ignore[index]

    def gradients(
        self, hidden: Tensor, logits: Tensor, exponentials: Tensor, total: Tensor, targets: Tensor, proxy: Proxy
    ) -> Tensor:
        """The gradients of a hidden_* proxy, [c, H], from values already computed.

        Takes logits [c, V] minus any constant per row, their exponentials, and the sums of these [c].
        """
        slopes = None if self.softcap is None else self._slopes(self.logits(hidden, 1.0), 1.0)
        if proxy.kind == "hidden_topk":
            values, ids = logits.topk(min(proxy.k, logits.shape[1]))
            return self._truncated_gradient(targets, values.softmax(1), ids, slopes)
        weighted = exponentials if slopes is None else exponentials * slopes
        mean_row = _product(weighted.to(self.weight.dtype), self.weight).div_(total[:, None])
        return self._rows(targets, slopes) - mean_row

    def _rows(self, targets: Tensor, slopes: Tensor | None) -> Tensor:
        """The rows of the weight at ``targets`` [c], scaled by the ``slopes`` [c, V]."""
        rows = self.weight[targets]
        return rows if slopes is None else slopes.gather(1, targets[:, None]) * rows

    def _truncated_gradient(self, targets: Tensor, probabilities: Tensor, ids: Tensor, slopes: Tensor | None) -> Tensor:
        """W_y − Σ over k of q_j·W_j for q and ids [c, k]; loops over k so that [c, k, H] never exists."""
        gradient = self._rows(targets, slopes).float()
        if slopes is not None:
            probabilities = probabilities * slopes.gather(1, ids)
        for j in range(ids.shape[1]):
            gradient.addcmul_(probabilities[:, j, None], self.weight[ids[:, j]].float(), value=-1)
        return gradient

    def parts(self, batch: PackedBatch) -> list[slice]:
        """The tokens of a micro-batch whose logits exist at the same time; bitwise the same in scoring and updates."""
        return [part for part, _ in response_chunks(batch, self.chunk, cut=True)]

    def backward(
        self,
        batch: PackedBatch,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        objective: Objective,
        gradient: Callable[[], Tensor | None],
    ) -> tuple[float, Tensor | None]:
        """A micro-batch's loss and its derivative with respect to ``hidden``, [n, H] float32; None if that is 0.

        Adds the gradient of the head's own weight to what ``gradient`` returns, unless that is None.
        """
        whole = getattr(objective, "needs_whole_micro_batch", False)
        loss, pulled, moved = 0.0, torch.zeros_like(hidden, dtype=torch.float32), False
        chunks = self.parts(batch)
        [buffer] = self.buffers(len(hidden), 1)
        for part, rows in response_chunks(batch, sys.maxsize if whole else self.chunk):

            def slopes(logp: Tensor, rows: Ids = rows) -> Tensor:
                nonlocal loss
                more, found = objective(logp.cpu().numpy(), rows)
                loss += more
                return torch.from_numpy(np.asarray(found, dtype=np.float32)).to(hidden.device)

            given = hidden[part], targets[part], temperature, slopes, gradient
            if part.stop - part.start <= self.chunk and self.softcap is None:
                found = self.pull_back(*given, buffer)
            else:
                inside = [chunk for chunk in chunks if part.start <= chunk.start < part.stop]
                shifted = [slice(chunk.start - part.start, chunk.stop - part.start) for chunk in inside]
                found = self.pull_back_long(*given, shifted)
            if found is not None:
                pulled[part], moved = found, True
        return loss, pulled if moved else None

    @torch.no_grad()
    def pull_back(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        slopes: Callable[[Tensor], Tensor],
        gradient: Callable[[], Tensor | None],
        buffer: Tensor,
    ) -> Tensor | None:
        """d(Σ_t c_t·logp_t)/d hidden [c, H] float32, with c = slopes(logp) for a chunk of tokens; None if all c are 0.

        Adds d/dW to what ``gradient`` returns, [V, H] float32, unless that is None. Overwrites ``buffer``.
        """
        hidden = hidden.to(self.weight.dtype)
        exponentials = self.logits(hidden, temperature, buffer[: len(hidden)])
        exponentials.sub_(exponentials.amax(1, keepdim=True))
        chosen = exponentials.gather(1, targets[:, None])[:, 0]
        total = exponentials.exp_().sum(1)
        coefficients = slopes(chosen - total.log()) / temperature
        if not coefficients.any():
            return None
        mean_row = _product(exponentials.to(self.weight.dtype), self.weight).div_(total[:, None])
        pulled = (self.weight[targets] - mean_row).mul_(coefficients[:, None])
        matrix = gradient()
        if matrix is not None:
            slope = exponentials.mul_((-coefficients / total)[:, None])
            slope.scatter_add_(1, targets[:, None], coefficients[:, None])
            self._add_outer(matrix, slope, hidden)
        return pulled

    def pull_back_long(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        slopes: Callable[[Tensor], Tensor],
        gradient: Callable[[], Tensor | None],
        parts: Sequence[slice],
    ) -> Tensor | None:
        """Like :meth:`pull_back` for more tokens than a chunk; computes logits twice if the head is trained."""
        exact = Proxy("hidden_exact")
        found = self.statistics(hidden, targets, temperature, entropies=False, proxy=exact, parts=parts)
        coefficients = slopes(found.logprobs)
        if not coefficients.any():
            return None
        matrix = gradient()
        if matrix is not None:
            self.add_weight_gradient(matrix, hidden, targets, found.logsumexp, coefficients, temperature)
        assert found.hidden_gradients is not None
        return found.hidden_gradients.mul_((coefficients / temperature)[:, None])

    def _add_outer(self, gradient: Tensor, slope: Tensor, hidden: Tensor) -> None:
        """Add slopeᵀ·hidden to ``gradient`` [V, H] float32, for slope [c, V] and hidden [c, H]; for a bias, its sum."""
        if (bias := dense_gradient(self.bias)) is not None:
            bias.add_(slope.sum(0))
        if self.weight.dtype == torch.float32:
            gradient.addmm_(slope.T, hidden)
        elif adds_in_place(self.weight.device):
            _add_product(gradient, slope.to(self.weight.dtype).T, hidden)
        else:
            gradient.add_(_product(slope.to(self.weight.dtype).T, hidden))

    @torch.no_grad()
    def add_weight_gradient(
        self,
        gradient: Tensor,
        hidden: Tensor,
        targets: Tensor,
        logsumexp: Tensor,
        coefficients: Tensor,
        temperature: float,
    ) -> None:
        """Add d(Σ_t coefficients[t]·logp_t)/dW to ``gradient`` [V, H] float32, recomputing the logits.

        Skips tokens with coefficient 0, which are clipped or have no advantage.
        """
        kept = coefficients.nonzero()[:, 0]
        if len(kept) < len(coefficients):
            hidden, targets, logsumexp = hidden[kept], targets[kept], logsumexp[kept]
            coefficients = coefficients[kept]
        hidden = hidden.to(self.weight.dtype)
        coefficients = coefficients / temperature
        [buffer] = self.buffers(len(kept), 1)
        for part in self._chunks(len(kept)):
            slope = self.logits(hidden[part], temperature, buffer[: len(hidden[part])])
            capped = self._slopes(slope, temperature)
            slope.sub_(logsumexp[part, None]).exp_().mul_(-coefficients[part, None])
            slope.scatter_add_(1, targets[part, None], coefficients[part, None])
            if capped is not None:
                slope.mul_(capped)
            self._add_outer(gradient, slope, hidden[part])

    def _chunks(self, count: int) -> Iterator[slice]:
        return (slice(first, min(first + self.chunk, count)) for first in range(0, count, self.chunk))

    def buffers(self, count: int, number: int) -> list[Tensor]:
        """Memory for the logits of one chunk, allocated once: allocating it per chunk cost a tenth of the time."""
        rows = min(self.chunk, count)
        return [self.weight.new_empty(rows, len(self.weight), dtype=torch.float32) for _ in range(number)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` float32 in one kernel, for bfloat16 a and b."""
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@cache
def adds_in_place(device: torch.device) -> bool:
    """Whether the device adds a bfloat16 product to a float32 matrix in one kernel, and does so correctly.

    Otherwise the product of each chunk, as large as the head's weight, is written and read once more.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in ((64, 128), (128, 64)))
    total = torch.ones(64, 64, device=device)
    try:
        _add_product(total, a, b)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total - 1 - a.float() @ b.float()).abs().max() < 1e-3)


def dense_gradient(weight: Tensor | None) -> Tensor | None:
    """The float32 gradient of a weight, zeros if it has none yet; None for weights without a gradient."""
    if weight is None or not weight.requires_grad:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b with a float32 result; bfloat16 inputs are multiplied and summed without rounding the result."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)
