"""Token coefficients of a generation batch over all processes, and their statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from backends.arrays import Bools, Doubles
from delta_cli.credit import TokenCoefficients, token_coefficients
from delta_cli.credit.distributed import DistributedBatch, HeldFeatures, gather_batch
from delta_cli.credit.features import SelectedFeatures
from delta_cli.credit.weight_functions import CreditInput, WeightFunction
from delta_cli.integrations.trl.scoring import ScoredCompletions
from delta_cli.recipe.method import DeltaSection
from delta_cli.training.metrics import describe_coefficients


@dataclass(frozen=True)
class BatchCredit:
    """The credit of a process's B completions of at most T tokens."""

    weights: Tensor  # [B, T] float32; 1 for tokens that the loss leaves out
    coefficients: TokenCoefficients  # of the N counted tokens, flat and in order
    counted: Bools  # [B, T]
    advantages: Doubles  # [B]


def token_mask(output: dict[str, Any]) -> Tensor:
    """Which tokens of a generation batch the loss counts, bool [B, T]: neither padding nor a tool's tokens."""
    mask: Tensor = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask


def credit(
    output: dict[str, Any],
    scored: ScoredCompletions,
    section: DeltaSection,
    accelerator: Accelerator,
    num_generations: int,
    rng: np.random.Generator,
    function: WeightFunction | None = None,
    decode: Callable[[list[int]], str] = lambda ids: "",
    step: int = 0,
) -> BatchCredit:
    """The coefficients of a generation batch, or the weights of ``function``. Closes ``scored.features``.

    ``decode`` turns token ids into text.
    """
    advantages = output["advantages"]
    if advantages.dim() != 1:
        raise ValueError(
            f"DelTA needs one advantage for each completion, [B]; the trainer's are {list(advantages.shape)}"
        )
    per_response = advantages.double().cpu().numpy()
    counted = token_mask(output)
    index = counted[scored.mask].nonzero()[:, 0].cpu().numpy()
    logps = scored.logps[counted].double().cpu().numpy()
    scale = -np.expm1(logps) if section.proxy == "output_row" else np.ones(len(logps))
    rows = accelerator.process_index * len(per_response) + np.arange(len(per_response))
    starts = np.concatenate([[0], np.cumsum(counted.sum(1).cpu().numpy())])
    features = SelectedFeatures(scored.features, index, int(scored.mask.sum()), scale)
    ranks = AcceleratorRanks(accelerator)
    groups = rows // num_generations
    try:
        if function is not None:
            assert scored.entropies is not None  # requested for every weight function
            batch = gather_batch(per_response, starts, groups, rows, ranks)
            held = HeldFeatures(features, batch.index, int(batch.starts[-1]), ranks)
            entropies = scored.entropies[counted].double().cpu().numpy()
            tokens = output["completion_ids"][counted].double().cpu().numpy()
            given = _credit_input(batch, held, (logps, entropies, tokens), step, rng, decode)
            coefficients = function.coefficients(given, held).select(batch.index)
        else:
            coefficients = token_coefficients(
                features,
                per_response,
                starts,
                groups=None if section.scope == "batch" else groups,
                rng=rng,
                ranks=ranks,
                rows=rows,
                **asdict(section.resolve()),
            )
    finally:
        scored.features.close()
    weights = torch.ones(counted.shape, dtype=torch.float32, device=counted.device)
    weights[counted] = torch.from_numpy(coefficients.weights).to(weights)
    return BatchCredit(weights, coefficients, counted.cpu().numpy(), per_response)


def _credit_input(
    batch: DistributedBatch,
    held: HeldFeatures,
    own: tuple[Doubles, Doubles, Doubles],
    step: int,
    rng: np.random.Generator,
    decode: Callable[[list[int]], str],
) -> CreditInput:
    """What a weight function reads; ``own`` are log-probabilities, entropies and ids of this process's tokens."""
    logprobs, entropies, tokens = (held.scatter(values) for values in own)
    ids = tokens.astype(np.int64)

    def pieces(row: int) -> list[str]:
        return [decode([token]) for token in ids[batch.starts[row] : batch.starts[row + 1]].tolist()]

    groups = np.zeros(len(batch.advantages), np.int64) if batch.groups is None else batch.groups
    return CreditInput(logprobs, entropies, batch.advantages, groups, batch.starts, ids, step, rng, pieces=pieces)


class AcceleratorRanks:
    """The processes of an accelerator, with the methods that the credit core calls."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(self._accelerator.num_processes)

    def sum(self, array: Doubles) -> Doubles:
        """The sum of the processes' arrays, in float64; all have the same shape."""
        tensor = torch.from_numpy(np.ascontiguousarray(array, np.float64)).to(self._accelerator.device)
        return np.asarray(self._accelerator.reduce(tensor, "sum").cpu().numpy())

    def gather(self, item: Any) -> list[Any]:
        """The items of all processes, in their order."""
        return list(gather_object([item]))


def statistics(found: BatchCredit, scored: ScoredCompletions, accelerator: Accelerator) -> dict[str, Any]:
    """The statistics of ``delta train`` over the coefficients of all processes, and the mean entropy if known."""
    per_token = np.repeat(found.advantages, found.counted.sum(1))
    columns = np.stack([found.coefficients.weights, found.coefficients.margins, per_token], axis=1)
    table = torch.from_numpy(columns).float().to(accelerator.device)  # [N, 3]
    entropies = torch.zeros_like(scored.logps) if scored.entropies is None else scored.entropies
    mask = torch.from_numpy(found.counted).to(entropies.device)
    table = torch.cat([table, entropies[mask].float().to(table.device)[:, None]], dim=1)
    if accelerator.num_processes > 1:
        table = accelerator.gather(accelerator.pad_across_processes(table, dim=0, pad_index=float("nan")))
        table = table[~table[:, 0].isnan()]
    weights, margins, advantages, nats = table.double().cpu().numpy().T
    everywhere = TokenCoefficients(weights, np.zeros_like(weights), margins, found.coefficients.degenerate)
    return {
        **describe_coefficients(everywhere, advantages),
        "entropy_mean": float(nats.mean()) if scored.entropies is not None and len(nats) else None,
        "tokens": len(weights),
    }
