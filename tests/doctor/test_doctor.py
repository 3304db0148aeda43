"""The doctor: its arithmetic against counts that are known, and its verdicts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from delta_cli.assets.random_model import write_qwen3
from delta_cli.doctor.checks import Finding, examine
from delta_cli.doctor.estimate import estimate, needed
from delta_cli.doctor.shapes import KNOWN, shape_of
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_those_of_the_weights(tie: bool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=500, hidden=96, layers=3, heads=6, kv_heads=2, head_dim=24, tie=tie)
    with safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    matrices = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    assert shape_of(str(tmp_path))[0].parameters == matrices


def test_known_models_have_the_size_in_their_name() -> None:
    sizes = {name: round(shape.parameters / 1e9, 1) for name, shape in KNOWN.items()}
    assert sizes == {
        "Qwen/Qwen3-8B-Base": 8.2,
        "Qwen/Qwen3-14B-Base": 14.8,
        "allenai/Olmo-3-1025-7B": 7.3,
        "mlx-community/Qwen3-1.7B-4bit": 1.7,
    }


def test_adapters_by_hand(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=50, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=192)
    shape, _ = shape_of(str(tmp_path))
    assert shape.adapters(4, ("q_proj", "v_proj"), 1) == 4 * ((64 + 64) + (64 + 32))
    assert shape.adapters(4, ("down_proj",), None) == 2 * 4 * (192 + 64)


def test_the_estimate_by_hand() -> None:
    recipe = load_recipe(RECIPES / "qwen3_8b.toml")
    shape, config = shape_of("Qwen/Qwen3-8B-Base")
    items = {item.name: item for item in estimate(recipe, shape, config)}
    assert items["weights"].bytes == 4 * shape.parameters
    assert items["optimizer"].bytes == 8 * shape.parameters
    assert items["KV cache"].bytes == 16 * 22528 * (2 * 36 * 8 * 128 * 2)
    assert items["logits"].bytes == 3 * 512 * 151936 * 4
    everything = list(items.values())
    phases = {phase: sum(i.bytes for i in everything if i.phase == phase) for phase in ("stays", "rollout", "update")}
    assert needed(everything) == phases["stays"] + max(phases["rollout"], phases["update"])


def test_adapters_on_a_quantised_base_need_far_less() -> None:
    mac = load_recipe(RECIPES / "qwen3_1.7b_mac.toml")
    shape, _ = shape_of("mlx-community/Qwen3-1.7B-4bit")
    quantised = needed(estimate(mac, shape, {"quantization": {"bits": 4, "group_size": 64}}))
    assert quantised < needed(estimate(mac, shape, {}))
    assert quantised < 12 * 2**30


def test_the_one_gpu_recipe_fits_24_gb() -> None:
    recipe = load_recipe(RECIPES / "qwen3_8b_lora.toml")
    shape, config = shape_of(recipe.model.path)
    assert needed(estimate(recipe, shape, config)) < 24e9


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
    assert found["verifier"].text.startswith("95 gold answers accepted")


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


def test_a_large_recipe_is_judged_without_its_weights_in_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    found = list(examine(load_recipe(RECIPES / "qwen3_8b.toml"), "cpu", True))
    assert time.perf_counter() - start < 5
    assert any(finding.subject == "memory" for finding in found)
    assert found[-1].level == "note"
