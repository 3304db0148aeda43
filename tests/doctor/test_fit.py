"""The keys that make a recipe fit a machine: they suffice, each is needed, and they change no result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_cli.doctor.fit import MachineMemory, fitting_overrides, with_fit
from delta_cli.doctor.machine import Machine
from delta_cli.doctor.memory import peak_bytes
from delta_cli.doctor.model_shape import shape_of
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.recipe.loading import differences, with_overrides
from tests.command import delta

GIB = 2**30
MAY = {
    "rollout.batch",
    "update.micro_batch_tokens",
    "update.feature_bytes",
    "update.feature_host_bytes",
    "update.head_chunk_tokens",
    "update.offload",
    "model.gradient_checkpointing",
}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor without the checks that run the model."""
    monkeypatch.setattr("delta_cli.doctor.checks.model_findings", lambda *_: iter(()))


def machine(device: float, host: float = 0.0) -> Machine:
    return Machine("Linux", 2, int((host or device) * GIB), "device", int(device * GIB), {})


@pytest.mark.parametrize(
    ("recipe", "backend", "device", "host"),
    [
        ("quickstart", "cpu", 0.25, 0.25),
        ("smollm2_135m", "cpu", 4, 4),
        ("qwen3_8b_lora", "cuda", 22, 60),
        ("qwen3_8b", "cuda", 110, 200),
        ("qwen3_1.7b_mac", "mlx", 8, 12),
    ],
)
def test_what_is_set_suffices_is_needed_and_changes_no_result(
    recipe: str, backend: str, device: float, host: float
) -> None:
    loaded = load_recipe(Path(recipe), ["rollout.batch=4096", "update.micro_batch_tokens=131072"])
    there = machine(device, host)
    fitted, overrides = with_fit(loaded, there, backend)
    assert {name for name, _ in differences(loaded, fitted)} <= MAY
    assert fitted == with_overrides(loaded, overrides)
    assert overrides, "the recipe was meant not to fit"
    memory = MachineMemory(*shape_of(loaded.model.path), there, backend)
    items = [item for item in memory.items(fitted) if item.phase != "host"]
    assert peak_bytes(items) <= there.device_memory
    for left_out in overrides:
        others = [each for each in overrides if each != left_out]
        assert memory.excess(with_overrides(loaded, others)) > 0, left_out


def test_a_recipe_that_fits_is_left_alone_and_one_that_cannot_is_refused() -> None:
    loaded = load_recipe(Path("quickstart"))
    assert with_fit(loaded, machine(64), "cpu") == (loaded, [])
    assert fitting_overrides(loaded, lambda recipe: 1) is None
    with pytest.raises(UserError, match=r"--fit: no smaller batch .* model\.lora\.rank=16"):
        with_fit(load_recipe(Path("qwen3_14b")), machine(24, 64), "cuda")


def test_train_fits_and_says_what_it_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_cli.doctor.machine.describe_machine", lambda backend: machine(0.25))
    monkeypatch.chdir(tmp_path)
    small = ["--set", "run.steps=1", "--set", "evaluation.problems=4", "--set", "data.limit=40"]
    small += ["--set", "rollout.prompts=4", "--set", "rollout.responses=2", "--set", "update.feature_bytes=1000000000"]
    said = delta("train", "--backend", "fake", "--quiet", "--fit", *small, "--set", "update.micro_batch_tokens=400000")
    assert said.code == 0, said.err
    assert "--fit: --set update.micro_batch_tokens=" in said.err
    assert load_recipe(tmp_path / "runs/quickstart-1/recipe.toml").update.micro_batch_tokens < 400000


@pytest.mark.usefixtures("no_model")
def test_the_doctor_says_the_verdict_first_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_cli.doctor.checks.describe_machine", lambda backend: machine(0.25))
    said = delta("doctor", "--backend", "fake", "--json", "--set", "update.micro_batch_tokens=400000")
    first = json.loads(said.out.splitlines()[0])
    assert said.code == 1
    assert (first["subject"], first["level"]) == ("memory", "wrong")
    assert "It fits with: --set rollout.batch=16 --set update.micro_batch_tokens=12500, which" in first["text"]
    assert "--fit" in first["text"]


def test_a_plan_that_does_not_fit_is_exit_code_1_and_names_what_fits() -> None:
    wrong = delta("doctor", "qwen3_8b", "--gpu", "h100", "--processes", "4")
    lines = wrong.out.splitlines()
    assert wrong.code == 1
    assert lines[0].startswith("DOES NOT FIT: ")
    assert "Assumptions:" not in lines
    settings = " ".join(line.rstrip("\\") for line in lines if line.startswith("  --set ")).split()
    assert settings[0] == "--set"
    right = delta("doctor", "qwen3_8b", "--gpu", "h100", "--processes", "4", "--details", *settings)
    assert right.code == 0, right.out
    assert right.out.startswith("FITS: ")
    assert "Assumptions:" in right.out
    hopeless = delta("doctor", "qwen3_14b", "--gpu", "rtx4090")
    assert hopeless.code == 1
    assert "Nor with smaller batches" in hopeless.out


def test_a_reward_that_raises_is_found_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def reward(response, problem):\n    raise KeyError('difficulty')\n")
    said = delta(
        "doctor", "--backend", "fake", "--set", "reward.kind=custom", "--set", "reward.custom_file=mine.py", "--json"
    )
    found = [json.loads(line) for line in said.out.splitlines()]
    assert said.code == 1
    assert found[-1]["subject"] == "reward"
    assert "mine.py:reward cannot grade problem" in found[-1]["text"]
    assert "KeyError" in found[-1]["text"]
    assert not any(each["subject"] == "model" for each in found)


@pytest.mark.usefixtures("no_model")
def test_the_prompt_is_a_row_of_ones_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ('{"question": "21+43=?", "answer": "64"}', '{"question": "10+10=?", "answer": "20"}')
    Path("sums.jsonl").write_text("\n".join(rows))
    keys = [f"data.{key}" for key in ("source=sums.jsonl", "held_out=0.5", "template=plain")]
    said = delta("doctor", "--backend", "fake", "--json", *(part for key in keys for part in ("--set", key)))
    [prompt] = [each for each in map(json.loads, said.out.splitlines()) if each["subject"] == "prompt"]
    assert "21+43=?" in prompt["text"] or "10+10=?" in prompt["text"]
    assert "from problem " in prompt["text"]
