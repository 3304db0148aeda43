"""Any recipe, data set, model folder or run folder is used, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends import registry
from backends.interface import BackendError
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.data import chat_template
from delta_cli.data.filters import Filter
from delta_cli.data.loading import load_problems
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe, to_toml
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.document import toml_value
from delta_cli.rewards.verifiers import check_answers
from delta_cli.runs import checkpoint
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.text import visible

ONE_LINE = (UserError, BackendError)
KEYS = sorted(
    f"{section}.{key}"
    for section, table in Recipe.model_json_schema()["$defs"].items()
    for key in table.get("properties", {})
)
SECTIONS = sorted(Recipe.model_fields)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["", "\0", "\ud800", "a\nb", "../..", "/", "~", "1e999", "nan", "{", "[", '"', "fake", "code", "chat"]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def refused_in_one_line(action: Callable[[], Any]) -> Any:
    """The action's result, or None if it is refused with an error of one line."""
    try:
        return action()
    except ONE_LINE as error:
        if not str(error).strip() or "\n" in str(error):
            raise AssertionError(f"not one line: {str(error)!r}") from error
        return None


def toml(value: Any) -> str:
    """A value in TOML, or in something close to it."""
    return json.dumps(value) if not isinstance(value, float) else repr(value)


# ------------------------------------------------------------------------------------ recipes and overrides


@given(
    st.lists(st.tuples(st.sampled_from([*KEYS, *SECTIONS, "extends"]), JSON), max_size=5),
    st.sampled_from(["", "extends = 'quickstart.toml'\n", 'extends = "\\u0000"\n', "[run]\n", "[[data]]\n"]),
    st.binary(max_size=20),
)
def test_recipes(pairs: list[tuple[str, Any]], start: str, end: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        lines = "\n".join(f"{key} = {toml(value)}" for key, value in pairs)
        file.write_bytes((start + lines + "\n").encode(errors="surrogatepass") + end)
        recipe = refused_in_one_line(lambda: load_recipe(file))
        if recipe is not None:
            file.write_text(to_toml(recipe))
            assert load_recipe(file) == recipe


# A former name of a key is no mistake.
@pytest.mark.filterwarnings("ignore::delta_cli.errors.RenamedWarning")
@given(
    st.lists(st.sampled_from([*KEYS, *SECTIONS, "x", ""]), max_size=3),
    st.lists(JSON | st.text(max_size=20), max_size=3),
)
def test_overrides(names: list[str], values: list[Any]) -> None:
    section = [name.split(".")[-1] for name in names]
    overrides = [
        f"{SECTIONS[len(name) % len(SECTIONS)]}.{name}={value}" for name, value in zip(section, values, strict=False)
    ]
    overrides += [f"{name}={toml(value)}" for name, value in zip(names, values, strict=False)]
    refused_in_one_line(lambda: load_recipe(None, overrides))


# ------------------------------------------------------------------------------------------------- data

ROWS = st.lists(st.dictionaries(st.sampled_from(["question", "answer", "level", "x"]), JSON, max_size=4), max_size=5)


@given(ROWS, st.binary(max_size=20), st.sampled_from([".jsonl", ".json", ".csv", ".jsonl.gz", ".parquet", ".txt"]))
def test_data(rows: list[Any], noise: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"data{suffix}"
        content = json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
        file.write_bytes(content.encode() + noise)
        tokenizer = Tokenizer.load(model_path("tiny-base"))
        loaded = refused_in_one_line(
            lambda: load_problems(DataSection(source=str(file), template="plain"), 0, tokenizer, 50)
        )
        if loaded is not None:
            for kind in ("math", "code"):
                refused_in_one_line(lambda kind=kind: check_answers(kind, loaded.problems))  # type: ignore[misc]


WORDS = st.sampled_from(
    ["level", "x", "a.b", "3", "-", "not ", " and ", " or ", ">", "==", " in ", "[", "]", "(", ")", "'q'", ","]
)


@given(
    st.lists(WORDS, max_size=12).map("".join) | st.text(max_size=20),
    st.dictionaries(st.sampled_from(["level", "x", "a"]), JSON),
)
def test_filters(text: str, row: dict[str, Any]) -> None:
    refused_in_one_line(lambda: Filter(text)(row))


# ------------------------------------------------------------------------------------- folders of models

EDITS = st.tuples(
    st.sampled_from(
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    ),
    st.sampled_from(["key", "cut", "bytes", "gone"]),
    st.text(max_size=8)
    | st.sampled_from(["hidden_size", "vocab_size", "eos_token_id", "model_type", "num_hidden_layers"]),
    JSON,
    st.integers(0, 2000),
)


def damage(folder: Path, edit: tuple[str, str, str, Any, int]) -> None:
    """Damage a file of a folder: change a key, cut it, overwrite bytes or delete it."""
    name, kind, key, value, place = edit
    file = folder / name
    if not file.is_file():
        return
    content = file.read_bytes()
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[:place])
    elif kind == "bytes":
        file.write_bytes(content[:place] + json.dumps(value).encode() + content[place + 3 :])
    elif content.startswith(b"{") and content.rstrip().endswith(b"}"):  # not damaged by another edit
        file.write_bytes(content.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}".encode())


@given(st.lists(EDITS, min_size=1, max_size=2))
@example([("config.json", "key", "num_hidden_layers", 10**9, 0)])  # used to need 18 GB for the names of the weights
def test_models(edits: list[tuple[str, str, str, Any, int]]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        shutil.copytree(model_path("tiny-base"), folder)
        for edit in edits:
            damage(folder, edit)
        tokenizer = refused_in_one_line(lambda: Tokenizer.load(str(folder)))
        if tokenizer is None:  # a run loads it first
            return
        refused_in_one_line(lambda: tokenizer.chat("1+1=?"))
        backend = refused_in_one_line(lambda: registry.create("fake", BackendSettings.of(str(folder))))
        if backend is not None:
            backend.close()


TEMPLATE = st.sampled_from(
    [
        *(
            "{% for a in range(9999) %}",
            "{% for a in messages[0].content %}",
            "{% endfor %}",
            "{{ messages[0].content }}",
        ),
        *("{{ 'a' * 20000000000 }}", "{% set n = 10 ** 10 %}", "{{ 'a' * n }}", "{{ 'a' | center(n) }}", "{# #}", "{%"),
        *("{% if a %}", "{% endif %}", "{{ messages | tojson }}", "{{ raise_exception('no') }}", "{{ ''.__class__ }}"),
    ]
)


@settings(max_examples=60 if os.environ.get("DELTA_FUZZ") else 5)
@given(st.lists(TEMPLATE, max_size=7).map("".join))
def test_chat_templates(template: str) -> None:
    """Whatever a template does, it is refused or renders soon: it is tried in a process with limits."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(model_path("tiny-base"), Path(parent) / "model"))
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.load(str(folder))
        started = time.process_time()
        text = refused_in_one_line(lambda: tokenizer.chat("1+1=?"))
        assert time.process_time() - started < 2 * chat_template.SECONDS
        assert text is None or len(text) <= chat_template.CHARACTERS


@given(st.text(st.characters(codec=None), max_size=30))
def test_names_in_a_terminal(name: str) -> None:
    """Control characters and direction marks of names and messages are shown, not sent."""
    for shown in (visible(name), visible(str(UserError(name))), toml_value(name)):
        assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


# --------------------------------------------------------------------------------- checkpoints and runs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two files."""
    root = tmp_path_factory.mktemp("checkpoints")

    def write(folder: Path) -> dict[str, str]:
        (folder / "model.safetensors").write_bytes(b"weights")
        return {}

    checkpoint.save(root, checkpoint.State(2, 2), "recipe", write)
    return root


CHECKPOINT_EDITS = st.tuples(
    st.sampled_from(["manifest.json", "state.json", "recipe.toml", "model.safetensors"]),
    st.sampled_from(["key", "cut", "bytes", "gone"]),
    st.sampled_from(["format", "files", "step", "draws", "x"]),
    JSON,
    st.integers(0, 200),
)


@given(edits=st.lists(CHECKPOINT_EDITS, min_size=1, max_size=2))
def test_checkpoints(saved: Path, edits: list[tuple[str, str, str, Any, int]]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        root = Path(parent) / "checkpoints"
        shutil.copytree(saved, root)
        for edit in edits:
            damage(root / "step-000002", edit)
        problem = checkpoint.check(root / "step-000002")
        assert problem is None or "\n" not in problem
        found, damaged = checkpoint.find(root)
        assert (found is None) == (problem is not None) == bool(damaged)


COUNTERS = st.dictionaries(st.sampled_from(["step", "draws", "data", "inputs", "best", "best_step"]), JSON, max_size=4)


@given(COUNTERS)
@example({"draws": -1})
@example({"draws": 1e30})
@example({"draws": None})
@example({"best": 1.0, "best_step": "x"})
def test_resealed_counters(saved: Path, changes: dict[str, Any]) -> None:
    """Whoever can edit a checkpoint can compute its checksums too."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(saved, Path(parent) / "checkpoints")) / "step-000002"
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | changes))
        (folder / "manifest.json").unlink()
        checkpoint._seal(folder, {})
        problem = checkpoint.check(folder)
        assert problem is None or "\n" not in problem
        if problem is None:
            found = checkpoint.read_state(folder)
            assert type(found.step) is type(found.draws) is int
            assert 0 <= found.step <= found.draws <= checkpoint.MOST


LISTED = st.sampled_from(["/dev/zero", "/dev/full", "pipe", "..", "../..", ".", "", "\0", "link", "folder"]) | st.text(
    max_size=6
)


@given(st.lists(LISTED, max_size=3), st.booleans())
def test_manifests(saved: Path, names: list[str], whole: bool) -> None:
    """A manifest may name devices, pipes and links; none of them is read, which could take for ever."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(saved, Path(parent) / "checkpoints")) / "step-000002"
        os.mkfifo(folder / "pipe")
        (folder / "folder").mkdir()
        (folder / "link").symlink_to("/dev/zero")
        manifest = json.loads((folder / "manifest.json").read_text())
        kept = manifest["files"] if whole else {}
        manifest["files"] = kept | {name: {"bytes": 0, "sha256": "0"} for name in names}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        problem = checkpoint.check(folder)
        assert (problem is None) == (whole and not names)
        assert problem is None or "\n" not in problem


PARTS = ["recipe.toml", "recipe.toml.partial", "metrics.jsonl", "end.json", ".lock", "rollouts", "checkpoints", "model"]
PARTS += ["rollouts/step-000001.jsonl.gz", "checkpoints/step-000001", "model/config.json", "anything"]


@given(st.sets(st.sampled_from(PARTS), min_size=1, max_size=3), st.booleans())
def test_links_out_of_a_run(parts: set[str], folders: bool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        outside, run = Path(parent) / "outside", Path(parent) / "run"
        outside.mkdir()
        (outside / "file").write_text("somebody's")
        for part in sorted(parts):
            if not (run / part).parent.is_symlink():
                (run / part).parent.mkdir(parents=True, exist_ok=True)
                (run / part).symlink_to(outside if folders else outside / "file")
        with pytest.raises(UserError, match="is a symbolic link") as error:
            RunFolder(run).hold()
        assert "\n" not in str(error.value)
        assert [file.read_text() for file in outside.iterdir()] == ["somebody's"]


@given(st.lists(JSON, max_size=4), st.binary(max_size=12), st.lists(st.text(max_size=8), max_size=2))
def test_records(lines: list[Any], noise: bytes, strays: list[str]) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = RunFolder(Path(parent))
        folder.rollouts.mkdir()
        for stray in strays:
            if stray and not {"/", "\0"} & set(stray):
                (folder.rollouts / f"step-{stray}.jsonl.gz".encode(errors="replace").decode()).touch()
        folder.metrics.write_bytes("\n".join(map(json.dumps, lines)).encode() + noise)
        refused_in_one_line(lambda: list(read_lines(folder.metrics)))
        refused_in_one_line(lambda: folder.begin("recipe", 2))
