"""What the documents say is true: commands print what they show, examples run, links and keys exist."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import typer.main

from delta_cli.cli import app
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, key_reference, parse_recipe
from delta_cli.recipe.other_trainers import TRAINERS
from delta_cli.rewards import math_reward
from delta_cli.rewards.code.sandbox import find_sandbox
from delta_cli.study.plan import StudyFile

from .documents import DOCS, DOCUMENTS, ROOT, Block, blocks, prose, run, shows

NEEDS = {
    "tutorial.md": ("torch", "transformers"),
    "mac.md": ("mlx", "mlx_lm"),
    "trainer.md": ("torch",),
    "trl.md": ("trl",),
}
SLOW = {"scale.md", "paper_hours.md"}  # generated pages with thousands of plans
KEYS = {key.name for key in key_reference()}
SUFFIXES = {"json", "jsonl", "toml", "md", "py", "safetensors"}
MARKS = {
    "tutorial.md": (pytest.mark.long,),
    "trl.md": (
        pytest.mark.long,
        *(pytest.mark.filterwarnings(f"ignore:::{name}") for name in ("trl", "transformers", "torch")),
    ),
}
RUN = [
    pytest.param(path, marks=MARKS.get(path.name, ()))
    for path in DOCS
    if any(block.language in ("console", "python") for block in blocks(path))
]


@pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)
def test_commands_and_examples_do_what_the_document_shows(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(document.name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{document.name} is about {package}, which is not installed")
    if document.name == "code_reward.md" and not os.environ.get("CI"):
        try:
            find_sandbox()
        except UserError as error:
            pytest.skip(f"no sandbox, bubblewrap is not installed or does not work: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run(document, tmp_path)


def check_generated(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))  # as for a script in this folder
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    assert set(pages) > SLOW
    for name, generated in pages.items():
        if (name in SLOW) == slow:
            committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
            assert committed == generated(), f"run: python docs/generate.py, then look at docs/{name}"


def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    check_generated(False, monkeypatch)


@pytest.mark.long
def test_the_pages_of_plans_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    check_generated(True, monkeypatch)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if not re.match(r"\w+:", target):
            name, _, anchor = target.partition("#")
            file = document.parent / name if name else document
            assert file.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{document.name} links to {target}"


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda path: path.name
)
def test_files_that_are_named_exist(document: Path) -> None:
    folders = "delta_cli|backends|benchmarks|tests|docs|examples|recipes"
    for name in re.findall(
        rf"(?<![\w/.])((?:{folders})/[\w./]*\w\.(?:py|toml|json|md))\b", document.read_text("utf-8")
    ):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_document_is_in_the_index_and_on_the_site() -> None:
    """Once each, in the same groups and the same order."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    groups = {
        part.partition("\n")[0]: re.findall(r"^\| \[[^\]]+\]\((\S+)\)", part, re.M) for part in text.split("\n## ")[1:]
    }
    index = {name: [os.path.normpath(f"docs/{page}") for page in pages] for name, pages in groups.items() if pages}
    site = re.findall(r"^ +- (\w+):(.*?)(?=^ +- \w+:|\Z)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M | re.S)
    navigation = {name: re.findall(r"[\w/]+\.md", pages) for name, pages in site}
    assert navigation.pop("delta") == ["README.md"]
    assert navigation.pop("Documents") == ["docs/README.md"]
    assert navigation == {name: [page for page in pages if page.endswith(".md")] for name, pages in index.items()}
    listed = [page for pages in index.values() for page in pages]
    written = {path.relative_to(ROOT).as_posix() for path in DOCS} - {"docs/README.md"}
    assert len(listed) == len(set(listed))
    assert written <= set(listed)


def test_what_adding_names_is_in_the_files() -> None:
    """In docs/adding.md's table, each name after a file is in that file."""
    cells = re.findall(r"`([\w/]+\.py)`: ([^|]*)", (ROOT / "docs" / "adding.md").read_text(encoding="utf-8"))
    names = [(file, name) for file, cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 10
    for file, name in names:
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8")), f"{file} has no {name}"


def test_the_verifiers_examples_are_judged_as_the_page_says() -> None:
    """Each row of docs/verifier.md's first table: a gold answer, refused answers, accepted answers."""
    _, _, table = (ROOT / "docs" / "verifier.md").read_text(encoding="utf-8").partition("| gold | refused | accepted |")
    rows = table.partition("\n\n")[0].split("\n")[2:]
    assert len(rows) >= 10
    for row in rows:
        (gold,), *answers = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split(" | "))
        for right, texts in enumerate(answers):
            assert [math_reward(rf"\boxed{{{text}}}", gold) for text in texts] == [right] * len(texts), row


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_readmes_example_runs() -> None:
    """Four responses of two tokens to one prompt, two of them right; the second token tells the sides apart."""
    right, wrong = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    logp = np.full(8, np.log(0.5))
    names = {"rewards": [1.0, 1.0, 0.0, 0.0], "groups": [0, 0, 0, 0], "starts": [0, 2, 4, 6, 8], "logp": logp}
    names |= {"hidden": np.array(right + right + wrong + wrong), "logp_old": logp}
    (example,) = (block for block in blocks(ROOT / "README.md") if block.language == "python")
    exec(example.text, names)
    np.testing.assert_allclose(names["credit"].weights.mean(), 1.0, rtol=1e-12)
    assert (names["credit"].weights[1::2] > names["credit"].weights[::2]).all()
    assert (np.sign(names["slope"]) == [-1, -1, -1, -1, 1, 1, 1, 1]).all()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_recipe_keys_exist(document: Path) -> None:
    named = [name for span in re.findall(r"`([^`\n]+)`", prose(document)) for name in keys_in(span)]
    for command in commands(document):
        named += [value.partition("=")[0] for value in re.findall(r"--set[ =](\S+)", command)]
    theirs = {alias.theirs for aliases in TRAINERS.values() for alias in aliases}
    for name in set(named) - (theirs if document.name == "coming_from.md" else set()):
        of_a_table = name.startswith("data.sources.")  # a name that the reader chooses follows
        known = any(key == name or key.startswith(f"{name}.") for key in KEYS)
        assert known or of_a_table, f"{document.name}: no key {name}"


def keys_in(text: str) -> list[str]:
    """What looks like a recipe's key in a piece of text."""
    sections = "|".join(Recipe.model_fields)
    found = re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-z_0-9]+)+(?![\w(])", text)
    return [name for name in found if name.rpartition(".")[2] not in SUFFIXES]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_recipe_fragments_load(document: Path) -> None:
    for block in blocks(document):
        if block.language == "toml":
            table = tomllib.loads(block.text)
            table.pop("extends", None)
            if "arms" in table:
                StudyFile.model_validate(table)
            elif "benchmarks" not in table:
                parse_recipe(table, f"{document.name}, line {block.line}")


def commands(document: Path) -> list[str]:
    """Every ``delta`` command in a document's blocks, those apart that are shown for the mistake in them."""
    text = "\n".join(block.text.replace("\\\n", " ") for block in blocks(document))
    return re.findall(r"^(?:\$ )?(?:\.venv/bin/)?(delta [a-z].*)$(?!\ndelta: )", text, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_exist(document: Path) -> None:
    for line in commands(document):
        command, arguments = typer.main.get_command(app), shlex.split(line.partition(" > ")[0], comments=True)[1:]
        while hasattr(command, "commands"):
            assert arguments[0] in command.commands, f"{document.name}: {line}"
            command = command.commands[arguments.pop(0)]
        command.make_context("delta", arguments)


def test_the_matcher_can_fail() -> None:
    printed = "step 1/6  reward 0.297  1,524 tokens/s\ndone\n"
    assert shows("step 1/6 reward 0.5  3 tokens/s\n...", printed.replace("1,524", "3"))
    assert shows("step 1/6  reward 0.297  9,999 tokens/s\n...", printed)
    assert not shows("step 2/6  reward 0.297  1,524 tokens/s\n...", printed)
    assert not shows("step 1/6  reward 0.297  1,524 tokens/s", printed)
    assert not shows("", printed)
    assert Block("console", "$ a \\\n  b\nc\n$ d\n", 1).commands() == [("a    b", "c\n"), ("d", "")]
