"""The doctor: its arithmetic against counts that are known, and its verdicts."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors import safe_open

from backends import registry
from backends.interface import Sequences
from delta_cli.assets.random_model import write_qwen3
from delta_cli.cli.doctor import report
from delta_cli.doctor import model_checks
from delta_cli.doctor.checks import examine
from delta_cli.doctor.finding import Finding
from delta_cli.doctor.machine import Machine
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, estimate_memory, peak_bytes, pooled
from delta_cli.doctor.model_checks import _full_micro_batch, _longest
from delta_cli.doctor.model_shape import KNOWN, ModelShape, shape_of
from delta_cli.doctor.sharding import ShardingLayout
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_those_of_the_weights(tie: bool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=500, hidden=96, layers=3, heads=6, kv_heads=2, head_dim=24, tie=tie)
    with safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    assert shape_of(str(tmp_path))[0].parameters == sum(math.prod(shape) for shape in shapes.values())


def test_known_models_have_the_size_in_their_name() -> None:
    sizes = {name: round(shape.parameters / 1e9, 1) for name, shape in KNOWN.items()}
    assert sizes == {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1,
        "Qwen/Qwen3-0.6B": 0.6,
        "Qwen/Qwen3-1.7B": 1.7,
        "Qwen/Qwen3-4B": 4.0,
        "Qwen/Qwen3-8B-Base": 8.2,
        "Qwen/Qwen3-14B-Base": 14.8,
        "Qwen/Qwen3-32B": 32.8,
        "meta-llama/Llama-3.3-70B-Instruct": 70.6,
        "allenai/Olmo-3-1025-7B": 7.3,
        "mlx-community/Qwen3-1.7B-4bit": 1.7,
    }


def test_adapters_by_hand(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=50, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=192)
    shape, _ = shape_of(str(tmp_path))
    assert shape.adapters(4, ("q_proj", "v_proj"), 1) == 4 * ((64 + 64) + (64 + 32))
    assert shape.adapters(4, ("down_proj",), None) == 2 * 4 * (192 + 64)
    assert shape.adapters(4, ("q_proj", "v_proj"), 1, dora=True) == 4 * ((64 + 64) + (64 + 32)) + 64 + 32


def estimated(name: str, *overrides: str) -> tuple[dict[str, MemoryItem], list[MemoryItem]]:
    """The items of a recipe of this repository by phase and name, and as they come."""
    recipe = load_recipe(RECIPES / name, overrides)
    items = estimate_memory(recipe, *shape_of(recipe.model.path))
    return {f"{item.phase} {item.name}": item for item in items}, items


def test_the_estimate_by_hand() -> None:
    found, items = estimated("qwen3_8b.toml", "update.offload=false", "rollout.batch=16", "update.feature_bytes=1024")
    count = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 2 * 151936 * 4096
    assert found["stays weights"].bytes == 2 * count
    assert found["stays masters"].bytes == 4 * count
    assert found["stays moments"].bytes == 8 * count
    assert found["update gradient"].bytes == 4 * count
    assert "stays compute copy" not in found
    assert found["rollout KV cache"].bytes == 16 * (2048 + 30000) * (2 * 36 * 8 * 128 * 2), "of an evaluation"
    assert found["update logits"].bytes == 3 * 4096 * 151936 * 4
    assert found["score features"].bytes == 1024
    assert found["host features"].bytes == 48 * 2**30, "of 128 · 16 · 20480 · 4096 · 2 bytes"
    tokens = 24576
    inside = 2 * (8 * 4096 + 6 * 4096 + 7 * 1024 + 4 * 12288)
    assert found["rollout prefill"].bytes == 2 * 2048 * (inside + 2 * 36 * 8 * 128 * 2), "16 slots are 2 problems"
    assert found["update activations"].bytes == tokens * (36 * 4096 * 2 + inside + 4 * 4096 * 4)
    assert found["score activations"].bytes == tokens * (inside + 4 * 4096 * 4)
    phases = bytes_by_phase(items)
    assert peak_bytes(items) == phases["stays"] + max(phases["rollout"], phases["score"], phases["update"])
    assert phases["stays"] == sum(item.bytes for item in items if item.phase == "stays")


@pytest.mark.parametrize(
    ("micro_batch", "samples", "together", "entering"),
    [(24576, 16, 2048, 2048), (24576, 5, 4 * 2048, 4 * 2048), (5000, 1, 5000, 16 * 2048), (100, 1, 2048, 16 * 2048)],
)
def test_a_prefill_takes_each_prompt_once_and_a_micro_batch_at_a_time(
    micro_batch: int, samples: int, together: int, entering: int
) -> None:
    overrides = [f"update.micro_batch_tokens={micro_batch}", f"rollout.responses={samples}", "rollout.batch=16"]
    found, _ = estimated("qwen3_8b.toml", *overrides, "evaluation.problems=1", "evaluation.samples=1")
    inside = 2 * (8 * 4096 + 6 * 4096 + 7 * 1024 + 4 * 12288)
    assert found["rollout prefill"].bytes == together * inside + entering * 2 * 36 * 8 * 128 * 2


def test_a_rollout_is_as_large_as_its_largest_use() -> None:
    """Many prompts may take more beside a smaller cache than few beside a larger one."""
    overrides = ["rollout.batch=16", "evaluation.max_tokens=20500", "rollout.responses=1", "evaluation.samples=16"]
    found, _ = estimated("qwen3_8b.toml", *overrides)
    assert found["rollout KV cache"].bytes == 16 * (2048 + 20480) * (2 * 36 * 8 * 128 * 2)
    found, _ = estimated("qwen3_8b.toml", *overrides, "evaluation.samples=1")
    assert found["rollout KV cache"].bytes == 16 * (2048 + 20500) * (2 * 36 * 8 * 128 * 2), "of an evaluation"


def test_moments_on_the_host_and_in_8_bits() -> None:
    count = shape_of("Qwen/Qwen3-8B-Base")[0].parameters
    here, items = estimated("qwen3_8b.toml", "update.offload=false")
    there, offloaded = estimated("qwen3_8b.toml", "update.offload=true")
    assert there["host moments"].bytes == here["stays moments"].bytes == 8 * count
    assert there["host masters"].bytes == here["stays masters"].bytes == 4 * count
    assert peak_bytes(items) - peak_bytes(offloaded) == 12 * count
    assert bytes_by_phase(offloaded)["host"] - bytes_by_phase(items)["host"] == 12 * count
    coded, _ = estimated("qwen3_8b.toml", "update.offload=false", "update.moments=int8")
    assert coded["stays moments"].bytes == 2 * count + 2 * count // 64


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 adapters", "float32 DoRA", "bfloat16 DoRA"])
def test_activations_are_what_autograd_saves(kind: str, tmp_path: Path) -> None:
    """For a token in a layer: counted for two depths, so that all else cancels.

    On a processor a layer also saves a mask of tokens × tokens, so the linear part is taken from three lengths.
    Adapters save less, as their frozen matrices need no input; the estimate does not tell them apart.
    """
    torch = pytest.importorskip("torch", reason="what autograd saves is counted in torch")
    pytest.importorskip("transformers", reason="what autograd saves is counted in a model of transformers")
    dtype, _, adapters = kind.partition(" ")
    overrides = [f"model.dtype={dtype}", f"model.path={tmp_path}", "update.micro_batch_tokens=4096"]
    overrides += ["model.lora.rank=2", "model.lora.scale=2.0"] if adapters else []
    overrides += ["model.lora.dora=true"] if adapters == "DoRA" else []
    recipe = load_recipe(None, overrides)

    def saved(layers: int, tokens: int) -> int:
        """Bytes of all that the forward pass keeps for the backward pass."""
        sizes: dict[int, tuple[int, object]] = {}

        def keep(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that its address is not used again
            return tensor

        write(layers)
        backend = registry.create("cpu", backend_settings(recipe))
        response = Sequences((np.array([1]),), np.ones(tokens, np.int64), np.array([0, tokens]))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.accumulate(response, lambda logp, rows: (0.0, np.ones(len(logp))))
        backend.close()
        return sum(size for size, _ in sizes.values())

    def write(layers: int) -> ModelShape:
        parts = {"hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "intermediate": 192}
        write_qwen3(tmp_path, vocab_size=101, layers=layers, tie=False, **parts)
        return shape_of(str(tmp_path))[0]

    short, middle, long = (saved(3, tokens) - saved(2, tokens) for tokens in (64, 128, 192))
    counted = (5 * (middle - short) - 3 * (long - middle)) / (2 * 64)
    three, two = (
        next(item.bytes for item in estimate_memory(recipe, write(layers), {}) if item.name == "activations")
        for layers in (3, 2)
    )
    assert counted <= (three - two) / 4096 * 1.03
    assert counted >= (three - two) / 4096 * (0.85 if adapters else 0.97)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("qwen3_8b.toml", 141e9), ("qwen3_8b_lora.toml", 24e9), ("qwen3_8b_lora_16gb.toml", 16e9)],
)
def test_the_recipes_fit_one_gpu(name: str, memory: float) -> None:
    """With a tenth left for the context, the allocator's gaps and what frameworks keep.

    Keys and values take what is free while responses are drawn, for one of the longest at least.
    """
    recipe, (_, items) = load_recipe(RECIPES / name), estimated(name)
    found = pooled(recipe, shape_of(recipe.model.path)[0], items, int(0.9 * memory))
    assert peak_bytes(found) <= 0.9 * memory
    [cache] = [item for item in found if item.name == "KV cache"]
    longest = recipe.rollout.max_prompt_tokens + max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0)
    each = 2 * 36 * 8 * 128 * 2
    assert cache.bytes >= each * longest
    [least] = [item for item in pooled(recipe, shape_of(recipe.model.path)[0], items, 0) if item.name == "KV cache"]
    assert least.bytes == each * longest


def test_adapters_on_a_quantised_base_need_far_less() -> None:
    mac = load_recipe(RECIPES / "qwen3_1.7b_mac.toml")
    shape, _ = shape_of("mlx-community/Qwen3-1.7B-4bit")
    quantised = peak_bytes(estimate_memory(mac, shape, {"quantization": {"bits": 4, "group_size": 64}}))
    assert quantised < peak_bytes(estimate_memory(mac, shape, {}))
    assert quantised < 12 * 2**30


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


def test_a_base_of_four_bits_by_hand() -> None:
    """What bitsandbytes stores: a code of 4 bits a number, a byte for 64 of them, 4 bytes for 64 · 256."""
    found, _ = estimated("qwen3_8b_lora.toml", "model.load_in_4bit=true")
    matrices = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288)
    packed = matrices / 2 + matrices / 64 + 4 * matrices / (64 * 256)
    assert found["stays weights"].bytes == packed + 2 * 2 * 151936 * 4096


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


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_the_copy_of_a_checkpoint_is_counted(sharding: Literal["none", "full"]) -> None:
    """Weights and two moments of 4 bytes each, of which a process of eight holds an eighth if they are split."""
    recipe = load_recipe(None, ["checkpoint.async_save=true"])
    shape, config = shape_of(recipe.model.path)
    layout = ShardingLayout(8, sharding)
    host = {item.name: item.bytes for item in estimate_memory(recipe, shape, config, layout) if item.phase == "host"}
    assert host["checkpoint, copied"] == pytest.approx(12 * shape.parameters / layout.parts, rel=1e-3)
    plain = estimate_memory(load_recipe(None), shape, config, layout)
    assert "checkpoint, copied" not in {item.name for item in plain}
