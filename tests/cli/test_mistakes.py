"""Wrong input of every kind: one line that names what was typed, what is wrong and what to type."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main

from delta_cli import cli
from delta_cli.assets import model_path
from delta_cli.cli import app
from delta_cli.errors import LONGEST, UserError
from delta_cli.recipe import load_recipe

from .test_commands import FOLDER, run

STUDY, RECIPE = str(FOLDER / "study_quickstart.toml"), str(FOLDER / "quickstart.toml")
LONG = "x" * 100_000
TRL = "num_generations = 8\nbeta = 0.04\nmax_completion_length = 256\nuse_vllm = true\nmax_steps = 10\n"
VERL = "[data]\ntrain_batch_size = 8\n[actor_rollout_ref.rollout]\nn = 8\n[trainer]\ntotal_training_steps = 5\n"
SET = ("train", "--set")
MODEL = ("train", "--set", "reward.kind=model", "--set")
CUSTOM = ("train", "--set", "reward.kind=custom", "--set")
ARITHMETIC = ("eval", "tiny-base", "--suite", "arithmetic")

# Files that are there; the names of folders end in a slash.
FILES = {
    "data.jsonl": '{"question": "1+1=?", "answer": "2"}\n',
    "config.yaml": "run:\n  steps: 3\n",
    "broken.toml": "[run\nsteps = 1\n",
    "trl.toml": TRL,
    "verl.toml": VERL,
    "long.toml": f'[model]\npath = "{LONG}"\n',
    "odd.toml": "[rollout]\nprompts = 6\n[update]\nmini_batches = 3\n",
    "mine.toml": "[run]\nsteps = 4\n",
    "study.toml": 'name = "s"\nrecipe = "mine.toml"\narm = 3\n[[arms]]\nname = "a"\n[[arms]]\nname = "b"\n',
    "weights.safetensors": "",
    "odd.csv": "a,b\n1,2\n",
    "empty.jsonl": "",
    "cut.jsonl": '{"question": "1+1=?", "answer": "2"}\n{"question": "1+',
    "raises.py": "def reward(response, problem):\n    raise KeyError('difficulty')\n",
    "nothing.py": "def score(response, problem):\n    return 1.0\n",
    "twice.toml": "[run]\nsteps = 1\n[run]\nseed = 2\n",
    "loop.toml": 'extends = "loop.toml"\n',
    "orphan.toml": 'extends = "absent.toml"\n',
    "lists.jsonl": "[1, 2]\n",
    "one.py": "def reward(response):\n    return 1.0\n",
    "syntax.py": "def reward(response, problem)\n",
    "imports.py": "import no_such_module\n",
    "text.py": "def reward(response, problem):\n    return 'yes'\n",
    "nan.py": "def reward(response, problem):\n    return float('nan')\n",
    "folder/": "",
}

# What is typed, and what the message must say: what was typed, what is wrong, what to type.
WRONG: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    # a path that is not what the command takes
    (("train", "absent.toml"), ("absent.toml", "no such file")),
    (("train", "mien.toml"), ("mien.toml", "did you mean mine.toml?")),
    (("train", STUDY), ("is a study", f"delta study {STUDY}")),
    (("study", RECIPE), ("is a recipe", f"delta train {RECIPE}")),
    (("study", "absent.toml"), ("absent.toml", "no such file")),
    (("study", "study.toml"), ("study.toml", "unknown key arm", "did you mean arms?")),
    (("train", "data.jsonl"), ("data.jsonl", "is a data file", "delta init --data data.jsonl")),
    (("study", "data.jsonl"), ("is a data file, not a study", "delta init --data data.jsonl")),
    (("train", "model"), ("model", "is a folder, not a recipe", "delta init --data FILE --model model")),
    (("train", "folder"), ("folder", "is a folder, not a recipe", "delta init")),
    (("train", "."), ("is a folder, not a recipe", "choose one of its recipes, such as broken.toml")),
    (("train", "weights.safetensors"), ("a model's weights", "model.path")),
    (("train", "config.yaml"), ("config.yaml", "TOML", "docs/coming_from.md")),
    (("train", "broken.toml"), ("broken.toml", "not valid TOML", "line 1", "delta recipe show")),
    (("train", "trl.toml"), ("keys of another trainer", "num_generations is rollout.responses here", "coming_from")),
    (("train", "verl.toml"), ("keys of another trainer", "actor_rollout_ref.rollout.n is rollout.responses here")),
    (("eval", "absent", "--suite", "arithmetic"), ("absent",)),
    (("eval", "absent"), ("absent: no such model folder", "hub name")),
    (("eval", "tiny-base", "--data", "dat.jsonl"), ("dat.jsonl", "no such file", "did you mean data.jsonl?")),
    (("compare", "folder", "b"), ("b: no such file or folder",)),
    (("compare", "a", "b"), ("a: no such file or folder", "delta eval")),
    (("compare", "folder", "folder"), ("folder", "holds no evaluation", "delta eval folder")),
    (("inspect", "folder"), ("folder", "holds no run", "delta train")),
    (("report", "folder"), ("folder", "holds no run", "delta train")),
    (("export", "folder", "out"), ("folder", "holds no run", "delta train")),
    (("parity", "absent.jsonl.gz", "--backends", "fake,fake"), ("absent.jsonl.gz", "no such file")),
    (("runs", "folder"), ("folder", "holds no run", "delta runs DIR")),
    (("init", "--data", "data.jsonl", "--model", "tiny-base", "--question", "q"), ("--question q", "question, answer")),
    # an override
    (("train", "--set", "prompts=4"), ("--set prompts=4", "did you mean --set rollout.prompts=4?")),
    (("train", "--set", "num_generations=4"), ("did you mean --set rollout.responses=4?",)),
    (("train", "--set", "learning_rat=4"), ("did you mean --set update.learning_rate=4?",)),
    (("train", "--set", "rollout=4"), ("--set rollout=4", "is a section", "rollout.prompts")),
    (("train", "--set", "run.steps"), ("--set run.steps", "section.key=value")),
    (("train", "--set", "update.beta=1"), ("unknown key update.beta", "update.kl_coefficient")),
    (("train", "--set", "update.learning_rat=1"), ("did you mean update.learning_rate?",)),
    (("train", "--set", "method.preset=drgrpo"), ("'drgrpo'", "choose reinforce", "did you mean dr_grpo?")),
    (("train", "--set", "run.steps=99999999999"), ("--set run.steps=99999999999", "at most 1e+07")),
    (("train", "--set", "update.learning_rate=fast"), ("'fast'", "it must be a number")),
    (("train", "--set", "run.steps=1.5"), ("1.5", "a whole number")),
    (("train", "--set", "rollout.prompts=7"), ("--set rollout.prompts=7: ", "mini_batches = 4", "choose a divisor")),
    (("train", "odd.toml", "--set", "rollout.prompts=8"), ("--set rollout.prompts=8: ", "mini_batches = 3")),
    (("train", "--set", f"model.path={LONG}"), ("xxx", "give a shorter one")),
    (("train", "--set", f"method.preset={LONG}"), ("--set method.preset=xxx", "or delta")),
    (("train", "long.toml", "--dry-run"), ("xxx",)),
    (("train", "--backend", "tpu"), ("'tpu'", "cpu, cuda, mlx, fake")),
    (("train", "--set", "data.template=foo"), ("'foo'", "paper", "{question}")),
    # options
    (("train", "--steps", "5"), ("--steps", "--set run.steps=VALUE")),
    (("train", "--num-generations", "5"), ("--num-generations", "--set rollout.responses=VALUE")),
    (("train", "--processes", "0"), ("--processes 0", "at least 1")),
    (("train", "--resum"), ("--resum", "did you mean --resume?")),
    (("trian",), ("'trian'", "did you mean train?")),
    (("eval",), ("MODEL_OR_RUN", "delta eval --help")),
    ((*ARITHMETIC, "--top-p", "3"), ("--top-p 3", "at most 1")),
    ((*ARITHMETIC, "--top-k", "-1"), ("--top-k -1", "at least 0")),
    (("chat", "tiny-base", "--top-p", "3"), ("--top-p 3", "at most 1")),
    (("chat", "tiny-base", "--max-tokens", "0"), ("--max-tokens 0", "at least 1")),
    ((*ARITHMETIC, "--min-p", "2"), ("--min-p 2", "at most 1")),
    ((*ARITHMETIC, "--temperature", "-1"), ("--temperature -1", "at least 0")),
    ((*ARITHMETIC, "--samples", "0"), ("--samples 0", "at least 1")),
    ((*ARITHMETIC, "--samples", "two"), ("--samples two", "a whole number")),
    ((*ARITHMETIC, "--temperature", "0", "--samples", "2"), ("--samples 2", "--temperature 0", "samples = 1")),
    ((*ARITHMETIC, "--template", "foo"), ("--template", "'foo'", "paper")),
    (("eval", "tiny-base", "--suite", "math8"), ("math8", "did you mean math7?")),
    (("eval", "tiny-base", "--suite", "nope"), ("suite 'nope' does not exist (shipped: ",)),
    (("eval", "tiny-base", "--data", "empty.jsonl"), ("empty.jsonl: holds no rows; each needs",)),
    (("eval", "tiny-base"), ("tiny-base", "--data FILE", "--suite")),
    (("eval", "tiny-base", "--checkpoint", "3", "--suite", "arithmetic"), ("--checkpoint 3", "is a model, not a run")),
    (("inspect", "folder", "--format", "pdf"), ("--format pdf", "choose one of 'text', 'html', 'json'")),
    (("study", STUDY, "--seeds", "0"), ("--seeds 0", "at least 1")),
    (("study", STUDY, "--scale", "huge"), ("--scale huge", "tiny")),
    (("doctor", "--gpu", "h1000"), ("--gpu h1000", "did you mean h100?")),
    (("doctor", "--processes", "2"), ("--processes", "--gpu h100")),
    (("recipe", "keys", "optimizer"), ("'optimizer'", "update")),
    (("recipe", "keys", "run.nope"), ("'run.nope'; the keys of [run] are steps, seed",)),
    (("recipe", "keys", "run.stepz"), ("did you mean run.steps?",)),
    (("recipe", "explain", "foo"), ("'foo'", "delta recipe keys")),
    (("parity", "folder", "--backends", "fake"), ("--backends fake", "two")),
    (("train", "--resume", "--run-dir", "folder"), ("folder", "holds no run to resume")),
    (("train", "--resume"), ("no run to resume", "--run-dir")),
    # a name instead of a path, or the other way round
    (("train", "qwen3_8B"), ("qwen3_8B", "did you mean qwen3_8b?")),
    (("train", "recipes/qwen3_8b.toml"), ("recipes/qwen3_8b.toml", "did you mean qwen3_8b?")),
    (("train", "study_quickstart"), ("is a study", "delta study")),
    (("study", "quickstart"), ("is a recipe", "delta train", "--grid")),
    (("recipe", "show", "quickstrat"), ("quickstrat", "did you mean quickstart?")),
    (("recipe", "lsit"), ("'lsit'", "did you mean list?")),
    (("data", "shwo", "data.jsonl"), ("'shwo'", "did you mean show?")),
    # data
    (("data", "show", "absent.jsonl"), ("absent.jsonl", "no such file", "did you mean")),
    (("data", "show", "odd.csv"), ("odd.csv", "none of the columns a, b", "--question COLUMN")),
    (("data", "show", "empty.jsonl"), ("empty.jsonl", "holds no rows")),
    (("data", "show", "cut.jsonl"), ("cut.jsonl:2", "not valid JSON")),
    (("data", "show", "data.jsonl", "--set", "run.steps=1"), ("--set run.steps=1", "changes a recipe")),
    (("data", "show", "data.jsonl", "--rows", "-1"), ("--rows -1", "at least 0")),
    (("data", "show", "data.jsonl", "--model", "absent"), ("absent",)),
    (("train", "--set", "data.source=cut.jsonl"), ("cut.jsonl:2", "not valid JSON")),
    (
        ("train", "--set", "data.source=data.jsonl", "--set", "data.answer=gold"),
        ("no column 'gold'", "question, answer"),
    ),
    (("train", "--set", "data.source=data.jsonl", "--set", "data.held_out=0"), ("no problem is held out", "held_out")),
    (("train", "--set", "data.source=data.jsonl", "--set", "data.filter=level > 3"), ("no column 'level'",)),
    (("init", "--data", "empty.jsonl", "--model", "tiny-base"), ("empty.jsonl", "holds no rows")),
    (("init", "--data", "data.jsonl", "--model", "tiny-base", "--out", "mine.toml"), ("mine.toml", "exists already")),
    (("init", "--data", "data.jsonl", "--model", "tiny-base", "--out", "mine.yaml"), ("mine.yaml", "ends in .toml")),
    # a reward of one's own
    ((*CUSTOM, "reward.custom_file=absent.py"), ("absent.py",)),
    ((*CUSTOM, "reward.custom_file=raises.py"), ("raises.py:reward", "cannot grade problem", "KeyError")),
    ((*CUSTOM, "reward.custom_file=nothing.py"), ("nothing.py", "reward")),
    # doctor and --fit
    (("doctor", "--gpu", "h100", "--processes", "0"), ("--processes 0", "from 1 to 4096")),
    (("doctor", "--gpu", "h100", "--engine", "sglang"), ("--engine sglang", "local or vllm")),
    (("doctor", "--gpu", "h100", "--mean-tokens", "0"), ("--mean-tokens 0", "rollout.max_tokens")),
    (("doctor", "--mean-tokens", "5"), ("--mean-tokens", "--gpu h100")),
    (("doctor", "--seconds", "0"), ("--seconds 0", "at least 1")),
    (("doctor", "mien.toml"), ("mien.toml", "did you mean mine.toml?")),
    (("train", "--fit", "--set", "model.path=absent/model"), ("absent/model", "download it first")),
    # what a run is asked for
    (("compare", "absent", "--backend", "fake"), ("absent", "no such file or folder")),
    (("runs", "absent"), ("absent", "is not a folder", "delta runs DIR")),
    (("chat", "tiny-base", "--checkpoint", "best"), ("--checkpoint best", "is a model, not a run")),
    (("chat", "tiny-base", "--threads", "0"), ("--threads 0", "at least 1")),
    (("serve", "absent"), ("absent", "no such model folder")),
    (("serve", "tiny-base", "--port", "99999"), ("--port 99999", "at most 65535")),
    (("serve", "tiny-base", "--checkpoint", "best"), ("--checkpoint best", "is a model, not a run")),
    (("serve", "tiny-base", "--backend", "fake", "--host", "a.invalid"), ("a.invalid:8000", "--host or --port")),
    (("eval", "tiny-base", "--suite", "arithmetic", "--data", "data.jsonl"), ("--suite and --data", "only one")),
    (("eval", "tiny-base", "--suite", "arithmetic", "--engine", "sglang"), ("--engine sglang", "local, vllm")),
    (("export", "folder", "folder/"), ("folder", "holds no run")),
    # files that are damaged, or of another kind
    (("train", "twice.toml"), ("twice.toml", "not valid TOML", "twice")),
    (("train", "loop.toml"), ("loop.toml", "extends itself")),
    (("train", "orphan.toml"), ("absent.toml", "no such file")),
    (("train", "not_a_text.toml"), ("not_a_text.toml", "UTF-8")),
    (("train", "--set", "data.source=lists.jsonl"), ("lists.jsonl:1", "holds a list")),
    (("train", "--run-dir", "data.jsonl"), ("data.jsonl", "cannot be written", "--run-dir")),
    (("compare", "data.jsonl", "data.jsonl"), ("data.jsonl", "not an evaluation", "delta eval")),
    (("runs", "data.jsonl"), ("data.jsonl", "is not a folder", "delta runs DIR")),
    (("init", "--data", "data.jsonl", "--model", "folder"), ("folder", "no tokenizer.json")),
    (("study", "folder"), ("folder", "is a folder, not a study")),
    # functions of one's own that cannot be called, and what they return
    ((*CUSTOM, "reward.custom_file=one.py"), ("one.py:reward", "cannot grade problem", "1 positional argument")),
    ((*CUSTOM, "reward.custom_file=syntax.py"), ("syntax.py", "SyntaxError", "line 1")),
    ((*CUSTOM, "reward.custom_file=imports.py"), ("imports.py", "No module named 'no_such_module'")),
    ((*CUSTOM, "reward.custom_file=text.py"), ("text.py:reward returned 'yes'", "a finite number")),
    ((*CUSTOM, "reward.custom_file=nan.py"), ("nan.py:reward returned nan", "a finite number")),
    (("train", "--set", "reward.kind=custom"), ("reward.kind=custom", "needs reward.custom_file")),
    (("train", "--set", "method.credit=absent.py:weights"), ("absent.py", "does not exist")),
    (("train", "--set", "method.credit=one.py:weights"), ("one.py", "no function 'weights'")),
    # values
    (("train", "--set", "update.learning_rate=nan"), ("update.learning_rate=nan", "a finite number")),
    (("train", "--set", "tracking.wandb=true"), ("unknown key tracking.wandb", "kind, project")),
    (("train", "--set", "environment.kind=tools"), ("needs environment.tools", "environment.file")),
    (("chat", "tiny-base", "--template", "nope"), ("'nope'", "paper", "{question}")),
    (("study", "mine.toml", "--grid", "run.steps=a,b"), ("run.steps=a", "a whole number")),
    (("study", "mine.toml", "--grid", "run.steps="), ("--grid run.steps=", "KEY=A,B")),
    (("doctor", "--gpu", "4090ti"), ("--gpu 4090ti", "did you mean rtx4090?")),
    (("study", STUDY, "--grid", "update.learning_rate"), ("--grid update.learning_rate", "KEY=A,B")),
    # environments, sources, judges, engines and the bench
    ((*SET, "environment.kind=tool"), ("'tool'", "did you mean tools?")),
    ((*SET, "environment.kind=text"), ('needs environment.file = "FILE.py:CLASS"',)),
    ((*SET, "environment.kind=text", "--set", "environment.file=one.py"), ("'one.py'", "of the form FILE.py:NAME")),
    ((*SET, "environment.kind=text", "--set", "environment.file=absent.py:Env"), ("absent.py does not exist",)),
    ((*SET, "environment.kind=text", "--set", "environment.file=one.py:Env"), ("no class or function Env",)),
    ((*SET, "environment.kind=tools", "--set", "environment.tools=python"), ("'python'", 'a list, like ["a", "b"]')),
    ((*SET, "environment.file=one.py:Env"), ("needs environment.kind",)),
    ((*SET, "environment.turns=0"), ("environment.turns = 0", "at least 1")),
    ((*SET, "data.sources.a.source=absent.jsonl"), ("absent.jsonl: no such file",)),
    ((*SET, "data.sources.a.wieght=1"), ("data.sources.a.wieght", "did you mean data.sources.a.weight?")),
    ((*SET, "data.sources.a.weight=0"), ("data.sources.a.weight = 0", "above 0")),
    ((*SET, "data.sourcs.a.weight=1"), ("did you mean data.sources?",)),
    ((*SET, "data.sources.a.source=data.jsonl", "--set", "data.source=x"), ("for a single source", "[data.sources.a]")),
    ((*SET, "reward.kind=jugde"), ("'jugde'", "did you mean judge?")),
    ((*SET, "reward.kind=judge", "--set", "reward.judge.url=nope"), ("'nope' is no address", "http://host:port/v1")),
    ((*SET, "reward.kind=judge", "--set", "reward.judge.pattern=("), ("no regular expression",)),
    ((*SET, "reward.kind=judge", "--set", "reward.judge.pattern=x"), ("no group", "parentheses around the score")),
    ((*SET, "reward.kind=judge", "--set", "reward.judge.template=x"), ("does not contain {response}",)),
    ((*SET, "reward.judge=8"), ("reward.judge = 8", "a section")),
    ((*MODEL, "reward.model.path=absent"), ("reward.model.path: absent: no such model folder",)),
    ((*MODEL, "reward.model.path=folder"), ("reward.model.path: folder: no config.json", "choose another")),
    ((*MODEL, "reward.model.path=model"), ("reward.model.path: model: Qwen3ForCausalLM writes text", '"judge"')),
    ((*SET, "reward.kind=model"), ('reward.kind = "model" and [reward.model] belong together',)),
    ((*SET, "engine.async_steps=1"), ("applies to vLLM", 'engine.kind = "vllm"')),
    ((*SET, "engine.async_steps=17"), ("engine.async_steps = 17", "at most 16")),
    ((*SET, "engine.kind=vllm"), ("engine.url of running servers", "engine.launch = true")),
    ((*SET, "engine.kind=vllm", "--set", "engine.url=nope"), ("'nope'", 'a list, like ["a", "b"]')),
    ((*SET, "parallel.shard_size=2"), ("shard_size = 2 has no effect", "or parallel.shard_size = 0")),
    ((*SET, "parallel.sharding=hybrid", "--set", "parallel.shard_size=1"), ("shard_size = 1 splits nothing", "larger")),
    ((*SET, "correction.high=2"), ("high has no effect without weight", "correction.preset")),
    ((*SET, "correction.preset=tis"), ("'tis'", "token_truncate")),
    ((*SET, "method.credit=delt"), ("'delt'", "did you mean delta?", "FILE.py:FUNCTION")),
    (("bench", "--task", "nope"), ("--task nope", "choose from addition")),
    (("bench", "--arm", "nope"), ("--arm nope", "choose from dapo")),
    (("bench", "--credit", "absent.py:weights"), ("absent.py does not exist",)),
    (("bench", "--credit", "one.py:weights"), ("no function 'weights'", "weights(batch)")),
    (("bench", "--quick", "--set", "run.stepz=1"), ("run.stepz", "did you mean run.steps?")),
    (("bench", "--task", "words", "--smollm2", "absent"), ("--smollm2 absent", "no config.json")),
    (("bench", "--quick", "--out", "data.jsonl"), ("data.jsonl: cannot be written", "run the command again")),
    (("eval", "tiny-base", "--suite", "data.jsonl"), ("is a data file, not a suite", "--data data.jsonl")),
    (("eval", "tiny-base", "--suite", "absent.toml"), ("absent.toml: no such file", "path of a suite")),
    (
        ("study", RECIPE, "--grid", "update.learning_rte=1,2"),
        ("update.learning_rte", "did you mean update.learning_rate?"),
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (made / name).mkdir() if name.endswith("/") else (made / name).write_text(text)
    (made / "not_a_text.toml").write_bytes(b"\xff\xfe\x00")
    shutil.copytree(model_path("tiny-base"), made / "model")
    return made


def test_there_are_more_than_a_hundred() -> None:
    assert len({arguments for arguments, _ in WRONG}) >= 160


@pytest.mark.parametrize(("arguments", "parts"), WRONG, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_that_helps(
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("delta_cli.training.trainer.Trainer.run", _not_reached)
    backend = ("--backend", "fake") if arguments[0] in ("train", "eval") and "--backend" not in arguments else ()
    assert run(monkeypatch, *arguments, *backend) == 2
    printed = capsys.readouterr()
    message = printed.err
    assert message.startswith("delta: ")
    assert message.count("\n") == 1
    assert len(message) <= 500
    for part in parts:
        assert part in message, message


COMMAND = re.compile(r"(?<![\w./-])delta (?=[a-z])((?:[^;,()`]|\((?=[\w/]+\)))*)")
WORDS = ("wrote", "does", "says", "lists", "prints", "writes", "first", "again", "starts", "with", "or", "to", "on")


def printed_commands(text: str) -> list[list[str]]:
    """The commands in a text, each as the words to type: up to punctuation, or a word of the sentence around it."""
    found = []
    for match in COMMAND.finditer(text):
        words = shlex.split(match[1].rstrip(" .?'").replace("'", "").replace("…", "X"))
        last = next((place for place, word in enumerate(words) if word in WORDS), len(words))
        if last:
            found.append(words[:last])
    return found


def parse(words: list[str]) -> None:
    """Parse a command as the program does; raises click's error for a wrong command, option or value."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("delta", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        if not words or words == ["--help"]:
            return
        assert words[0] in command.commands, f"delta {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    if "--help" not in words:
        command.make_context("delta", list(words), parent=context, resilient_parsing=len(words) == 0)


@pytest.mark.long
def test_every_command_that_a_message_names_can_be_typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("delta_cli.training.trainer.Trainer.run", _not_reached)
    named = set()
    for arguments, _ in WRONG:
        backend = ("--backend", "fake") if arguments[0] == "train" and "--backend" not in arguments else ()
        run(monkeypatch, *arguments, *backend)
        for words in printed_commands(capsys.readouterr().err):
            named.add(words[0])
            parse(words)
    assert {"train", "init", "study", "eval", "recipe"} <= named


def test_the_source_names_no_command_that_does_not_exist() -> None:
    """Every ``delta COMMAND`` in a string of the package starts with a command of the program."""
    commands = {*typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    sources = Path(__file__).parents[2] / "delta_cli"
    for file in sorted(sources.rglob("*.py")):
        for name, option in re.findall(r"(?<=[`\"' :])delta ([a-z]+)( --?[a-z-]+)?", file.read_text(encoding="utf-8")):
            if option:
                assert name in commands, f"{file.name}: delta {name}{option}"
    assert set(cli.ORDER) == commands


def _not_reached(*_: object) -> None:
    raise AssertionError("the mistake was not seen: training began")


def test_nothing_long_is_echoed() -> None:
    text = str(UserError("a file: " + "long " * 10**6 + " fix it"))
    assert len(text) <= LONGEST
    assert text.startswith("a file: long")
    assert len(str(UserError(f"{LONG}: fix it"))) < 250
    assert str(UserError(f"{LONG}: fix it")).endswith("fix it")


def test_an_override_is_blamed_only_for_its_own_mistakes(tmp_path: Path) -> None:
    """The file where it is wrong by itself; the one override without which all is well; else all of them."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[rollout]\nprompts = 7\n")
    for overrides, blamed in (
        (["run.steps=3"], str(wrong)),
        (["run.steps=0"], "--set run.steps=0"),
    ):
        with pytest.raises(UserError) as error:
            load_recipe(wrong, overrides)
        assert str(error.value).startswith(f"{blamed}: ")
    with pytest.raises(UserError) as error:
        load_recipe(None, ["run.steps=3", "rollout.prompts=6", "run.seed=1"])
    assert str(error.value).startswith("--set rollout.prompts=6: ")
    assert load_recipe(wrong, ["update.mini_batches=7"]).rollout.prompts == 7


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_bytes(b"\xef\xbb\xbf[run]\nsteps = 3\n")
    assert load_recipe(file).run.steps == 3


def test_a_dry_run_prints_as_it_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "train", "--dry-run", "--json", "--backend", "fake") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["event"] for line in lines} == {"recipe", "finding"}
    assert lines[0]["recipe"]["run"]["steps"] == 60
    assert run(monkeypatch, "train", "--dry-run", "--quiet", "--backend", "fake") == 0
    assert capsys.readouterr().out == ""
