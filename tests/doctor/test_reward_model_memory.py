"""What the doctor counts for a reward model, against the model that transformers makes of the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from delta_cli.doctor import checks
from delta_cli.doctor.fit import MachineMemory
from delta_cli.doctor.machine import Machine
from delta_cli.doctor.memory import MemoryItem
from delta_cli.doctor.model_shape import shape_of
from delta_cli.doctor.reward_model_memory import reward_model_items
from delta_cli.recipe import Recipe, load_recipe

SHAPE: dict[str, Any] = {
    "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {"Qwen3": {"head_dim": 32, "num_key_value_heads": 2}, "Llama": {}, "Bert": {"type_vocab_size": 2}}
# Queries and output, keys and values, feed-forward, two norms; embeddings.
QWEN3 = 3 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 640 + 2 * 256) + 4000 * 256


def write_config(folder: Path, kind: str = "Qwen3") -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE | KINDS[kind]))


def recipe(folder: Path, *keys: str) -> Recipe:
    return load_recipe(None, ["reward.kind=model", f"reward.model.path={folder}", *keys])


def weights(items: list[MemoryItem]) -> MemoryItem:
    return next(item for item in items if item.name == "reward model")


@pytest.mark.parametrize(("gpu", "width"), [(True, 2), (False, 4)])
def test_weights_are_counted_by_the_config(gpu: bool, width: int, tmp_path: Path) -> None:
    write_config(tmp_path)
    found = weights(reward_model_items(recipe(tmp_path), gpu))
    assert (found.bytes, found.phase) == (width * QWEN3, "stays")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "share"), [("Qwen3", 0.01), ("Llama", 0.01), ("Bert", 0.15)])
def test_weights_are_those_of_the_model_that_transformers_makes(kind: str, share: float, tmp_path: Path) -> None:
    """Norms of heads and biases are not counted without a model_type, nor are an encoder's positions and pooler."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write_config(tmp_path, kind)
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | KINDS[kind]))
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert weights(reward_model_items(recipe(tmp_path), gpu=True)).bytes == pytest.approx(2 * count, rel=share)


@pytest.mark.parametrize(
    ("keys", "phase", "factor"),
    [
        (["reward.model.device=cpu"], "host", 2),
        (["reward.model.dtype=float32"], "stays", 2),
        (["reward.model.device=cuda:0", "parallel.processes=2"], "stays", 2),
        (["reward.model.device=cuda:1"], None, 0),
    ],
)
def test_where_it_is_and_how_many_there_are(keys: list[str], phase: str | None, factor: int, tmp_path: Path) -> None:
    """Against one in 2 bytes on the policy's own GPU."""
    write_config(tmp_path)
    usual = weights(reward_model_items(recipe(tmp_path), gpu=True)).bytes
    found = reward_model_items(recipe(tmp_path, *keys), gpu=True)
    if phase is None:
        assert found == []
    else:
        assert (weights(found).bytes, weights(found).phase) == (factor * usual, phase)


def test_activations_grow_with_the_batch_as_far_as_the_model_reads(tmp_path: Path) -> None:
    write_config(tmp_path)
    sizes = [
        reward_model_items(recipe(tmp_path, *keys), gpu=True)[1].bytes
        for keys in (["reward.model.max_length=100"], ["reward.model.max_length=100", "reward.model.batch_size=24"],
                     ["rollout.max_tokens=9000"])
    ]  # fmt: skip
    assert sizes[1] == 3 * sizes[0]
    assert sizes[2] == pytest.approx(5.12 * sizes[0])


def test_the_machine_counts_it_and_a_model_that_is_not_here_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    plain, own = load_recipe(None, []), recipe(tmp_path)
    machine = Machine("Linux", 2, 2**33, "device", 2**33, {})
    memory = MachineMemory(*shape_of(plain.model.path), machine, "cuda")
    added = sum(item.bytes for item in reward_model_items(own, gpu=True))
    assert added > 0
    before, after = ([item for item in memory.items(each) if item.name != "KV cache"] for each in (plain, own))
    assert sum(item.bytes for item in after) - sum(item.bytes for item in before) == added
    absent = recipe(tmp_path / "absent")
    assert reward_model_items(absent, gpu=True) == []
    (note,) = [each for each in checks._memory(absent, machine, "cuda") if each.level == "note"]
    assert note.text.startswith(f"reward model not counted: reward.model.path: {tmp_path / 'absent'}: no such folder")
