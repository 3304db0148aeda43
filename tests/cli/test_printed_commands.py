"""Every command that the program prints works when it is typed as printed, in the same folder.

The source is searched for printed commands, so that a new one needs a row here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_cli.cli import ORDER
from delta_cli.runs.stop_signal import StopSignal
from tests.command import Said, delta

ROOT = Path(__file__).parents[2]
TINY = ("--set", "run.steps=1", "--set", "rollout.prompts=4", "--set", "rollout.responses=4", "--set", "data.limit=60")
SMALL = (*TINY, "--set", "evaluation.problems=4", "--set", "rollout.batch=16", "--set", "rollout.max_tokens=8")
FAKE = ("--backend", "fake")
TRAIN = ("train", *FAKE, "--quiet", *SMALL)
ALSO = {
    "train": (*FAKE, *SMALL),
    "doctor": (*FAKE, *SMALL, "--seconds", "1"),
    "eval": (*FAKE, "--limit", "2", "--max-tokens", "4"),
    "data": (*FAKE, *SMALL, "--samples", "1"),
}
FILLED = {
    "FILE": "my sums.jsonl",
    "DIR": "my runs",
    "RECIPE": "mine.toml",
}  # what a person puts for the placeholders of a message

# What is typed, the command that the program then prints, and the exit code of what was typed.
PRINTED: list[tuple[tuple[str, ...], str, int]] = [
    (("init", "--data", "my sums.jsonl", "--model", "tiny-base", "--out", "new one.toml"), "doctor 'new one.toml'", 0),
    (("init", "--data", "my sums.jsonl", "--model", "tiny-base", "--out", "new two.toml"), "train 'new two.toml'", 0),
    (("eval", "my runs/a", *ALSO["eval"]), "inspect 'my runs/a/evaluations/held_out", 0),
    (("recipe", "list"), "recipe show quickstart", 0),
    (("recipe", "explain", "foo"), "recipe keys", 2),
    (("runs", "absent"), "runs DIR", 2),
    (("runs", "folder"), "runs DIR", 2),
    (("train", "--set", "rollout=4"), "recipe keys rollout", 2),
    (("train", "broken.toml"), "recipe show", 2),
    (("train", "my sums.jsonl"), "init --data 'my sums.jsonl'", 2),
    (("train", "my runs/a"), "train --resume --run-dir 'my runs/a'", 2),
    (("train", "my runs/a/model"), "init --data FILE --model 'my runs/a/model'", 2),
    (("train", "my study.toml"), "study 'my study.toml'", 2),
    (("study", "mine.toml"), "train mine.toml", 2),
    (("study", "mine.toml"), "study mine.toml --grid update.learning_rate=1e-4,5e-4", 2),
    (("compare", "my runs/never", "my runs/a"), "eval 'my runs/never' --data FILE", 2),
    (("train", *FAKE, "--set", "data.source=my sums.jsonl", "--set", "data.pass_rate_file=a"), "data rate RECIPE", 2),
    (
        ("data", "rate", "mine.toml", *FAKE, *SMALL, "--set", "rollout.max_tokens=24", "--out", "rated"),
        "train mine.toml",
        0,
    ),
    (("train", "--nonsense"), "train --help", 2),
    (("eval",), "eval --help", 2),
    ((*TRAIN, "--run-dir", "my runs/stopped"), "train --resume --run-dir 'my runs/stopped' --backend fake", 130),
]

# Commands with an argument that the message cannot know, and names of commands in a sentence, such as "a folder that
# delta train wrote". test_init runs the last ones that delta init prints.
MENTIONED = {
    ("train", "train starts on this machine", "train wrote", "train --processes N", "train sets if --fit is given"),
    (
        "eval",
        "eval wrote",
        "eval --suite",
        "data rate",
        "inspect",
        "init",
        "recipe",
        "study",
        "train NAME",
        "study NAME",
    ),
    ("doctor says what needs how much", "doctor RUN shows the gap of every step", "report {}", "export {} {}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a person who likes spaces: data, a recipe, a study, a run, and a run without evaluations."""
    made = tmp_path_factory.mktemp("my folder")
    rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a in range(10, 22) for b in range(10, 22)]
    (made / "my sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "mine.toml").write_text("[run]\nsteps = 1\n")
    (made / "broken.toml").write_text("[run\n")
    (made / "my study.toml").write_text(
        'name = "s"\nrecipe = "mine.toml"\n[[arms]]\nname = "a"\n[[arms]]\nname = "b"\n'
    )
    (made / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for name in ("a", "never"):
            assert delta(*TRAIN, "--run-dir", f"my runs/{name}").code == 0
        for file in (made / "my runs/never/evaluations").glob("*"):
            raise AssertionError(f"{file}: the run that nobody evaluated holds an evaluation")
    return made


COMMAND = re.compile(rf"(?<![\w./'-])delta ((?:{'|'.join(ORDER)})(?: (?:'[^']*'|[^\s;()`'?]*[^\s;()`'?,.]))*)")


def printed(said: Said) -> Iterator[str]:
    """The commands in what a command printed, without ``delta``: each up to punctuation or two spaces."""
    for match in COMMAND.finditer(said.out + said.err):
        yield match[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "command", "code"), PRINTED, ids=[f"{number}-{row[1]}" for number, row in enumerate(PRINTED)]
)
def test_what_is_printed_works_as_printed(
    typed: tuple[str, ...], command: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("delta_cli.cli.program.program", lambda: "delta")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("delta_cli.study.runner.StudyRunner.run", lambda self: None)  # its runs take minutes
    monkeypatch.setattr("delta_cli.cli.study._sum_up", lambda study, folder: None)
    with monkeypatch.context() as patch:
        if code == 130:  # somebody pressed Ctrl-C
            patch.setattr(StopSignal, "asked", lambda self: bool(setattr(self, "number", 2) or True))
        said = delta(*typed)
    assert said.code == code, said
    found = [each for each in printed(said) if each.startswith(command)]
    assert found, (list(printed(said)), said)
    words = completed([FILLED.get(word, word) for word in shlex.split(found[0].partition(" >")[0])], typed)
    result = delta(*words)
    assert result.code in ((0, 1) if words[0] == "doctor" else (0,)), (words, result)  # 1: the doctor advises


def completed(words: list[str], typed: tuple[str, ...]) -> list[str]:
    """The printed command with options that only make it short, or that choose a backend which the test can use."""
    if words[0] == "init":
        words += ["--out", f"from {Path(typed[-1]).name}.toml"]
        words += [*(() if "--model" in words else ("--model", "tiny-base"))]
    elif "--resume" in words:
        words += ["--backend", "fake"] if "--backend" not in words else []
    elif "--help" not in words:
        words += ALSO.get(words[0], ())
    return words


def commands_in(file: Path) -> Iterator[str]:
    """The commands in a file's strings, apart from docstrings; values are written as {}."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "delta_command":
            yield " ".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.args)
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield from (match[1] for match in COMMAND.finditer(text))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield from (match[1] for match in COMMAND.finditer(node.value))


def test_every_command_in_the_source_is_typed_by_a_test() -> None:
    for file in sorted([*(ROOT / "delta_cli").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        for command in (each.partition(" >")[0] for each in commands_in(file)):
            pattern = re.escape(command).replace(r"\{\}", r"(?:'[^']*'|\S+)")
            typed = any(re.match(pattern, row) or row.startswith(command.partition("{")[0]) for _, row, _ in PRINTED)
            assert typed or any(command in row for row in MENTIONED), f"{file}: delta {command}: add a row to PRINTED"
