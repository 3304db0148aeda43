"""For any malformed file the command line prints one line and exits with code 2; it opens no pickle."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_cli.cli import main
from delta_cli.recipe import to_toml
from delta_cli.training import setup
from tests.harness import make_recipe, train

Delta = Callable[..., tuple[int, str]]

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def delta(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Delta:
    """Run ``delta`` in this process and return its exit code and standard error, with what libraries wrote there."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the test's own handlers

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["delta", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
        except SystemExit as error:
            return int(error.code or 0), capfd.readouterr().err
        return 0, capfd.readouterr().err

    return call


def assert_refused(result: tuple[int, str], *words: str) -> None:
    code, said = result
    assert code == 2, said
    assert said.startswith("delta: "), said
    assert said.endswith("\n"), said
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    for word in words:
        assert word in said


# ------------------------------------------------------------------------------------------- recipes

RECIPES: dict[str, bytes] = {
    "truncated": b"[run]\nste",
    "not UTF-8": b"[run]\nsteps = 1 # \xff\xfe",
    "UTF-16": "[run]\nsteps = 1".encode("utf-16"),
    "binary": bytes(range(256)),
    "wrong type": b"run = 3",
    "deep": b"a = " + b"[" * 100_000,
    "huge number": b"run.steps = 1" + b"0" * 5000,
    "extends a number": b"extends = 3",
    "extends nothing": b'extends = "nowhere.toml"',
    "extends a folder": b'extends = "."',
    "NUL in extends": b'extends = "a\\u0000b"',
    "two tables": b"[run]\n[run]\n",
    "greedy samples": b"evaluation = {temperature = 0.0, samples = 4}",
    "NUL in a path": b'model.path = "a\\u0000b"',
}


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes(kind: str, delta: Delta, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(RECIPES[kind])
    arguments = [] if "NUL" in kind else ["--dry-run"]
    assert_refused(delta("train", file, "--backend", "fake", "--run-dir", tmp_path / "run", *arguments))


def test_a_folder_as_a_recipe(delta: Delta, tmp_path: Path) -> None:
    assert_refused(delta("train", tmp_path, "--dry-run"), str(tmp_path))


@FUZZ
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_as_a_recipe(content: bytes, delta: Delta, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(content)
    result = delta("train", file, "--dry-run")
    if result[0]:
        assert_refused(result)


# ---------------------------------------------------------------------------------------------- data

DATA: dict[str, tuple[str, bytes]] = {
    "truncated JSON": ("p.json", b'[{"question": "1+1", "answer": "2"}, {"que'),
    "truncated line": ("p.jsonl", b'{"question": "1+1", "answer": "2"}\n{"que'),
    "not UTF-8": ("p.jsonl", b'{"question": "\xff", "answer": "2"}\n'),
    "UTF-16": ("p.csv", "question,answer\n1+1,2\n".encode("utf-16")),
    "not records": ("p.json", b"[1, 2, 3]"),
    "not a list": ("p.json", b'{"question": "1+1"}'),
    "no such column": ("p.jsonl", b'{"prompt": "1+1", "answer": "2"}\n'),
    "empty": ("p.jsonl", b""),
    "empty csv": ("p.csv", b""),
    "NUL": ("p.csv", b"question,answer\n\x00\x00,2\n"),
    "deep": ("p.json", b"[" * 100_000),
    "huge number": ("p.jsonl", b'{"question": "1+1", "answer": 1' + b"0" * 10_000 + b"}\n"),
    "no answers": ("p.jsonl", b'{"question": "1+1", "answer": null}\n' * 3),
    "one problem": ("p.jsonl", b'{"question": "1+1", "answer": "2"}\n'),
    "damaged gzip": ("p.jsonl.gz", gzip.compress(b'{"question": "1+1", "answer": "2"}\n' * 99)[:-12]),
    "not gzip": ("p.jsonl.gz", b"plain"),
    "not Parquet": ("p.parquet", b"PAR1 not really"),
    "unknown kind": ("p.xlsx", b"PK"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data(kind: str, delta: Delta, model: Path, tmp_path: Path) -> None:
    name, content = DATA[kind]
    (tmp_path / name).write_bytes(content)
    assert_refused(train_on(delta, model, tmp_path, tmp_path / name))


def train_on(delta: Delta, model: Path, folder: Path, data: Path) -> tuple[int, str]:
    recipe = folder / "recipe.toml"
    changes = {"data__source": str(data), "data__template": "plain", "data__limit": None, "data__held_out": 0.5}
    recipe.write_text(to_toml(make_recipe(model, run__steps=1, rollout__max_tokens=2, **changes)))
    shutil.rmtree(folder / "run", ignore_errors=True)
    return delta("train", recipe, "--backend", "fake", "--run-dir", folder / "run", "--quiet")


def test_an_empty_folder_as_data(delta: Delta, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(train_on(delta, model, tmp_path, tmp_path / "empty"))


@FUZZ
@given(
    content=st.binary(max_size=100)
    | st.lists(
        st.dictionaries(
            st.sampled_from(["question", "answer", "x"]),
            st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.text(max_size=2)),
        ),
        max_size=4,
    ).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
)
def test_any_bytes_as_data(content: bytes, delta: Delta, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_bytes(content)
    code, said = train_on(delta, model, tmp_path, file)
    if code:
        assert_refused((code, said))


# ------------------------------------------------------------------------------------------- a model


class Evil:
    """An object whose pickle runs a command when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    return change


def put(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def pickled_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "trace")))


def pickle_in_disguise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil(folder / "trace")))


def own_code(folder: Path) -> None:
    edit(
        "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    )(folder)
    (folder / "mine.py").write_text(f"open({str(folder / 'trace')!r}, 'w')\n")


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def first_number(value: float) -> Callable[[Path], None]:
    return weights(lambda stored: stored["model.norm.weight"].__setitem__(0, value))


MODELS: dict[str, Callable[[Path], object]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "truncated config": cut("config.json", 40),
    "config of another type": put("config.json", b"[1, 2]"),
    "config not UTF-8": put("config.json", b'{"a": "\xff"}'),
    "deep config": put("config.json", b"[" * 100_000),
    "config without sizes": put("config.json", b'{"model_type": "qwen3", "eos_token_id": 0}'),
    "sizes as text": edit("config.json", hidden_size="many"),
    "other sizes": edit("config.json", hidden_size=32),
    "more layers": edit("config.json", num_hidden_layers=3),
    "NaN in the weights": first_number(float("nan")),
    "infinity in the weights": first_number(float("inf")),
    "a weight of no layer": weights(
        lambda stored: stored.update({"model.layers.7.x.weight": stored["model.norm.weight"]})
    ),
    "another architecture": edit("config.json", model_type="llama", architectures=["LlamaForCausalLM"]),
    "another vocabulary": edit("config.json", vocab_size=300),
    "an end outside the vocabulary": put("generation_config.json", b'{"eos_token_id": [0, 9999]}'),
    "unknown type": edit("config.json", model_type="abacus", architectures=["Abacus"]),
    "own code": own_code,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "truncated tokenizer": cut("tokenizer.json", 100),
    "tokenizer of another type": put("tokenizer.json", b"{}"),
    "tokenizer not UTF-8": put("tokenizer.json", b"\xff\xfe"),
    "tokenizer config of another type": put("tokenizer_config.json", b"3"),
    "deep tokenizer config": put("tokenizer_config.json", b"[" * 100_000),
    "no template": put("tokenizer_config.json", b'{"eos_token": "<|endoftext|>"}'),
    "template of another type": edit("tokenizer_config.json", chat_template=[{"name": "default"}]),
    "broken template": edit("tokenizer_config.json", chat_template="{% for %}"),
    "a template of nothing": edit("tokenizer_config.json", chat_template="{# nothing #}"),
    "a template without an end": edit(
        "tokenizer_config.json", chat_template="{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
    ),
    "a template of all memory": edit("tokenizer_config.json", chat_template="{{ 'a' * 20000000000 }}"),
    "hostile template": edit("tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty weights": cut("model.safetensors", 0),
    "truncated weights": cut("model.safetensors", 5000),
    "a header of an exabyte": put("model.safetensors", struct.pack("<Q", 10**18) + b"{}"),
    "pickled weights alone": pickled_only,
    "a pickle in place of safetensors": pickle_in_disguise,
}


@pytest.mark.parametrize("backend", ["fake", "cpu", "mlx"])
@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str, backend: str, delta: Delta, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    MODELS[kind](folder)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(make_recipe(folder, run__steps=1)))
    run = ["train", recipe, "--backend", backend, "--run-dir", tmp_path / "run", "--quiet"]
    assert_refused(delta(*run), *(["code of its own"] if kind == "own code" and backend == "cpu" else []))
    assert not (folder / "trace").exists(), "code in the model's folder was run"


# ------------------------------------------------------------------------------------ a run to resume


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


def test_a_second_run_in_a_new_folder_is_refused(delta: Delta, model: Path, tmp_path: Path) -> None:
    """Even if the first one begins and ends after the command line has looked at the folder."""
    run, recipe = tmp_path / "run", make_recipe(model, run__steps=1, rollout__max_tokens=4)
    (tmp_path / "mine.toml").write_text(to_toml(recipe))

    def first(*arguments: Any) -> Any:
        patch.undo()
        train(recipe, run)
        return setup.load_data(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "load_data", first)
        result = delta("train", tmp_path / "mine.toml", "--backend", "fake", "--run-dir", run, "--quiet")
    assert_refused(result, "holds a run already", "--resume")
    assert (run / "model" / "delta.json").exists()
    assert len(list(run.glob("checkpoints/*"))) == 1
    assert not (run / "end.json").exists(), "the second run touches nothing"


def test_more_held_out_than_there_is(delta: Delta, model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(make_recipe(model, data__held_out=0.999999)))
    result = delta("train", recipe, "--backend", "fake", "--run-dir", tmp_path / "run", "--quiet")
    assert_refused(result, "data.held_out = 0.999999", "none to train on")


# ---------------------------------------------------------------------------- records of a finished run

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


def test_a_recipe_without_an_end(delta: Delta) -> None:
    if Path("/dev/zero").exists():
        assert_refused(delta("train", "/dev/zero"), "more than 10,000,000 bytes")
