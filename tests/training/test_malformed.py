"""For any malformed file the command line prints one line and exits with code 2; it opens no pickle."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.recipe import to_toml
from delta_cli.training import setup
from tests.harness import make_recipe, train
from tests.training.malformed import FUZZ, Delta, assert_refused

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


def test_a_recipe_without_an_end(delta: Delta) -> None:
    if Path("/dev/zero").exists():
        assert_refused(delta("train", "/dev/zero"), "more than 10,000,000 bytes")
