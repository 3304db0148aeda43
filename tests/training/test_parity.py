"""Replaying a recorded batch: the backends agree, and one that does not is detected."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from backends import registry
from backends.interface import BackendError
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.training import parity
from tests.command import delta
from tests.harness import make_recipe, train


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run whose recorded batches have rewards that differ."""
    folder = tmp_path_factory.mktemp("parity") / "run"
    train(make_recipe(model, run__steps=1, evaluation__at_start=False), folder)
    return folder


def replay(run: Path, backend: str) -> parity.Replay:
    recipe = load_recipe(run / "recipe.toml")
    batch = parity.read_batch(run / "rollouts" / "step-000001.jsonl.gz", recipe.rollout.temperature)
    return parity.replay(recipe, recipe.model.path, batch, backend)


def test_the_replayed_batch_is_the_recorded_one(run: Path) -> None:
    recipe = load_recipe(run / "recipe.toml")
    batch = parity.read_batch(run / "rollouts" / "step-000001.jsonl.gz", 1.0)
    assert len(batch.problems) == recipe.rollout.prompts
    assert batch.samples == recipe.rollout.responses
    with gzip.open(run / "rollouts" / "step-000001.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in file]
    assert batch.rewards.tolist() == [record["reward"] for record in records]
    recorded = np.concatenate([record["logprobs"] for record in records])
    # The batch was scored by the policy it came from, and the replay starts from the same weights.
    np.testing.assert_allclose(replay(run, "fake").logprobs, recorded, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_backends_agree_up_to_the_gradient(run: Path, backend: str) -> None:
    try:
        registry.resolve(backend)
    except BackendError as error:
        pytest.skip(str(error))
    reference = replay(run, "fake")
    assert max(np.abs(part).max() for part in reference.gradient.values()) > 1e-4
    found = parity.differences(replay(run, backend), reference, 1e-5)
    assert [each for each in found if not each.within] == []


def test_the_gradient_read_off_the_weights_is_that_of_the_loss(run: Path) -> None:
    """The oracle is a central difference of the loss along that gradient."""
    reference = replay(run, "fake")
    recipe = load_recipe(run / "recipe.toml")
    batch = parity.read_batch(run / "rollouts" / "step-000001.jsonl.gz", 1.0)
    norm = np.sqrt(sum(np.square(part).sum() for part in reference.gradient.values()))
    step = 1e-3

    def loss(sign: float) -> float:
        from delta_cli.recipe.backend_settings import backend_settings
        from delta_cli.training.update import Updater

        backend = registry.create("fake", backend_settings(recipe))
        updater = Updater(recipe, backend)
        scored = updater.score(batch)
        surrogate = updater.surrogate(scored, updater.credit(scored, 0), np.arange(len(batch.problems)))
        for name, part in reference.gradient.items():
            backend.model.weights[name] += sign * step * part / norm  # type: ignore[attr-defined]
        return backend.accumulate(batch.sequences, surrogate)

    slope = (loss(1.0) - loss(-1.0)) / (2 * step)
    assert slope == pytest.approx(norm, rel=1e-3)


def test_a_backend_that_differs_is_detected(run: Path) -> None:
    reference = replay(run, "fake")
    off = dataclasses.replace(
        reference,
        logprobs=reference.logprobs + 1e-4,
        gradient={name: 1.01 * part for name, part in reference.gradient.items()},
    )
    found = {each.quantity: each.within for each in parity.differences(off, reference, 1e-5)}
    assert found == {
        "log-probability": False,
        "entropy": True,
        "coefficient": True,
        "loss": True,
        "gradient (relative)": False,
    }
    nowhere = dataclasses.replace(reference, loss=float("nan"))
    assert not parity.differences(nowhere, reference, 1e-5)[3].within


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{}\n", mtime=0),
        gzip.compress(b"[1]\n", mtime=0),
        gzip.compress(b'{"group": 0', mtime=0),
    ],
)
def test_a_malformed_batch_is_an_error_of_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "step-000001.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(UserError, match="step-000001") as error:
        parity.read_batch(file, 1.0)
    assert "\n" not in str(error.value)


def test_the_commands_exit_code(run: Path) -> None:
    for tolerance, code in (("1e-5", 0), ("0", 0), ("-1", 1)):
        said = delta("parity", run, "--backends", "fake,fake", "--tolerance", tolerance)
        assert said.code == code
        assert ("TOO LARGE" in said.out) == bool(code)
