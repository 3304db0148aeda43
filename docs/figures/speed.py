"""Figures of speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from results import Named, listed, result, span, table


def _speed() -> Named:
    yield "step.speedup", f"{result('step')['results']['delta, as drawn']['speedup']:.1f}"
    vocabulary = result("step_vocabulary")["results"]
    yield "step_vocabulary.speedup", f"{vocabulary['delta']['speedup']:.1f}"
    yield "step_vocabulary.memory", f"{_memory(vocabulary, 'delta'):.2f}"
    yield "step.table", table(STEP_HEADER, (_step_row(name, what) for name, what in STEPS.items()))
    yield "step_mlx.table", table(MLX_HEADER, (_mlx_row(name) for name in ("step_mlx", "step_mlx_shared")))
    for name in ("step_mlx", "step_mlx_shared"):
        yield f"{name}.products", f"{result(f'{name}_products')['results']['delta, as drawn']['fewer']:.2f}"
    yield from _mlx_memory()
    yield from _mlx_pieces()
    yield "hybrid.ratio", f"{result('hybrid_update')['ratio']:.2f}"
    yield "delta_step.share", f"{100 * result('delta_step_two_threads')['results']['credit_share']:.1f}"


STEP_HEADER = ("responses", "TRL", '`"recompute"`', "", '`"rollout"`, the default here', "", "peak memory, of TRL's")
STEPS = {
    "step": "16 to 128 tokens",
    "step_half": "the same, half the groups with zero variance",
    "step_equal": "all of 128 tokens, so that TRL computes the same products",
}
MLX_HEADER = ("prompt and response", "mlx-lm-lora", '`"recompute"`', "", '`"rollout"`, the default here', "")


def _step_row(name: str, what: str) -> list[str]:
    results = result(name)["results"]
    return [what, *_ways(results, "TRL"), f"{_memory(results, 'delta, as drawn'):.2f}"]


def _memory(results: dict[str, Any], way: str) -> float:
    """Peak memory of the process as a share of TRL's."""
    return float(results[way]["memory"]["peak"] / results["TRL"]["memory"]["peak"])


def _mlx_row(name: str) -> list[str]:
    work = result(name)["workload"]
    return [f"{work['prompt']} and {work['response']} tokens", *_ways(result(name)["results"], "mlx-lm-lora")]


def _mlx_memory() -> Named:
    """Peak MiB of the update of a long response, ours and mlx-lm's, without and with gradient checkpointing."""
    hybrid = next(row for row in result("update_mlx")["results"] if row["update"] == "hybrid")
    yield "update_mlx.hybrid", f"{hybrid['mlx-lm, s'] / hybrid['delta, s']:.1f}"
    rows = [row for row in result("update_mlx")["results"] if row["update"] == "causal"]
    for who, name in (("delta", "ours"), ("mlx-lm", "whole")):
        for row in rows:
            end = ".checkpointed" if row["checkpointing"] else ""
            yield f"update_mlx.{name}{end}", f"{row[f'{who}, MiB']:.0f}"


def _mlx_pieces() -> Named:
    """The gated delta rule by chunks against mlx-lm's operations, and the head against mx.fast.cross_entropy."""
    chunks, tokens, ours, fast = result("pieces_mlx")["results"]
    yield "pieces_mlx.faster", f"{tokens['s'] / chunks['s']:.1f}"
    yield "pieces_mlx.operations", f"{chunks['operations']:,}"
    yield "pieces_mlx.operations_of_mlx_lm", f"{tokens['operations']:,}"
    yield "pieces_mlx.memory", f"{tokens['MiB'] / chunks['MiB']:.1f}"
    yield "pieces_mlx.head", f"{ours['MiB']:.0f}"
    yield "pieces_mlx.cross_entropy", f"{fast['MiB']:.0f}"


def _ways(results: dict[str, Any], other: str) -> Iterator[str]:
    """Seconds of the other trainer, then of both ways to get old log-probs, each with its speedup."""
    yield f"{results[other]['step']:.1f} s"
    for way in ("delta", "delta, as drawn"):
        yield from (f"{results[way]['step']:.1f} s", f"{results[way]['speedup']:.2f}×")


def _count_8b() -> Named:
    """Drawing and a whole step of Qwen3-8B on one H200, counted and simulated."""
    found = result("count_8b")
    for name, drawing in found["drawing"].items():
        yield f"count_8b.{name}", f"{drawing['seconds']:,.0f}"
        yield f"count_8b.{name}_speed", f"{drawing['tokens_per_second']:,.0f}"
        yield f"count_8b.{name}_step", f"{found['step_seconds'][name]:,.0f}"
    for way, phases in found["counted_layers"].items():
        for phase, seconds in phases.items():
            yield f"count_8b.{way}.{phase}", f"{seconds:,.0f}"
    yield "count_8b.step", f"{found['counted_step_seconds']:,.0f}"
    yield "count_8b.rows", f"{found['drawing']['pages']['rows']:.0f}"


def _real() -> Named:
    """A step of SmolLM2: on two cores, on an H100, and with half the groups of zero variance."""
    times, ways = result("real")["times_as_fast"], result("real")["results"]["ours"]["ways"]
    yield "real.speedup", span((times["fresh"], times["as drawn"]), 1)
    yield "real.memory", f"{result('real')['times_the_memory']:.2f}"
    for name, way in (("recompute", "fresh"), ("rollout", "as drawn"), ("again", "every response")):
        yield f"real.{name}", f"{ways[way]['step']:.1f}"
    for side, row in result("real")["results"].items():
        yield f"real.{side}.peak", f"{row['peak_bytes'] / 1e9:.1f}"
    yield "real.trl.step", f"{result('real')['results']['trl']['step']:.0f}"
    ways = result("real_unmixed")["results"]["ours"]["ways"]
    yield "real_unmixed.table", table(PHASES_HEADER, (_phases(ways[way], what) for way, what in PHASES.items()))
    for phase, share in ways["every response"]["of_peak"].items():
        yield f"real_unmixed.{phase}", f"{100 * share:.0f}"


PHASES_HEADER = ("", "rollout", "score", "update", "step", "")
PHASES = {
    "every response": "every response scored and updated on",
    "fresh": 'without zero-variance groups, `"recompute"`',
    "as drawn": 'without zero-variance groups, `"rollout"`',
}


def _phases(way: dict[str, Any], what: str) -> list[str]:
    seconds = [way["seconds"][phase] for phase in ("rollout", "score", "update")]
    times = [f"{value:.1f} s" if value > 0.05 else "" for value in [*seconds, way["step"]]]
    return [what, *times, "" if way["faster"] == 1 else f"{way['faster']:.2f}×"]


def _bfloat16() -> Named:
    """What 48 steps reach in bfloat16 with old log-probs from either place."""
    ways = result("h100/real_bfloat16")["update.score"]
    for way, name in (("fresh", "recompute"), ("rollout", "rollout")):
        yield f"bfloat16.{name}", listed(run["accuracy"][-1]["accuracy"] for run in ways[way])
        yield f"bfloat16.{name}.gap", span((run["ratio_gap_first"]["mean"] for run in ways[way]), 2)
        yield f"bfloat16.{name}.worst", f"{max(run['ratio_gap_first']['max'] for run in ways[way]):.2f}"
    yield "bfloat16.before", listed(run["accuracy"][0]["accuracy"] for run in ways["fresh"])


def _gpu() -> Named:
    """Steps on an H100."""
    real = result("h100/real")
    yield "h100.real.speedup", span((real["times_as_fast"]["fresh"], real["times_as_fast"]["as drawn"]), 1)
    yield "h100.real.memory", f"{real['times_the_memory']:.2f}"
    ours, trl = real["results"]["ours"], real["results"]["trl"]
    rows = [["TRL", "", "", "", f"{trl['step']:.2f}", "", f"{trl['peak_bytes'] / 1e9:.1f}"]]
    for way, what in (("fresh", '"recompute"'), ("as drawn", '"rollout"')):
        seconds = [ours["ways"][way]["seconds"][phase] for phase in ("rollout", "score", "update")]
        times = [f"{value:.2f}" for value in (*seconds, ours["ways"][way]["step"], real["times_as_fast"][way])]
        rows.append([f"ours, `update.old_logprobs = {what}`", *times, f"{ours['peak_bytes'] / 1e9:.1f}"])
    header = ("", "rollout, s", "score, s", "update, s", "step, s", "times as fast as TRL", "peak memory, GB")
    yield "h100.real.table", table(header, rows)
    for phase, share in ours["ways"]["fresh"]["of_peak"].items():
        yield f"h100.real.{phase}", f"{100 * share:.0f}"
    step = result("h100/step")["results"]
    yield "h100.step.ours", f"{step['delta']['step']:.2f}"
    yield "h100.step.trl", f"{step['TRL']['step']:.2f}"
    yield "h100.step.speedup", f"{step['delta']['speedup']:.2f}"
    for phase in ("rollout", "update"):
        yield f"h100.step.{phase}", f"{step['delta']['seconds'][phase]:.1f}"


def _vllm() -> Named:
    speed = result("vllm_speed")["results"]
    for name, way in (("ours", "ours over HTTP"), ("offline", "offline"), ("local", "local engine")):
        yield f"vllm_speed.{name}", f"{median(speed[way]):,.0f}"
    ratios = [ours / offline for ours, offline in zip(speed["ours over HTTP"], speed["offline"], strict=True)]
    yield "vllm_speed.ratio", f"{median(ratios):.2f}"
    ahead = result("vllm_ahead")["results"]
    yield "vllm_ahead.sync.step", f"{ahead['ahead, vllm, seed 0']['step']:.2f}"
    row = ahead["ahead, vllm ahead, seed 0"]
    yield from ((f"vllm_ahead.async.{phase}", f"{seconds:.2f}") for phase, seconds in row.items())
    yield "vllm_ahead.ratio", f"{row['step'] / max(row['drawing'], row['training']):.2f}"


def _processes() -> Named:
    found = result("parallel")["parallel"]
    for sharding in ("none", "full"):
        yield f"parallel.{sharding}.time", f"{found['time'][sharding]['ratio']:.2f}"
    yield "parallel.kept", f"{found['memory']['full']['kept']:.2f}"
    for sharding in ("full", "optimizer"):
        yield f"parallel.{sharding}.memory", f"{found['memory'][sharding]['resident']:.2f}"
    ranks = result("ranks")["results"]
    for name, choose in (("least", min), ("most", max)):
        yield f"ranks.{name}", f"{choose(each['total_seconds'] for each in ranks):.1f}"
    loading = result("load_ranks")["memory"]
    for way, shares in loading.items():
        yield f"load_ranks.{way}", f"{shares[1]:.2f}"
    yield "load_ranks.reader", f"{loading['first'][0]:.2f}"
    for row in result("prompt_queue")["results"]:
        yield f"prompt_queue.last_{row['slots']}", f"{row['fixed, last over mean']:.2f}"
        yield f"prompt_queue.saved_{row['slots']}", f"{row['fixed over queue']:.2f}"
    hang = result("hang")["hang"]
    yield "hang.trials", str(hang["trials"])
    yield "hang.timeout", f"{hang['timeout']:g}"
    yield "hang.timeout_seconds", f"{max(hang['ended_by_timeout']):.0f}"
    yield "hang.ctrl_c_seconds", f"{max(hang['ended_by_ctrl_c']):.0f}"
    yield "ranks.beyond", f"{max(each['megabytes_beyond'] for each in ranks):.0f}"


def _inside_trl() -> Named:
    """What DelTA adds to a step of TRL's, and what the core computes on vectors of N numbers alone."""
    found = result("trl_step")["results"]
    for name, way in (("scores", "TRL scores"), ("not", "TRL does not")):
        yield f"trl_step.{name}.ratio", f"{found[way]['ratio']:.2f}"
        yield f"trl_step.{name}.inside", f"{100 * found[way]['inside']:.{1 if name == 'scores' else 0}f}"
    row = result("credit_on_n")["results"][0]
    yield "credit.on_n", f"{1000 * row['seconds_on_n_alone']:.0f}"
    yield "credit.all", f"{1000 * row['ours']['seconds']:.0f}"


def _first_hour() -> Named:
    """What a newcomer waits for, idle and loaded, and a step of the quickstart beside busy processes."""
    quiet, loaded = result("newcomer")["runs"]
    yield "newcomer.quiet", span((row["load"] for row in quiet), 1)
    yield "newcomer.loaded", span(row["load"] for row in loaded)
    cells = (
        [what, *(f"{row['seconds']:.0f} s" for row in pair)]
        for what, *pair in zip(NEWCOMER, quiet, loaded, strict=True)
    )
    yield "newcomer.table", table(NEWCOMER_HEADER, cells)
    rows = result("busy")["rows"]
    half = len(rows) // 2
    pairs = zip(rows[:half], rows[half:], strict=True)
    yield "busy.table", table(BUSY_HEADER, ([idle["setting"], _step(idle), _step(busy)] for idle, busy in pairs))


NEWCOMER_HEADER = ("what you type", "idle", "loaded")
NEWCOMER = (
    "`git clone` and `make quickstart`",
    "`delta init --data my.jsonl` and a first step",
    "`delta compare runs/quickstart-1`",
    "`delta study` with four learning rates, three seeds and five steps",
)
BUSY_HEADER = ("threads", "idle", "beside eight busy processes")


def _step(row: dict[str, Any]) -> str:
    """Median seconds of a step."""
    seconds = row["seconds_of_a_step"]
    return f"{seconds:.2f} s" if seconds else f"none in {row['wall_seconds']:.0f} s"


def _graders() -> Named:
    counts = result("math_verify_cases")["results"]
    for name, count in (
        ("pairs", "pairs"),
        ("expected", "as expected"),
        ("refused", "refused"),
        ("accepted", "accepted"),
    ):
        yield f"math_verify.{name}", str(counts[count])


SOURCES = (_graders, _count_8b, _speed, _real, _bfloat16, _gpu, _vllm, _processes, _inside_trl, _first_hour)
