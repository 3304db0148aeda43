"""The coefficients are those of the slow oracle and of ``delta``'s own path, whatever TRL does with the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer

from backends.interface import Proxy, Sequences
from backends.registry import create
from backends.settings import BackendSettings
from delta_cli.credit import token_coefficients
from delta_cli.integrations.trl import scoring, trainer
from tests.integrations.credited import Batch, Rescored, Seen, slow, train
from tests.integrations.tiny import MODEL


def own(seen: Seen, proxy: Proxy, temperature: float) -> np.ndarray:
    """The weights that ``delta train`` computes on the same batch: packed rows, its own attention and head."""
    assert "tool_mask" not in seen.batch
    prompts = [
        ids[mask.bool()].numpy() for ids, mask in zip(seen.batch["prompt_ids"], seen.batch["prompt_mask"], strict=True)
    ]
    lengths = seen.counted.sum(1).numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = seen.batch["completion_ids"][seen.counted].numpy()
    backend = create("cpu", BackendSettings.of(MODEL))
    scores = backend.score(Sequences(tuple(prompts), tokens, starts, temperature), proxy)
    found = token_coefficients(scores.features, seen.batch["advantages"].double().numpy(), starts)
    backend.close()
    return found.weights


@pytest.mark.parametrize("mini_batches", [1, 2], ids=["forward of ours", "forward of TRL's"])
@pytest.mark.parametrize("proxy", ["output_row", "hidden_exact", "hidden_topk"])
def test_they_are_the_oracles_and_deltas(proxy: Any, mini_batches: int, seen: list[Seen], tmp_path: Path) -> None:
    rows = {"per_device_train_batch_size": 16 // mini_batches, "steps_per_generation": mini_batches}
    train(tmp_path, delta_proxy=proxy, delta_topk=5, temperature=0.8, **rows)
    [found] = seen
    np.testing.assert_allclose(found.flat, own(found, Proxy(proxy, 5), 0.8), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.flat, slow(found, proxy, 0.8), rtol=0, atol=1e-5)
    assert found.flat.std() > 0.01
    assert abs(found.flat.mean() - 1) < 1e-6
    assert (found.weights[~found.counted] == 1).all()


ABLATIONS: dict[str, dict[str, Any]] = {
    "K = 0": {"refinements": 0},
    "K = 2": {"refinements": 2},
    "range": {"lambda_min": 0.5, "lambda_max": 1.5},
    "temperature": {"temperature": 2.0},
    "hard": {"score": "hard"},
    "within": {"contrast": "within"},
    "alpha": {"weighting": "alpha"},
    "top": {"weighting": "top", "share": 0.3},
    "bottom": {"weighting": "bottom"},
    "count": {"normalise": "count"},
    "group": {"scope": "group"},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_option_reaches_the_core(name: str, rescored: Rescored) -> None:
    arguments = {f"delta_{key}": value for key, value in ABLATIONS[name].items()}
    found = rescored.seen(rescored.credit(**arguments))
    options = {key: value for key, value in ABLATIONS[name].items() if key != "scope"}
    groups = {"groups": np.arange(16) // 4} if name == "group" else {}
    np.testing.assert_allclose(found.flat, slow(found, **options, **groups), rtol=0, atol=1e-5)
    assert found.flat.std() > 0.01


def test_truncated_completions_are_no_part_of_it(seen: list[Seen], tmp_path: Path) -> None:
    train(tmp_path, mask_truncated_completions=True, max_completion_length=21)
    [found] = seen
    left = found.counted.any(1)
    assert 0 < int(left.sum()) < 16
    np.testing.assert_allclose(found.flat, slow(found), rtol=0, atol=2e-6)
    assert (found.weights[~left] == 1).all()


@pytest.mark.parametrize(
    ("device_share", "host_share"), [(0, 1), (0.4, 0.3), (0, 0)], ids=["host", "in three places", "computed anew"]
)
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_bytes_decide_where_features_are_not_what_they_say(
    scope: str, device_share: float, host_share: float, rescored: Rescored
) -> None:
    whole = rescored.credit(delta_scope=scope)
    bytes_of_all = int(whole.counted.sum()) * 64 * 4
    budgets = {
        "delta_feature_bytes": int(bytes_of_all * device_share),
        "delta_feature_host_bytes": int(bytes_of_all * host_share),
    }
    split = rescored.credit(delta_scope=scope, **budgets)
    np.testing.assert_allclose(split.weights, whole.weights, rtol=0, atol=1e-6)
    assert whole.weights.std() > 0.01


class Wide(TorchDispatchMode):
    """The largest number of rows of any tensor whose last dimension is the vocabulary, but for the head's [64, V]."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dim() > 1 and result.shape[-1] == 258 and len(result) != 64:
            self.rows = max(self.rows, result.numel() // 258)
        return result


@pytest.mark.parametrize("proxy", ["output_row", "hidden_topk", "hidden_exact"])
def test_logits_of_all_tokens_never_exist(proxy: str, rescored: Rescored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's own forward is TRL's and left out; what we add sees a chunk of tokens at a time."""
    monkeypatch.setattr(scoring, "HEAD_CHUNK", 10)
    watch = Wide()
    rows = scoring.FeatureScorer._rows

    def watched(self: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert len(hidden) > 100
        with watch:
            return rows(self, hidden, targets)

    monkeypatch.setattr(scoring.FeatureScorer, "_rows", watched)
    rescored.credit(delta_proxy=proxy)
    assert watch.rows == (0 if proxy == "output_row" else 10)


def test_advantages_are_multiplied_and_kept_for_the_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optimizer step of a generation batch gets the rows' own coefficients, shuffled with them."""
    given: list[Batch] = []
    loss = GRPOTrainer._compute_loss

    def watch(self: Any, model: Any, inputs: Batch) -> Any:
        given.append(inputs)
        return loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watch)
    batches: list[tuple[Batch, torch.Tensor]] = []
    credit = trainer.credit

    def spy(output: Batch, *rest: Any) -> Any:
        result = credit(output, *rest)
        batches.append((output | {"advantages": output["advantages"].clone()}, result.weights))
        return result

    monkeypatch.setattr(trainer, "credit", spy)
    train(tmp_path, per_device_train_batch_size=4, steps_per_generation=4, num_iterations=2, max_steps=8)
    [(batch, coefficients)] = batches
    assert len(given) == 8
    rows = {tuple(ids.tolist()): row for row, ids in enumerate(batch["completion_ids"])}
    for inputs in given:
        for ids, advantages in zip(inputs["completion_ids"], inputs["advantages"], strict=True):
            same = [row for row, other in enumerate(batch["completion_ids"]) if torch.equal(other, ids)]
            expected = [batch["advantages"][row] * coefficients[row] for row in same]
            assert any(torch.equal(advantages, each) for each in expected)
    assert len(rows) > 4
