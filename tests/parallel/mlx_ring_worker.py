"""One rank of the tests of MLX's ring: draws, scores and updates its share of a batch.

Its arguments are the number of ranks, what is trained, the model's folder and a folder for results. It reads its rank
from the launcher's variables; the first rank writes ``results.pickle``.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from backends import registry
from backends.interface import BackendError, Collective, Engine, Proxy, RolloutRequest, Sampling, starts_of, token_index
from backends.settings import BackendSettings, Lora, Optimizer
from delta_cli.credit import token_coefficients
from tests.conformance.objectives import Clipped
from tests.conformance.tiny_model import EOS, make_sequences

# Rows of the batch for each rank: one rank has a single short response, another none.
SHARES = {1: ([0, 1, 2, 3, 4, 5],), 2: ([0, 1, 2, 4, 5], [3]), 3: ([0, 1, 2, 4, 5], [3], [])}
ADVANTAGES = np.array([0.7, -1.3, 0.4, 1.9, -0.4, 0.2])
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": True},
    "hybrid": {},
    "lora": {"lora": Lora(rank=2, scale=2.0)},
}
RATE, UPDATES = 0.0005, 3


def main(ranks: int, trained: str, model: Path, out: Path) -> None:
    """Run every part on this rank; the first rank writes the results."""
    collective = registry.join("mlx")
    assert collective.size == ranks
    engine = registry.create("mlx", settings(model, trained), collective)
    results = {"collective": exchange(collective), "rollout": rollout(engine, collective)}
    results |= train(engine, collective, out)
    engine.close()
    collective.close()
    if collective.rank == 0:
        (out / "results.pickle").write_bytes(pickle.dumps(results))


def settings(model: Path, trained: str) -> BackendSettings:
    """Settings with a large epsilon, which keeps Adam smooth: the default turns a rounding error into a whole step."""
    optimizer = Optimizer(epsilon=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    return BackendSettings.of(str(model), optimizer=optimizer, **SETTINGS[trained])


def exchange(collective: Collective) -> dict[str, Any]:
    """The results of the collective operations."""
    rank = collective.rank
    items = collective.gather({"rank": rank, "long": "x" * 1000 * rank, "array": np.arange(rank)})
    total = collective.sum(np.array([[1.0, 1e-12 * (rank + 1)], [1.0 + 1e-12 * (rank + 1), -1e300]]))
    nothing = collective.sum(np.zeros((0, 3)))
    collective.barrier()
    same = collective.gather(total.tobytes())
    return {"items": items, "total": total, "nothing": nothing, "same": len(set(same)) == 1}


def rollout(engine: Engine, collective: Collective) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of two responses to each of three prompts, by row of the global batch."""
    prompts = [np.array([3, 4, 5]), np.array([7]), np.array([2, 2])]
    mine = range(collective.rank, 2 if collective.size == 3 else 3, collective.size)  # one of three ranks has none
    mine = [*mine, 2] if collective.size == 3 and collective.rank == 0 else list(mine)
    rows = (np.array(mine, dtype=np.int64)[:, None] * 2 + np.arange(2)).ravel()
    sampling = Sampling(max_tokens=12, stop_ids=(EOS,), samples=2, seed=5)
    drawn = engine.rollout(RolloutRequest(tuple(prompts[at] for at in mine), sampling, rows))
    spans = [slice(*drawn.starts[at : at + 2]) for at in range(len(rows))]
    own = {
        int(row): (drawn.tokens[span].tolist(), drawn.logprobs[span].tolist())
        for row, span in zip(rows, spans, strict=True)
    }
    return {row: found for part in collective.gather(own) for row, found in part.items()}


def train(engine: Engine, collective: Collective, out: Path) -> dict[str, Any]:
    """Score, compute coefficients, update three times; write the checkpoint and the model to ``out``."""
    sequences = make_sequences(temperature=0.7)
    rows = np.array(SHARES[collective.size][collective.rank], dtype=np.int64)
    own, index = sequences.select(rows), token_index(sequences.starts, rows)
    scores = engine.score(own, Proxy("output_row"))
    assert scores.features is not None
    ranks = {"ranks": collective, "rows": rows} if collective.size > 1 else {}
    credit = token_coefficients(scores.features, ADVANTAGES[rows], starts_of(own.lengths), **ranks)
    scores.features.close()
    logp, weights = np.zeros(len(sequences.tokens)), np.zeros(len(sequences.tokens))
    logp[index], weights[index] = scores.logprobs, credit.weights
    logp, weights = collective.sum(logp), collective.sum(weights)
    whole = Clipped(sequences, logp)
    losses, norms = [], []
    for _ in range(UPDATES):
        loss = engine.accumulate(own, lambda logp, at: whole(logp, rows[at]))
        losses.append(float(sum(collective.gather(loss))))
        norms.append(collective.gather(engine.step(RATE, 0.5)))
    assert engine.step(RATE) == 0.0, "no rank has a gradient: nothing is updated"
    folder = out / "checkpoint"
    folder.mkdir(exist_ok=True)
    engine.save(folder)
    engine.export(out / "model")
    assert (out / "model" / "model.safetensors").exists(), "no rank may go on before it is written"
    nowhere = folder if collective.rank == 0 else out / "of another machine"
    resumed = []
    for _ in range(2):  # the second time from weights that have moved
        engine.load(nowhere)
        engine.accumulate(own, lambda logp, at: whole(logp, rows[at]))
        engine.step(RATE)
        resumed.append(collective.gather(engine.score(sequences).logprobs.tobytes()))
    return {"logp": logp, "weights": weights, "losses": losses, "norms": norms, "resumed": resumed}


def die() -> None:
    """The second rank exits silently; the first prints the error it gets and exits with code 2, as a command does."""
    collective = registry.join("mlx")
    collective.barrier()
    if collective.rank == 1:
        os._exit(9)
    try:
        for _ in range(3):
            collective.sum(np.ones(3))
    except BackendError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    if sys.argv[1] == "die":
        die()
    else:
        main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
