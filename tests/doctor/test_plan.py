"""The plan for rented GPUs: bytes and seconds of each phase by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from backends.settings import Parallel
from delta_cli.cli import app
from delta_cli.cli.doctor import report
from delta_cli.doctor import assumptions, gpu_time
from delta_cli.doctor.gpus import GPUS, Gpu, find_gpu
from delta_cli.doctor.memory import bytes_by_phase, peak_bytes
from delta_cli.doctor.model_shape import KNOWN, ModelShape
from delta_cli.doctor.plan import RunPlan, fitted, plan
from delta_cli.doctor.plan_request import PlanRequest
from delta_cli.doctor.sharding import SPLIT_ABOVE, ShardingLayout, choose_sharding
from delta_cli.doctor.step_time import memory
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
PARAMETERS = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 2 * 151936 * 4096  # Qwen3-8B
TINY = ModelShape(hidden=16, layers=3, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocabulary=50)
ROOM = 0.9 * 81559 * 2**20  # bytes of an H100, without the reserve
BOX = Gpu("box", memory=80e9, flops=1e15, bandwidth=3e12, link=100e9, host=50e9, network=40e9, node=4)


def ask(
    name: str = "qwen3_8b.toml", *overrides: str, model: str | None = None, sharding: str = "auto", **options: Any
) -> PlanRequest:
    recipe = load_recipe(RECIPES / name, [*overrides, f"parallel.sharding={sharding}"])
    return PlanRequest(recipe, KNOWN[model or recipe.model.path], {}, **{"gpu": GPUS["h100"], **options})


def seconds(found: RunPlan) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in found.phases}


# --------------------------------------------------------------------------------------- bytes


def test_what_is_sharded_is_in_as_many_parts() -> None:
    for sharding in ("full", "optimizer"):
        request = ask(processes=8, sharding=sharding)
        found = {(item.phase, item.name): item.bytes for item in memory(request)}
        assert found["stays", "weights"] == 4 * PARAMETERS / 8
        assert found["host", "moments"] == 8 * PARAMETERS / 8
        assert found["update", "gradient"] == 4 * PARAMETERS / 8
        assert found["rollout", "weights, gathered"] == 2 * PARAMETERS
        assert found["export", "weights, gathered"] == 4 * 151936 * 4096
        layer, ends = 4096 * 128 * 80 + 3 * 4096 * 12288, 2 * 151936 * 4096
        working = 2 * PARAMETERS if sharding == "optimizer" else 2 * (2 * layer + ends)
        assert found["score", "weights, gathered"] == found["update", "weights, gathered"] == working
        assert found["update", "gradient, whole"] == 4 * (layer + ends)
        assert not {"compute copy", "masters"} & {name for _, name in found}, "the shards are the masters"


def test_a_frozen_base_is_gathered_as_it_rests() -> None:
    request = ask("qwen3_8b_lora.toml", processes=8, sharding="full")
    found = {(item.phase, item.name): item.bytes for item in memory(request)}
    assert found["stays", "weights"] == 2 * PARAMETERS / 8
    assert found["stays", "adapters"] == 4 * 87_293_952 / 8
    assert found["rollout", "weights, gathered"] == 2 * PARAMETERS
    assert ("update", "gradient, whole") not in found


def test_what_is_not_sharded_is_whole_and_each_process_has_its_groups() -> None:
    one, many = ask(), ask(processes=16, sharding="none")
    whole, found = ({(i.phase, i.name): i for i in memory(request)} for request in (one, many))
    for key in (("stays", "weights"), ("host", "masters"), ("host", "moments"), ("update", "gradient")):
        assert found[key].bytes == whole[key].bytes
    assert found["score", "features"].bytes == 8 * 16 * 20480 * 4096 * 2, "8 of 128 groups, and within the budget"


def test_the_layout_that_auto_stands_for() -> None:
    full = Parallel(sharding="full")
    assert choose_sharding(1, full, 10**10, 8) == ShardingLayout(1, "none")
    assert choose_sharding(2, Parallel(), 2_000_000_000, 8) == ShardingLayout(2, "none")
    assert choose_sharding(2, Parallel(), 2_000_000_001, 8) == ShardingLayout(2, "full")
    assert choose_sharding(2, Parallel(sharding="optimizer"), 5, 8) == ShardingLayout(2, "optimizer")
    hybrid = Parallel(sharding="hybrid")
    assert choose_sharding(16, full, 5, 8) == ShardingLayout(16, "full")
    assert choose_sharding(16, hybrid, 5, 8) == ShardingLayout(16, "full", 8)
    assert choose_sharding(12, hybrid, 5, 8) == choose_sharding(12, hybrid, 5, 1) == ShardingLayout(12, "full")
    assert choose_sharding(8, Parallel(sharding="hybrid", shard_size=4), 5, 8) == ShardingLayout(8, "full", 4)
    with pytest.raises(UserError, match=r"shard_size = 3: it does not divide 8 processes"):
        choose_sharding(8, Parallel(sharding="hybrid", shard_size=3), 5, 8)
    assert [ShardingLayout(3).most(groups) for groups in (1, 3, 4)] == [1, 1, 2]
    assert (ShardingLayout(3, "full").share(10), ShardingLayout(3, "none").share(10)) == (4, 10)


def test_each_machine_holds_a_copy_of_split_weights() -> None:
    """Layers are gathered inside a machine, and the gradient is summed over machines once an update."""
    two = ask(processes=16, mean_tokens=4000, sharding="hybrid")
    one = ask(processes=8, mean_tokens=4000)
    of_two, of_one = ({(i.phase, i.name): i.bytes for i in memory(request)} for request in (two, one))
    for key in (("stays", "weights"), ("host", "moments"), ("update", "gradient")):
        assert of_two[key] == of_one[key]
    alone = memory(
        ask("qwen3_8b.toml", "parallel.sharding=hybrid", "parallel.shard_size=16", processes=16, sharding="hybrid")
    )
    assert {(item.phase, item.name): item.bytes for item in alone}["stays", "weights"] == 4 * PARAMETERS / 16

    micro = int(np.ceil((150 + 16 * 4000) * 2 / 24576))
    scored = int(np.ceil((150 + 16 * 4000) * 8 / 24576))
    gather, scatter = (width * PARAMETERS * 7 / 8 / (450e9 * 0.7) + 36 * 20e-6 * 3 for width in (2, 4))
    transfers = scored * gather + 4 * micro * (2 * gather + scatter)
    once = 2 * (4 * PARAMETERS / 2 / (400e9 * 0.7) + 36 * 20e-6)  # half of the gradient, there and back
    assert seconds(plan(two))["collectives"] == pytest.approx(2 * gather + 0.2 * transfers + 4 * once)
    assert seconds(plan(two))["weight sync"] == pytest.approx(gather)


def test_the_learner_goes_by_the_same_number() -> None:
    sharding = pytest.importorskip("backends.torch.sharding", reason="the learner is torch's")
    assert sharding.SPLIT_ABOVE == SPLIT_ABOVE


def test_vllm_has_weights_of_its_own_and_splits_them_where_one_gpu_is_too_small() -> None:
    items = {i.name: i for i in memory(ask(processes=8, engine="vllm")) if i.phase == "rollout"}
    assert items["engine's weights"].bytes == 2 * PARAMETERS
    assert set(items) == {"engine's weights", "KV cache"}
    llama = ask(model="meta-llama/Llama-3.3-70B-Instruct", processes=64, engine="vllm")
    weights = next(i for i in memory(llama) if i.name == "engine's weights")
    # 72 GB to use, 4.4 of weights at rest: 141 / 2 leaves nothing, 141 / 4 leaves 32
    assert weights.bytes == 2 * llama.shape.parameters // 4


def test_the_export_of_a_large_model_holds_one_matrix_more() -> None:
    request = ask(model="meta-llama/Llama-3.3-70B-Instruct", gpu=GPUS["b200"], processes=512, engine="vllm")
    assert bytes_by_phase(memory(request))["export"] == 4 * 128256 * 8192


def test_fitted_takes_the_room_and_changes_no_more_than_it_may() -> None:
    asked = ask(processes=4)
    request = fitted(asked)
    assert peak_bytes(memory(request)) <= ROOM < peak_bytes(memory(asked))
    [cache] = [item for item in memory(request) if item.name == "KV cache"]
    taken = sum(item.bytes for item in memory(request) if item.phase in ("stays", "rollout"))
    assert taken == pytest.approx(ROOM, rel=1e-6), "keys and values take what is free"
    assert cache.bytes >= (2048 + 30000) * 147456, "of one response of an evaluation"
    may = {"batch", "offload", "micro_batch_tokens", "feature_bytes"}
    for section in type(asked.recipe).model_fields:
        before, after = (getattr(q.recipe, section).model_dump() for q in (asked, request))
        assert {key for key in before if before[key] != after[key]} <= may


def test_fitted_takes_the_faster_place_for_the_moments() -> None:
    """The host where they do not fit, or leave no room to draw many at a time; the GPU where all are drawn at once."""
    assert fitted(ask(gpu=GPUS["h200"])).recipe.update.offload
    assert fitted(ask(gpu=GPUS["h200"], processes=4)).recipe.update.offload
    assert not fitted(ask(gpu=GPUS["h200"], processes=128)).recipe.update.offload


@pytest.mark.parametrize("engine", ["local", "vllm"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-14B-Base"])
def test_more_gpus_never_take_longer_nor_more_memory(engine: Any, model: str) -> None:
    plans = [plan(fitted(ask(model=model, gpu=GPUS["h200"], processes=2**n, engine=engine))) for n in range(1, 10)]
    plans = [each for each in plans if each.fits]
    assert len(plans) >= 8
    times = [each.step_seconds - seconds(each)["collectives"] - seconds(each)["weight sync"] for each in plans]
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(times))
    stays = [bytes_by_phase(each.items)["stays"] + bytes_by_phase(each.items)["host"] for each in plans]
    assert stays == sorted(stays, reverse=True)


# ------------------------------------------------------------------------------------- seconds


def test_gathering_by_hand() -> None:
    """Nodes of 4, 100 GB/s between GPUs, 40 GB/s between nodes, of which 70 % are used."""
    small = 3 * assumptions.LATENCY
    assert gpu_time.gathering(10e9, 3, 1, BOX) == 0
    assert gpu_time.gathering(10e9, 3, 4, BOX) == pytest.approx(7.5e9 / 70e9 + small * 2)  # three quarters come in
    assert gpu_time.gathering(10e9, 3, 8, BOX) == pytest.approx(5e9 / 28e9 + small * 3)  # half, through the network
    assert gpu_time.gathering(10e9, 0, 512, BOX) == pytest.approx(10e9 * 127 / 128 / 28e9)
    fast = replace(BOX, network=400e9)
    assert gpu_time.gathering(10e9, 0, 8, fast) == pytest.approx(7.5e9 / 70e9), "what is slower decides"


def test_transfers_hide_behind_computing_but_for_a_fifth() -> None:
    assert gpu_time.exposed(10, 0) == 10
    assert gpu_time.exposed(10, 5) == pytest.approx(6)
    assert gpu_time.exposed(10, 100) == pytest.approx(2)


def test_a_step_by_hand() -> None:
    """Qwen3-8B on eight H100: every phase from its own numbers."""
    found = plan(ask(processes=8, mean_tokens=4000))
    spent, rate = seconds(found), 989e12 * 0.35
    rows, prompt, mean = 16 * 16, 150, 4000  # 128 / 8 groups of 16
    tokens, drawn = 16 * (prompt + 16 * mean), rows * mean
    context = prompt + mean  # exponential lengths
    layers, head = 36 * (4096 * 128 * 80 + 3 * 4096 * 12288), 151936 * 4096
    pairs = 16 * prompt**2 / 2 + drawn * context
    trunk, attention = 2 * layers * tokens, 4 * 36 * 4096 * pairs
    assert spent["scoring"] == pytest.approx((trunk + attention + 2 * head * drawn) / rate)

    [cache] = [item.bytes for item in found.items if item.name == "KV cache"]
    steps = mean * rows / int(cache / (147456 * context)) + 20480 - mean
    prefill = (2 * layers * 16 * prompt + 4 * 36 * 4096 * 16 * prompt**2 / 2) / rate
    read = 2 * steps * (layers + head) + drawn * context * 147456
    launches = (36 * 27 + 70) * 1.75e-6
    assert spent["drawing"] == pytest.approx(read / (3.35e12 * 0.75) + steps * launches + prefill)

    passes, numbers = 4, drawn * 4096
    assert spent["credit"] == pytest.approx(passes * numbers * (2 + 16) / (3.35e12 * 0.75))

    own = PARAMETERS / 8
    adamw = 4 * (42 * own / (3.35e12 * 0.75) + 16 * own / (64e9 * 0.7))  # offloaded: 8 bytes there, 8 back
    update = (4 * (trunk + attention) + 4 * 2 * head * drawn) / rate
    assert spent["updating"] == pytest.approx(update + adamw)

    micro = int(np.ceil(tokens / 4 / 24576))
    latency = 36 * 20e-6 * 3
    gather, scatter = (width * PARAMETERS * 7 / 8 / (450e9 * 0.7) + latency for width in (2, 4))
    transfers = int(np.ceil(4 * tokens / 4 / 24576)) * gather + 4 * micro * (2 * gather + scatter)
    assert spent["collectives"] == pytest.approx(2 * gather + 0.2 * transfers)  # two for the response that is probed
    assert spent["weight sync"] == pytest.approx(gather)
    half = seconds(plan(ask(processes=8, mean_tokens=4000, sharding="optimizer")))
    assert half["collectives"] == pytest.approx(gather + 0.2 * 4 * (gather + micro * scatter))
    assert found.step_seconds == pytest.approx(sum(spent.values()))
    assert found.hours == pytest.approx(found.step_seconds * 220 / 3600)


def test_drawing_reads_the_keys_that_the_free_memory_holds() -> None:
    request = ask("qwen3_8b.toml", "rollout.batch=128", processes=8, mean_tokens=4000)
    [cache] = [item for item in memory(request) if item.name == "KV cache"]
    context = 150 + 4000  # half of an exponential's mean square over its mean
    slots = min(128, int(cache.bytes / (147456 * context)))
    assert 1 < slots < 128
    steps = 4000 * 256 / slots + 16480
    read = steps * 2 * (PARAMETERS - 151936 * 4096) + 256 * 4000 * context * 147456
    launches = (36 * 27 + 70) * 1.75e-6
    expected = read / (3.35e12 * 0.75) + steps * launches
    assert seconds(plan(request))["drawing"] == pytest.approx(expected, rel=2e-3)  # and the prefill
    few = seconds(plan(ask("qwen3_8b.toml", "rollout.batch=2", processes=8, mean_tokens=4000)))["drawing"]
    steps = 4000 * 128 + 16480
    read = steps * 2 * (PARAMETERS - 151936 * 4096) + 256 * 4000 * context * 147456
    assert few == pytest.approx(read / (3.35e12 * 0.75) + steps * launches, rel=2e-3)


def test_vllm_draws_without_padding_and_takes_its_weights_from_files() -> None:
    request = ask(processes=8, engine="vllm", mean_tokens=2000, gpu=GPUS["b200"])
    spent = seconds(plan(request))
    steps = 20480  # all 256 responses of a process at a time
    read = steps * 2 * (PARAMETERS - 151936 * 4096) + 256 * 2000 * 2150 * 147456
    assert spent["drawing"] == pytest.approx(read / 6e12 + steps * 2e-3, rel=2e-3)
    assert spent["weight sync"] == pytest.approx(2 * 2 * PARAMETERS / 2e9, rel=0.01)
    lora = ask("qwen3_8b_lora.toml", processes=8, engine="vllm")
    assert seconds(plan(lora))["weight sync"] == pytest.approx(2 * 4 * 87.3e6 / 2e9, rel=0.01)


@pytest.mark.parametrize(("processes", "rows"), [(64, 32), (16, 128)])
def test_an_engine_over_four_gpus_draws_for_four_processes(processes: int, rows: int) -> None:
    """It reads a quarter of the weights on each, and sums twice a layer; with 16 its cache is full before 512."""
    llama = "meta-llama/Llama-3.3-70B-Instruct"
    request = ask("qwen3_8b.toml", "update.offload=true", model=llama, processes=processes, engine="vllm")
    request, parameters = replace(request, mean_tokens=2000), request.shape.parameters
    cache = 4 * (ROOM - 4 * parameters / processes - 2 * parameters / 4)
    slots = min(4 * rows, 256, cache / (2150 * 327680))
    assert slots == pytest.approx(128 if processes == 64 else 136.6, abs=0.1)
    steps = 2000 * 4 * rows / slots + 18480
    read = steps * 2 * (parameters - 128256 * 8192) / 4 + rows * 2000 * 2150 * 327680
    expected = read / (3.35e12 * 0.75) + steps * (2e-3 + 2 * 80 * 20e-6 * 2)
    assert seconds(plan(request))["drawing"] == pytest.approx(expected, rel=5e-3)


def test_gradients_that_are_not_sharded_are_summed_once_an_update() -> None:
    found = plan(ask("qwen3_8b_lora.toml", processes=4))
    assert found.layout.sharding == "none"
    request = ask("qwen3_8b_lora.toml")
    adapters = request.shape.adapters(32, request.recipe.model.lora.targets, None)  # type: ignore[union-attr]
    summed = 2 * (4 * adapters * 3 / 4 / (450e9 * 0.7) + 36 * 20e-6 * 2)
    assert seconds(found)["collectives"] == pytest.approx(0.2 * 4 * summed)
    assert seconds(found)["weight sync"] == 0


def test_credit_that_does_not_fit_is_computed_again_for_each_reduction() -> None:
    keys = ("update.feature_bytes=0", "update.feature_host_bytes=0")
    spent = seconds(plan(ask("qwen3_8b.toml", *keys, processes=8)))
    head = 2 * 151936 * 4096 * 256 * 5120 / (989e12 * 0.35)
    assert spent["credit"] == pytest.approx(4 * (spent["scoring"] - head), rel=0.01)
    assert seconds(plan(ask("qwen3_8b_dapo.toml", processes=8)))["credit"] == 0


def test_a_small_model_is_bound_by_launching_kernels() -> None:
    recipe = load_recipe(None, ["update.micro_batch_tokens=1000", "update.old_logprobs=recompute"])
    request = PlanRequest(recipe, TINY, {}, GPUS["h100"], mean_tokens=40)
    spent = seconds(plan(request))
    tokens = 8 * (150 + 16 * 40)  # of a mini-batch: 6.3 micro-batches
    assert tokens == 6320
    assert spent["updating"] == pytest.approx(4 * 7 * 3 * 3 * 0.5e-3, rel=0.01)
    assert spent["scoring"] == pytest.approx(26 * 3 * 0.5e-3, rel=0.01)


def test_more_processes_than_prompts_is_said() -> None:
    (note,) = plan(fitted(ask(processes=512, gpu=GPUS["b200"]))).notes
    assert note.startswith("384 of 512 processes have nothing to draw")
    (note,) = plan(fitted(ask(processes=64, gpu=GPUS["b200"]))).notes
    assert "has 32 prompts" in note
    assert "32 of 64 processes have nothing to do in an update" in note
    (note,) = plan(fitted(ask(processes=3, gpu=GPUS["b200"]))).notes
    assert "evenly" in note
    assert plan(fitted(ask(processes=8, gpu=GPUS["b200"]))).notes == ()
    (note,) = plan(ask(processes=4)).notes
    assert "Does not fit h100" in note
    assert "features: update.feature_bytes" in note


# -------------------------------------------------------------------------------- command line


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize("recipe", ["qwen3_8b.toml", "qwen3_8b_lora.toml", "qwen3_14b.toml", "quickstart.toml"])
@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_the_text_is_within_80_columns(recipe: str, engine: str) -> None:
    for arguments in (["--processes", "8", "--gpu", "b200"], ["--processes", "2", "--gpu", "rtx4090"]):
        result = doctor(str(RECIPES / recipe), *arguments, "--engine", engine, "--details")
        fits = result.output.startswith("FITS: ")
        assert fits or result.output.startswith("DOES NOT FIT: ")
        assert result.exit_code == (0 if fits else 1)
        assert max(map(len, result.output.splitlines())) <= 80
        assert all(line[:60] in " ".join(result.output.split()) for line in assumptions.ASSUMPTIONS)


def test_json_holds_the_same_numbers() -> None:
    recipe = str(RECIPES / "qwen3_8b.toml")
    found = json.loads(doctor(recipe, "--processes", "6", "--gpu", "H200", "--json").output)
    assert found["measured"] is False
    expected = plan(ask(processes=6, gpu=GPUS["h200"]))
    from_recipe = doctor(recipe, "--set", "parallel.processes=6", "--gpu", "h200", "--json")
    assert json.loads(from_recipe.output) == found
    assert found["plan"]["step_seconds"] == expected.step_seconds
    assert found["plan"]["bytes"] == sum(i["bytes"] for i in found["plan"]["items"] if i["phase"] == "stays") + max(
        sum(i["bytes"] for i in found["plan"]["items"] if i["phase"] == phase)
        for phase in ("rollout", "score", "update")
    )
    assert [row["processes"] for row in found["scaling"]] == [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512]
    assert found["assumptions"] == list(assumptions.ASSUMPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10"], "--gpu h10: did you mean h100?"),
        (["--gpu", "abacus"], "--gpu abacus: known are h100, h200, b200"),
        (["--gpu", "h100", "--processes", "0"], "--processes 0: choose a number from 1"),
        (["--gpu", "h100", "--engine", "trl"], "--engine trl: choose local or vllm"),
        (["--gpu", "h100", "--mean-tokens", "99"], "rollout.max_tokens = 48"),
        (["--processes", "8"], "--processes is for a plan; add the GPUs it is for"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = doctor(*arguments)
    assert isinstance(result.exception, UserError)  # main() prints it and exits with 2
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_findings_as_json_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(load_recipe(None, ["data.limit=40"]), "fake", run_model=False, json=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"system", "memory", "data"} <= {each["subject"] for each in found}
    assert all(set(each) == {"event", "level", "subject", "text"} for each in found)


def test_a_plan_needs_no_framework_and_no_download() -> None:
    code = (
        "import sys; from delta_cli.cli import app\n"
        f"try: app(['doctor', {str(RECIPES / 'qwen3_8b.toml')!r}, '--gpu', 'h100', '--processes', '4'])\n"
        "except SystemExit as end: assert end.code == 1  # it does not fit\n"
        "assert not {'torch', 'transformers', 'mlx', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_gpus_have_whole_data_sheets() -> None:
    for name, gpu in GPUS.items():
        assert find_gpu(name.upper()) is gpu
        assert 24e9 <= gpu.memory < 300e9
        assert 1e14 < gpu.flops < 1e16
        assert gpu.network / gpu.node < gpu.link < gpu.bandwidth


def test_nothing_is_scored_where_numbers_are_those_of_drawing() -> None:
    """But for the reference policy, where there is one."""
    fresh, drawn, both, reference = (
        seconds(plan(ask("qwen3_8b.toml", f"update.old_logprobs={score}", f"update.kl_coefficient={kl}", processes=8)))
        for score, kl in (("recompute", 0.0), ("rollout", 0.0), ("recompute", 0.1), ("rollout", 0.1))
    )
    assert fresh["scoring"] > 0
    assert drawn["scoring"] == 0
    assert reference["scoring"] == pytest.approx(fresh["scoring"])
    assert both["scoring"] == pytest.approx(2 * fresh["scoring"])
