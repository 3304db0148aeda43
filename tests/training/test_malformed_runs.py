"""For any malformed run folder the command line prints one line and exits with code 2; it opens no pickle."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import make_recipe, train
from tests.training.malformed import Delta, Evil, assert_refused, cut, edit, put


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(make_recipe(model, run__steps=2, rollout__max_tokens=4), folder)
    return folder


def reseal(folder: Path) -> None:
    """Write a manifest that fits the folder's files: an attacker can compute checksums too."""
    from delta_cli.runs.checkpoint import _seal

    (folder / "manifest.json").unlink()
    _seal(folder, {})


def pickled_state(run: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    (folder / "state.safetensors").write_bytes(pickle.dumps(Evil(run / "trace")))
    reseal(folder)


def foreign_state(run: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = run / "checkpoints" / "step-000002"
    state = load_file(folder / "state.safetensors")
    save_file({name: value for name, value in state.items() if name != "steps"}, folder / "state.safetensors")
    reseal(folder)


def counters(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        folder = run / "checkpoints" / "step-000002"
        edit("state.json", **changes)(folder)
        reseal(folder)

    return change


def listed(name: str, make: Callable[[Path], object] = lambda file: None) -> Callable[[Path], None]:
    """A manifest that lists one more file, by this name; ``make`` makes it."""

    def change(run: Path) -> None:
        folder = run / "checkpoints" / "step-000002"
        make(folder / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": 0, "sha256": "0"}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def linked(name: str) -> Callable[[Path], None]:
    """A part of the run that is a link to something outside of it, which must survive."""

    def change(run: Path) -> None:
        outside = run.parent / f"outside-{Path(name).name}"
        if (run / name).exists():
            (run / name).rename(outside)
        else:
            outside.write_text("somebody's")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(outside)

    return change


def emptied_pipe(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


RUNS: dict[str, Callable[[Path], object]] = {
    "no recipe": lambda run: (run / "recipe.toml").unlink(),
    "truncated recipe": cut("recipe.toml", 30),
    "another recipe": put("recipe.toml", b"\xff"),
    "metrics torn in the middle": put("metrics.jsonl", b'{"step": 1, "re\n{"step": 2}\n'),
    "metrics of another type": put("metrics.jsonl", b"3\n4\n"),
    "metrics without steps": put("metrics.jsonl", b"{}\n{}\n"),
    "metrics with other steps": put("metrics.jsonl", b'{"step": "one"}\n'),
    "a pickle in a checkpoint": pickled_state,
    "half a state": foreign_state,
    "draws as text": counters(draws="many"),
    "draws below zero": counters(draws=-1),
    "draws beyond any run": counters(draws=1e30),
    "no draws": counters(draws=None),
    "fewer draws than steps": counters(draws=1),
    "best step as text": counters(best=1.0, best_step="x"),
    "a manifest without files": lambda run: edit("manifest.json", files={})(run / "checkpoints" / "step-000002"),
    "a manifest with a device": listed("/dev/zero"),
    "a manifest with a pipe": listed("pipe", os.mkfifo),
    "a manifest that leads out": listed("../../recipe.toml"),
    "metrics that are a pipe": emptied_pipe,
    "a model elsewhere": linked("model"),
    "rollouts elsewhere": linked("rollouts"),
    "checkpoints elsewhere": linked("checkpoints"),
    "metrics elsewhere": linked("metrics.jsonl"),
    "a half-written recipe elsewhere": linked("recipe.toml.partial"),
    "half-written rollouts elsewhere": linked("rollouts/step-000003.jsonl.partial"),
    "a format of two lines": lambda run: edit("manifest.json", format="1\n2")(run / "checkpoints" / "step-000002"),
    "every checkpoint damaged": lambda run: [f.write_text("") for f in run.glob("checkpoints/*/state.json")],
}


def contents_of(path: Path) -> dict[Path, bytes]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {file: file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize("kind", RUNS)
def test_runs(kind: str, delta: Delta, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    RUNS[kind](run)
    outside = {path: contents_of(path) for path in tmp_path.glob("outside-*")}
    code, said = delta("train", "--resume", "--run-dir", run, "--backend", "fake", "--quiet")
    lines = said.splitlines()
    warned = [line for line in lines if line.startswith("!")]  # damaged checkpoints are named first
    assert_refused((code, "".join(f"{line}\n" for line in lines[len(warned) :])))
    assert not (run / "trace").exists()
    assert {path: contents_of(path) for path in tmp_path.glob("outside-*")} == outside


ROLLOUTS = "rollouts/step-000001.jsonl.gz"

RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON in the rollouts": (put(ROLLOUTS, gzip.compress(b"xxx\n")), "inspect"),
    "rollouts without keys": (put(ROLLOUTS, gzip.compress(b"{}\n")), "inspect"),
    "rollouts of other types": (put(ROLLOUTS, gzip.compress(b'{"group": "x", "problem": 3}\n')), "inspect"),
    "rollouts to replay without keys": (put(ROLLOUTS, gzip.compress(b"{}\n")), "parity"),
    "evaluations without a step": (put("evaluations.jsonl", b"{}\n"), "report"),
    "evaluations of other types": (put("evaluations.jsonl", b'{"accuracy": "x", "step": 1}\n'), "report"),
    "no weights to export": (lambda run: [file.unlink() for file in run.rglob("*.safetensors")], "export"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_records(kind: str, delta: Delta, finished: Path, tmp_path: Path) -> None:
    change, command = RECORDS[kind]
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    change(run)
    more = {
        "report": ["--output", tmp_path / "page.html"],
        "parity": ["--backends", "fake,fake"],
        "export": [tmp_path / "out"],
    }
    step = ["--step", "1"] if command == "inspect" else []
    assert_refused(delta(command, run, *more.get(command, []), *step))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", ["null", "[1]", '"one"'])
def test_metrics_without_a_number_of_a_step_are_listed(step: str, delta: Delta, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    assert delta("runs", tmp_path)[0] == 0
