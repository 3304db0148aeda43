"""Ranks with other inputs are refused before the first step; a resumed run says what changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backends.interface import BackendError
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.runs import fingerprint as module
from delta_cli.runs.fingerprint import Fingerprint, changes, check_ranks, fingerprint
from delta_cli.training.setup import check_parallel
from tests.harness import Watcher, make_recipe, train

PROBLEMS = [Problem(str(number), f"{number}+1=?", str(number + 1)) for number in range(4)]


class Ranks:
    """Three ranks, of which the last one hands in something else."""

    rank, size = 0, 3

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, item: Any) -> list[Any]:
        return [item, item, self.other]


@pytest.fixture
def inputs(model: Path, tmp_path: Path) -> Callable[..., Fingerprint]:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "reward.py").write_text("def reward(response, problem):\n    return 1.0\n")
    changed = ["reward.kind=custom", f"reward.custom_file={tmp_path / 'reward.py'}", f"model.path={tmp_path / 'model'}"]
    return lambda problems=PROBLEMS, held_out=(): fingerprint(load_recipe(None, changed), problems, held_out)


def scale_one_weight(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = {name: np.array(weight) for name, weight in load_file(file).items()}
    name = sorted(weights)[-1]
    weights[name].flat[0] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})


def append(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with (folder / name).open("a") as stream:
            stream.write("\n")

    return edit


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (scale_one_weight, "model"),
        (append("model/config.json"), "model"),
        (append("model/tokenizer.json"), "tokenizer"),
        (append("reward.py"), "reward file"),
    ],
)
def test_a_rank_with_other_files_is_refused(
    change: Callable[[Path], None], named: str, inputs: Callable[..., Fingerprint], tmp_path: Path
) -> None:
    own = inputs()
    check_ranks(Ranks(inputs()), own)
    change(tmp_path)
    with pytest.raises(UserError, match=f"rank 2 differs from rank 0 in its {named}.*; every rank"):
        check_ranks(Ranks(inputs()), own)


def test_a_rank_with_other_rows_or_another_order_is_refused(inputs: Callable[..., Fingerprint]) -> None:
    own = inputs()
    for other in (inputs(PROBLEMS[:-1]), inputs(PROBLEMS[::-1]), inputs([replace(PROBLEMS[0], answer="7")])):
        with pytest.raises(UserError, match="rank 2 differs from rank 0 in its data"):
            check_ranks(Ranks(other), own)
    with pytest.raises(UserError, match="rank 2 differs from rank 0 in its held-out data"):
        check_ranks(Ranks(inputs(held_out=PROBLEMS[:1])), own)


def test_a_rank_with_another_program_is_refused(
    inputs: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = inputs()
    monkeypatch.setattr(module, "_program", module._program.__wrapped__)  # read again each time
    with monkeypatch.context() as patch:
        patch.setattr(module, "version", lambda package: "0.1")
        other = inputs()
    assert {name for name in own if own[name] != other[name]} == {name for name in own if name.startswith("version")}
    with pytest.raises(UserError, match=r"in its version of torch, .* and \d more;"):
        check_ranks(Ranks(other), own)
    monkeypatch.setattr(module, "_program_parts", lambda: iter([b"another"]))
    with pytest.raises(UserError, match="in its program;"):
        check_ranks(Ranks(inputs()), own)


def test_a_resumed_run_says_what_changed(model: Path, tmp_path: Path) -> None:
    def with_inputs(found: Fingerprint) -> Callable[[Any], None]:
        def prepare(trainer: Any) -> None:
            trainer.inputs = found
            trainer.state = replace(trainer.state, inputs=found)

        return prepare

    assert changes({"model": "a"}, {"model": "a", "new": "b"}) == []
    train(make_recipe(model, run__steps=1), tmp_path, prepare=with_inputs({"model": "a", "program": "b"}))
    heard = train(
        make_recipe(model, run__steps=2), tmp_path, resume=True, prepare=with_inputs({"model": "c", "program": "b"})
    )
    (notice,) = [notice for notice in heard.notices if notice.name == "inputs_changed"]
    assert "these changed: model;" in notice.text
    assert isinstance(heard, Watcher)


def test_a_rank_whose_weights_drifted_saves_no_checkpoint(model: Path, tmp_path: Path) -> None:
    def drift(trainer: Any) -> None:
        sample = trainer.learner.sample_weights()
        assert len(sample) > 16
        trainer.ranks = Ranks((sample + 1e-6).tobytes())
        with pytest.raises(BackendError, match="weights of rank 2 differ from those of rank 0"):
            trainer._check_drift()
        trainer.ranks = Ranks(sample.tobytes())
        trainer._check_drift()
        trainer.ranks = trainer.worker.ranks

    train(make_recipe(model, run__steps=1), tmp_path, prepare=drift)


def test_a_loss_that_depends_on_micro_batches_needs_one_process() -> None:
    recipe = load_recipe(None, ["method.aggregation=micro_batch_mean"])
    check_parallel(recipe, type("One", (), {"size": 1})())
    with pytest.raises(UserError, match="depends on which responses share a micro-batch, so 3 processes"):
        check_parallel(recipe, Ranks(None))  # type: ignore[arg-type]
