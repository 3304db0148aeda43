"""The cases that the ranks compute, and that one process computes as their oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file

from backends.collective import SOLO
from backends.interface import Collective, Engine, RolloutRequest, Sampling, Sequences, starts_of
from backends.registry import create
from backends.settings import Optimizer, Sharding
from backends.torch import loading, state_file
from delta_cli.credit import PRESETS
from delta_cli.data.problem import Problem
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.update import Updater

VOCABULARY = 23
STEPS = 3
# Four prompts with four responses each. The first prompt's responses are most of the tokens. So in an update on two
# prompts, one of two ranks has a short group and the other a long one, and one of three ranks has none.
PROMPTS = (9, 1, 5, 2)
LENGTHS = ((14, 9, 0, 11), (1, 2, 1, 1), (3, 5, 1, 2), (2, 1, 4, 1))
REWARDS = ((1, 0, 0, 1), (0, 1, 0, 0), (1, 1, 0, 1), (0, 0, 1, 0))


@dataclass(frozen=True)
class Case:
    """A recipe's keys, the model's kind and the sharding."""

    keys: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    sharding: Sharding = "none"
    hybrid: bool = False

    @property
    def model(self) -> str:
        """The folder of its model."""
        return "hybrid" if self.hybrid else "tied" if self.tied else "untied"


SHARDINGS: tuple[Sharding, ...] = ("none", "full", "optimizer")


def shardings(processes: int) -> tuple[Sharding, ...]:
    """The shardings that so many ranks compute a gradient under."""
    return ("hybrid",) if processes == 4 else SHARDINGS


LORA = {"model.lora.rank": 2, "model.lora.targets": ["q_proj", "up_proj"]}
DELTA: dict[str, dict[str, Any]] = {
    "scope": {"scope": "group"},
    "refinements-0": {"refinements": 0},
    "refinements-2": {"refinements": 2},
    "range": {"lambda_min": 0.5, "lambda_max": 1.5},
    "temperature": {"temperature": 0.5},
    "hard": {"score": "hard"},
    "random-score": {"score": "random"},
    "within": {"contrast": "within"},
    "within-group": {"contrast": "within", "scope": "group"},
    "alpha": {"weighting": "alpha"},
    "top": {"weighting": "top"},
    "bottom": {"weighting": "bottom", "share": 0.3},
    "random-half": {"weighting": "random"},
    "count": {"normalise": "count"},
    "topk": {"proxy": "hidden_topk", "topk": 4},
    "exact": {"proxy": "hidden_exact"},
}


def _cases() -> Iterator[tuple[str, Case]]:
    for i, preset in enumerate(PRESETS):
        keys: dict[str, Any] = {"method.preset": preset}
        if preset == "dapo_ft":
            keys["method.entropy_share"] = 0.45  # no entropy is so near this threshold that rounding decides
        yield f"preset-{preset}", Case(keys, tied=i % 2 == 0, sharding=SHARDINGS[i % 3])
    for i, (name, options) in enumerate(DELTA.items()):
        keys = {f"delta.{key}": value for key, value in options.items()}
        yield f"delta-{name}", Case(keys, tied=i % 2 == 1, sharding=SHARDINGS[(i + 1) % 3])
    for sharding in SHARDINGS:
        yield f"tied-{sharding}", Case(sharding=sharding)
        yield f"untied-{sharding}", Case(sharding=sharding, tied=False)
        yield f"hybrid-{sharding}", Case(sharding=sharding, hybrid=True)
        yield f"lora-{sharding}", Case(LORA, sharding=sharding)
        yield f"dora-{sharding}", Case(LORA | {"model.lora.dora": True}, sharding=sharding)
        yield f"checkpointing-{sharding}", Case({"model.gradient_checkpointing": True}, sharding=sharding)
        yield f"reference-{sharding}", Case({"update.kl_coefficient": 0.1}, tied=False, sharding=sharding)
        yield (
            f"recomputed-{sharding}",
            Case(
                {"update.feature_bytes": 700, "update.feature_host_bytes": 300, "delta.scope": "group"},
                sharding=sharding,
            ),
        )
    yield "lora-reference", Case(LORA | {"update.kl_coefficient": 0.1}, sharding="full")
    yield (
        "dropped",
        Case(
            {"update.drop_truncated": True, "correction.preset": "token_truncate", "correction.high": 1.1},
            sharding="full",
        ),
    )
    yield "fipo-leaves-out", Case({"method.preset": "fipo", "method.dual_clip": 1.01, "update.epochs": 2})
    yield "epochs", Case({"update.epochs": 2, "method.preset": "dr_grpo"}, sharding="optimizer")
    yield "offload", Case({"update.offload": True}, sharding="full")
    yield "int8", Case({"update.moments": "int8"}, sharding="none")


CASES = dict(_cases())
# The cases of `make test`: split weights and a split optimizer, adapters, a preset without credit, recurrent layers.
# Gradients are compared there under every sharding.
SHORT = ("preset-reinforce", "tied-full", "lora-optimizer", "hybrid-full")
# For four ranks, of which two hold a copy of the weights together.
COPIES = {
    f"{name}-copies": replace(CASES[f"{name}-full"], sharding="hybrid")
    for name in ("tied", "untied", "hybrid", "lora", "dora", "checkpointing", "reference", "recomputed")
}
COPIES |= {f"{name}-copies": replace(CASES[name], sharding="hybrid") for name in ("dropped", "epochs", "offload")}
# Three ranks compute every case. Two need not repeat the presets and options of the credit, which see whole batches.
TIERS = {
    "short": SHORT,
    "long": tuple(name for name in CASES if name not in SHORT and not name.startswith(("preset-", "delta-"))),
    "all": tuple(CASES),
    "copies": tuple(COPIES),
}
CASES |= COPIES


def recipe_of(case: Case, model: Path) -> Recipe:
    keys = {
        "model.path": str(model),
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.temperature": 0.7,
        "rollout.max_tokens": 16,
        "update.mini_batches": 2,
        "update.learning_rate": 0.003,
        "update.epsilon": 0.01,  # smooth Adam: a tiny epsilon turns a rounding error into a whole step
        "update.micro_batch_tokens": 24,
        "update.head_chunk_tokens": 5,
        "parallel.sharding": case.sharding,
    }
    return load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in (keys | case.keys).items()])


def batch_of(step: int) -> RolloutBatch:
    """Random tokens with fixed lengths and rewards; two responses are truncated.

    From the second step on the group of one prompt, the first or the second, has zero variance.
    """
    rng = np.random.default_rng(step)
    prompts = [rng.integers(1, VOCABULARY, size=length) for length in PROMPTS]
    lengths = np.array(LENGTHS).ravel()
    tokens = rng.integers(0, VOCABULARY, size=lengths.sum())
    rewards = [(1,) * 4 if step and group == step - 1 else row for group, row in enumerate(REWARDS)]
    verdicts = [Verdict(float(reward), bool(reward), None) for row in rewards for reward in row]
    return RolloutBatch(
        problems=tuple(Problem(str(i), "", "") for i in range(len(PROMPTS))),
        sequences=Sequences(tuple(p for p in prompts for _ in range(4)), tokens, starts_of(lengths), 0.7),
        texts=("",) * len(lengths),
        verdicts=tuple(verdicts),
        truncated=np.arange(len(lengths)) % 7 == 3,
        engine_logprobs=rng.normal(-3, 0.3, size=len(tokens)).astype(np.float32),
    )


def run(case: Case, models: dict[str, Path], ranks: Collective = SOLO) -> dict[str, Any]:
    """Draw, score and update for three steps; return what a rank knows afterwards, which is the same on each."""
    recipe = recipe_of(case, models[case.model])
    engine = create("cpu", backend_settings(recipe), ranks)
    updater = Updater(recipe, engine, ranks)
    found: dict[str, Any] = {"logprobs": [], "entropies": [], "weights": [], "records": [], "tokens": []}
    for step in range(STEPS):
        found["tokens"].append(sampled(engine, ranks))
        batch = batch_of(step)
        scored = updater.score(batch)
        coefficients = updater.credit(scored, step)
        updates = updater.update(scored, coefficients, step)
        found["logprobs"].append(np.asarray(scored.old_logprobs, np.float64))
        found["entropies"].append(np.asarray(scored.entropies, np.float64))
        found["weights"].append(coefficients.weights)
        found["records"].append(updates.record())
    found["tokens"].append(sampled(engine, ranks))
    found["model"] = exported(engine, ranks)
    engine.close()
    return found


def item(size: int, rank: int) -> dict[str, Any]:
    """What a rank hands to the others, of a size that differs from rank to rank."""
    return {"rank": rank, "bytes": b"x" * (size * (rank + 1)), "array": np.arange(rank, dtype=np.float32)}


SIZES = (0, *range(90, 180), 100_000)  # around what fits into one message, and far beyond


def exchanged(ranks: Collective) -> list[list[dict[str, Any]]]:
    """What every rank hands in, of each size."""
    return [ranks.gather(item(size, ranks.rank)) for size in SIZES]


def read_whole(models: dict[str, Path], ranks: Collective) -> dict[str, int]:
    """How often this rank reads a whole model from its files, by case."""
    found = {}
    for name in ("untied-none", "tied-full", "reference-full", "hybrid-full", "bfloat16"):
        case = CASES.get(name, Case({"model.dtype": "bfloat16"}, sharding="full"))
        with patch.object(loading, "_read", wraps=loading._read) as read:
            create("cpu", backend_settings(recipe_of(case, models[case.model])), ranks).close()
        found[name] = read.call_count
    return found


def counted(ranks: Collective) -> list[list[int]]:
    """The tickets that each rank takes until 40 are gone, of two queues, one after the other."""
    found = []
    for _ in range(2):
        take = ranks.tickets()
        assert take is not None
        mine = []
        while (ticket := take()) < 40:
            mine.append(ticket)
        found.append(mine)
        ranks.barrier()
    return found


def sampled(engine: Engine, ranks: Collective) -> list[list[int]]:
    """Responses to three prompts, which the ranks draw in turn."""
    mine = np.arange(ranks.rank, 3, ranks.size)
    rows = (mine[:, None] * 2 + np.arange(2)).ravel()
    prompts = tuple(np.arange(1, 3 + prompt) for prompt in mine)
    drawn = engine.rollout(RolloutRequest(prompts, Sampling(6, (0,), 0.7, samples=2, seed=4), rows))
    assert drawn.version == engine.version
    own = {int(row): drawn.tokens[drawn.starts[i] : drawn.starts[i + 1]].tolist() for i, row in enumerate(rows)}
    everyone = {row: tokens for part in ranks.gather(own) for row, tokens in part.items()}
    return [everyone[row] for row in range(6)]


def exported(engine: Engine, ranks: Collective) -> dict[str, np.ndarray]:
    """The weights in the model folder that the first rank writes."""
    with TemporaryDirectory() as own:
        folder = Path(ranks.gather(own)[0])
        engine.export(folder)
        weights = {name: weight.float().numpy() for name, weight in load_file(folder / "model.safetensors").items()}
        ranks.barrier()
    return weights


def bfloat16_update(sharding: Sharding, models: dict[str, Path], ranks: Collective = SOLO) -> dict[str, np.ndarray]:
    """The float32 masters of bfloat16 weights before and after an update, from checkpoints, and the exported weights.

    With a huge epsilon AdamW steps along the gradient.
    """
    recipe = recipe_of(Case({"model.dtype": "bfloat16"}, tied=False, sharding=sharding), models["untied"])
    straight = Optimizer(beta1=0.0, weight_decay=0.0, max_grad_norm=0.0).but(epsilon=1e8)
    engine = create("cpu", replace(backend_settings(recipe), optimizer=straight), ranks)
    updater = Updater(recipe, engine, ranks)
    batch, groups = batch_of(0), np.arange(2)
    scored = updater.score(batch)
    surrogate = updater.surrogate(scored, updater.credit(scored, 0), groups)
    found = {f"before {name}": value for name, value in checkpointed(engine, ranks).items()}
    updater.accumulate(batch, groups, surrogate)
    engine.step(1e8 * 1e-3, surrogate.scale)
    found |= {f"after {name}": value for name, value in checkpointed(engine, ranks).items()}
    found |= {f"exported {name}": value for name, value in exported(engine, ranks).items()}
    engine.close()
    return found


def checkpointed(engine: Engine, ranks: Collective) -> dict[str, np.ndarray]:
    """The weights in a checkpoint, put together from the rows of all ranks."""
    with TemporaryDirectory() as own:
        folder = Path(ranks.gather(own)[0])
        engine.save(folder)
        ranks.barrier()
        with state_file.stored(folder, "weights") as stored:
            found = {name: state_file.whole(torch.empty(shape)) for name, shape in stored.shapes.items()}
            stored.read(found)
        ranks.barrier()
    return {name: entry.parts[0].view(entry.shape).numpy() for name, entry in found.items()}


def gradient(
    sharding: Sharding, models: dict[str, Path], ranks: Collective = SOLO, *, hybrid: bool = False
) -> dict[str, np.ndarray]:
    """The gradient of one mini-batch, read from the weights: with a huge epsilon AdamW steps along it."""
    case = Case(sharding=sharding, hybrid=hybrid)
    recipe = recipe_of(case, models[case.model])
    straight = Optimizer(beta1=0.0, weight_decay=0.0, max_grad_norm=0.0).but(epsilon=1e8)
    engine = create("cpu", replace(backend_settings(recipe), optimizer=straight), ranks)
    updater = Updater(recipe, engine, ranks)
    batch, groups = batch_of(0), np.arange(2)
    scored = updater.score(batch)
    surrogate = updater.surrogate(scored, updater.credit(scored, 0), groups)
    before = exported(engine, ranks)
    updater.accumulate(batch, groups, surrogate)
    length = 1e4  # of the step, in gradients: long enough to show in float32 weights
    norm = engine.step(1e8 * length, surrogate.scale)
    after = exported(engine, ranks)
    engine.close()
    return {name: (before[name].astype(np.float64) - after[name]) / length for name in before} | {
        "norm": np.array(norm)
    }
