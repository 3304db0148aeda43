"""The doctor: its arithmetic against counts that are known, and its verdicts."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from backends import registry
from delta_cli.assets.random_model import write_qwen3
from delta_cli.cli.doctor import report
from delta_cli.doctor import model_checks
from delta_cli.doctor.checks import examine
from delta_cli.doctor.finding import Finding
from delta_cli.doctor.machine import Machine
from delta_cli.doctor.memory import estimate_memory, peak_bytes
from delta_cli.doctor.model_checks import _full_micro_batch, _longest
from delta_cli.doctor.model_shape import shape_of
from delta_cli.doctor.sharding import ShardingLayout
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_config_that_is_none_is_one_line(tmp_path: Path) -> None:
    for text in ("", "[]", '{"hidden_size": "wide"}', json.dumps({"hidden_size": 4})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            shape_of(str(tmp_path))
    with pytest.raises(UserError, match="download it first"):
        shape_of("somebody/unknown")


def findings(overrides: list[str], run_model: bool = True) -> dict[str, Finding]:
    return {found.subject: found for found in examine(load_recipe(None, overrides), "fake", run_model)}


def test_the_whole_examination_of_a_small_run() -> None:
    found = findings(["rollout.max_prompt_tokens=16", "update.micro_batch_tokens=512", "data.limit=100"])
    expected = {"system", "memory", "tokenizer", "prompt", "data", "verifier", "model", "outcomes", "longest batch"}
    assert expected | {"time"} <= set(found)
    assert found["longest batch"].level == "ok"
    assert found["longest batch"].text.startswith("10 × 48 tokens after a prompt of 16 went through")
    assert found["verifier"].text.startswith("95 gold answers accepted")


def test_a_slow_machine_runs_what_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of a single response; the engine is interrupted between micro-batches if that was too hopeful."""
    small = ["rollout.max_prompt_tokens=16", "update.micro_batch_tokens=512", "data.limit=60"]
    monkeypatch.setattr(model_checks, "_affordable", lambda *_: 150.0)  # tokens
    found = findings(small)
    assert found["longest batch"].level == "note"
    assert found["longest batch"].text.startswith("2 × 48 tokens after a prompt of 16 went through")
    assert "all 10 responses would take too long, allow more time with --seconds" in found["longest batch"].text
    assert found["time"].level == "ok"

    passed = model_checks._pass

    def slow(engine: Any, *more: Any) -> tuple[float, float]:
        monkeypatch.setattr("delta_cli.doctor.deadline.time.monotonic", lambda: math.inf)
        return passed(engine, *more)

    monkeypatch.setattr(model_checks, "_pass", slow)
    found = findings(small)
    for subject in ("longest batch", "time"):
        assert found[subject].level == "note"
        assert found[subject].text == "not checked: 120 s are over; allow more with --seconds"


@pytest.mark.parametrize(("budget", "rows"), [(160, 16), (107, 10), (8, 1)])
def test_a_full_micro_batch_goes_forward_and_backward_and_the_weights_stay(
    budget: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch, where a prompt that responses share is computed once and a gradient of zero not at all."""
    torch = pytest.importorskip("torch", reason="packed micro-batches are of the torch backend")
    pytest.importorskip("transformers", reason="the torch backend loads models of transformers")
    write_qwen3(tmp_path / "model", vocab_size=50, hidden=16, layers=1, head_dim=4, intermediate=24)
    overrides = [f"model.path={tmp_path / 'model'}", f"update.micro_batch_tokens={budget}"]
    recipe = load_recipe(None, [*overrides, "rollout.max_prompt_tokens=10", "rollout.max_tokens=10"])
    backend = registry.create("cpu", backend_settings(recipe))
    hidden, forwards, gradients = backend._hidden, [], []  # type: ignore[attr-defined]

    def note(policy: Any, batch: Any) -> Any:
        forwards.append(len(batch.ids))
        found = hidden(policy, batch)
        if torch.is_grad_enabled():
            found[0].register_hook(lambda gradient: gradients.append(gradient.abs().max().item()))
        return found

    monkeypatch.setattr(backend, "_hidden", note)
    weights = backend._policy.causal.state_dict()  # type: ignore[attr-defined]
    before = {name: weight.clone() for name, weight in weights.items()}
    assert _full_micro_batch(recipe) == rows
    (finding,) = _longest(recipe, backend, rows)
    assert (finding.level, finding.text.split(" went")[0]) == ("ok", f"{rows} × 10 tokens after a prompt of 10")
    assert forwards == [10 + 9 * rows] * 2  # scored, then trained on
    assert len(gradients) == 1
    assert gradients[0] > 0
    for name, weight in weights.items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    backend.close()


@pytest.mark.parametrize(
    ("turns", "limit", "level", "said"),
    [(3, 100, "ok", "at most 2 × 40 = 80 tokens of rollout.max_tokens = 100"), (4, 100, "note", "cut episodes off")],
)
def test_answers_of_an_environment_are_counted_against_the_limit(turns: int, limit: int, level: str, said: str) -> None:
    keys = ['environment.kind="text"', 'environment.file="game.py:Game"', "environment.observation_tokens=40"]
    found = findings([*keys, f"environment.turns={turns}", f"rollout.max_tokens={limit}"], run_model=False)["episodes"]
    assert (found.level, said in found.text) == (level, True)
    assert "episodes" not in findings([], run_model=False)


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_cli.doctor.machine.os.sysconf", lambda name: 1024)
    found = findings([], run_model=False)
    assert found["memory"].level == "wrong"
    assert "rollout.batch" in found["memory"].text
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{i}", "answer": "{1"}) + "\n" for i in range(40)))
    found = findings([f"data.source={data}", "data.template=plain"], run_model=False)
    assert found["verifier"].level == "wrong"
    assert "38 of 38 gold answers" in found["verifier"].text  # 2 of 40 are held out
    found = findings([f"data.source={tmp_path / 'absent.jsonl'}"], run_model=False)
    assert found["data"].level == "wrong"
    assert "no such file" in found["data"].text
    found = findings(["reward.kind=model", f"reward.model.path={tmp_path}"], run_model=False)
    assert found["credit and reward files"].level == "wrong"
    assert "no config.json" in found["credit and reward files"].text


@pytest.mark.parametrize(
    ("device", "host", "levels"),
    [(141e9, 256e9, ("ok", "ok")), (80e9, 256e9, ("wrong", "ok")), (141e9, 64e9, ("ok", "wrong"))],
)
def test_a_gpu_and_its_host_are_judged_apart(
    device: float, host: float, levels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    machine = Machine("a system", 8, int(host), "a GPU", int(device), {})
    monkeypatch.setattr("delta_cli.doctor.checks.describe_machine", lambda name: machine)
    found = list(examine(load_recipe(RECIPES / "qwen3_8b.toml"), "cuda", run_model=False))
    verdicts = {finding.subject: finding for finding in found if "worst moment" in finding.text}
    assert (verdicts["memory"].level, verdicts["memory, host"].level) == levels
    if levels[1] == "wrong":
        assert "update.feature_host_bytes" in verdicts["memory, host"].text
        assert "rollout.batch" not in verdicts["memory, host"].text


def test_processes_of_one_machine_share_its_memory_but_not_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight shards of the moments are the whole on the host; on a processor everything is there eight times."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    machine = Machine("a system", 8, int(10e12), "a device", int(10e12), {})
    monkeypatch.setattr("delta_cli.doctor.checks.describe_machine", lambda name: machine)
    keys = ["parallel.processes=8", "update.feature_bytes=1024", "update.feature_host_bytes=0"]
    recipe = load_recipe(RECIPES / "qwen3_8b.toml", keys)
    shape, config = shape_of(recipe.model.path)
    device, host = peak_bytes(estimate_memory(recipe, shape, config, ShardingLayout(8, "full"))), 8 * shape.parameters
    for backend, sizes in (("cuda", [device, host]), ("cpu", [8 * device + host])):
        found = [each.text for each in examine(recipe, backend, run_model=False) if "worst moment" in each.text]
        assert [text.split(" at the")[0] for text in found] == [f"about {size / 2**30:.1f} GiB" for size in sizes]


def test_what_differs_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a block of queries, logits of a second chunk, and a warning where one operation takes long."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    machine = Machine("Darwin 25.0, Python 3.12", 8, 32 * 2**30, "Apple silicon", 24 * 2**30, {})
    monkeypatch.setattr("delta_cli.doctor.checks.describe_machine", lambda name: machine)
    keys = ["rollout.max_tokens=16000", "rollout.max_prompt_tokens=384", "evaluation.max_tokens=100"]

    def found(*more: str) -> list[Finding]:
        recipe = load_recipe(RECIPES / "qwen3_1.7b_mac.toml", [*keys, *more])
        return list(examine(recipe, "mlx", run_model=False))

    scores = [each.text for each in found() if "attention scores" in each.text and "worst" not in each.text]
    assert ["4 × 1 × 128 × 16384 × 16 heads × 2 bytes" in text for text in scores] == [True]
    assert f"{4 * 128 * 16384 * 16 * 2 / 2**20:.0f} MiB" in scores[0]
    plain = [each.text for each in found("model.gradient_checkpointing=false") if "attention scores" in each.text]
    assert scores[0] in plain, "of one layer at a time, with gradient checkpointing and without"
    watchdog = {each.subject: each for each in found("update.head_chunk_tokens=4096")}["watchdog"]
    assert watchdog.level == "note"
    assert f"{2 * 4096 * 2048 * 151936 / 2.6e12:.2f} s" in watchdog.text
    assert "lower update.head_chunk_tokens" in watchdog.text
    ahead = [each.text for each in found() if "logits, one ahead" in each.text]
    assert ["256 × 151936 × 3 float32" in text for text in ahead] == [True]
    assert f"{3 * 256 * 151936 * 4 / 2**20:.0f} MiB" in ahead[0]
    one = ["rollout.max_tokens=100", "update.micro_batch_tokens=512", "update.head_chunk_tokens=16384"]
    assert not [each for each in found(*one) if "one ahead" in each.text], "all tokens fit the first chunk"
    short = ["rollout.max_tokens=100", "update.micro_batch_tokens=512", "update.head_chunk_tokens=64"]
    assert {each.subject: each for each in found(*short)}["watchdog"].level == "ok"


def test_a_large_recipe_is_judged_without_its_weights_in_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    found = list(examine(load_recipe(RECIPES / "qwen3_8b.toml"), "cpu", True))
    assert time.perf_counter() - start < 5
    assert any(finding.subject == "memory" for finding in found)
    assert found[-1].level == "note"


@pytest.mark.long
def test_a_slow_model_is_looked_at_for_so_long_and_no_longer() -> None:
    """What goes on is said before it begins; a look that is too short says so, and how to have a longer one."""
    recipe = load_recipe(None, ["data.limit=60", "rollout.max_tokens=24", "update.micro_batch_tokens=64"])
    said: list[str] = []
    found = {each.subject: each for each in examine(recipe, "fake", True, 1e-6, said.append)}
    assert said == ["drawing 32 responses of at most 24 tokens"]
    assert "not complete after 1e-06 s; allow more with --seconds" in found["outcomes"].text
    assert found["outcomes"].level == "note"
    assert "longest batch" not in found
    said.clear()
    found = {each.subject: each for each in examine(recipe, "fake", True, 600, said.append)}
    assert said[:2] == [f"drawing {count} responses of at most 24 tokens" for count in (32, 128)]
    assert len(said) == 4
    assert "longest batch" in found


def test_nothing_right_at_the_limit_may_be_a_stop_that_is_missing() -> None:
    short = ["data.limit=60", "rollout.max_tokens=2", "update.micro_batch_tokens=64", "rollout.max_prompt_tokens=32"]
    found = {each.subject: each for each in examine(load_recipe(None, short), "fake", True)}
    assert "rollout.stop" in found["length"].text
    stopped = load_recipe(None, [*short, 'rollout.stop=["\\n\\n"]'])
    found = {each.subject: each for each in examine(stopped, "fake", True)}
    assert "rollout.stop" not in found["length"].text


def test_the_parts_of_the_memory_are_one_line_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(None, ["data.limit=60"])
    assert report(recipe, "fake", run_model=False, details=False)
    short = capsys.readouterr().out
    assert "memory, " not in short
    assert re.search(r"memory .*; its parts: --details", short)
    assert report(recipe, "fake", run_model=False, details=True)
    assert "memory, " in capsys.readouterr().out
