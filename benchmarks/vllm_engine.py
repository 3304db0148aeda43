"""Responses drawn through vLLM's server: tokens a second, and a run that learns.

    python benchmarks/vllm_engine.py speed --python ~/vllm/bin/python --out benchmarks/results/vllm_speed.json
    python benchmarks/vllm_engine.py learning --python ~/vllm/bin/python --out benchmarks/results/vllm_learning.json

``speed``: the same token prompts, lengths, temperature and number of requests at a time through our sampler
(HTTP, a request for each response), through vLLM's own offline interface (one call with all of them, the same
environment, options and type), and through our local engine on the CPU. No response ends early: stop ids are
none, so all draw equally many tokens. Each way has the machine to itself, one after the other, ``--rounds`` times.

``learning``: the arithmetic task on a small base with heads of 32 numbers, trained beforehand to some 40 %:
``--seeds`` runs of 20 steps with the local engine, with vLLM, and with vLLM one step ahead. All runs of vLLM use
one server, which begins each with the weights of the base.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import show, write

from backends import registry
from backends.interface import BackendSettings, Engine, RolloutRequest, Sampling
from backends.vllm import Launch, Launcher, VllmSampler, VllmSettings
from delta_cli.assets.make_tiny_base import Plan, write_tokenizer
from delta_cli.assets.make_tiny_base import train as train_base
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import load_recipe
from delta_cli.training.observer import Observer
from delta_cli.training.run_folder import RunFolder, read_lines
from delta_cli.training.setup import open_trainer

OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
llm = LLM(model=asked["model"], dtype="float32", max_model_len=asked["context"], max_num_seqs=asked["concurrency"],
          logprobs_mode="processed_logprobs", generation_config="vllm")
prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
def draw(offset):
    ways = [SamplingParams(temperature=1.0, max_tokens=asked["tokens"], seed=offset + i, ignore_eos=True, logprobs=0)
            for i in range(len(prompts))]
    start = time.perf_counter()
    done = llm.generate(prompts, ways, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(each.outputs[0].token_ids) for each in done) / seconds
draw(0)
print("SPEEDS", json.dumps([draw(10_000 * (i + 1)) for i in range(asked["rounds"])]))
"""


def write_base(folder: Path, hidden: int = 64) -> Path:
    """A Qwen3 whose heads vLLM's CPU attention takes."""
    write_tokenizer(folder)
    vocabulary = Tokenizer.load(str(folder)).vocab_size
    write_qwen3(folder, vocab_size=vocabulary, hidden=hidden, heads=2, kv_heads=2, head_dim=32, intermediate=3 * hidden)
    return folder


# --------------------------------------------------------------------------------------- speed


def speed(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Tokens a second of the three ways."""
    model = write_base(scratch / "model", options.hidden)
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(1, 250, size=64) for _ in range(options.prompts))
    sampling = Sampling(options.tokens, (), samples=options.samples)
    trainer = registry.create("cpu", BackendSettings(model=str(model), rollout_batch=options.concurrency))
    found = {"offline": _offline(options, model, prompts)}

    launch = Launch(str(model), "float32", 64 + options.tokens, options.concurrency)
    sampler = VllmSampler(
        VllmSettings(inbox=scratch / "inbox", concurrency=options.concurrency),
        Launcher(launch, options.python, scratch / "vllm.log", print),
    )
    try:
        sampler.load_weights(trainer.publish(sampler.inbox))
        found["ours over HTTP"] = _timed(sampler.rollout, prompts, sampling, options.rounds)
    finally:
        sampler.close()
    found["local engine"] = _timed(trainer.rollout, prompts, sampling, options.rounds)
    return found


def _timed(
    rollout: Callable[[RolloutRequest], Any], prompts: tuple[Any, ...], sampling: Sampling, rounds: int
) -> list[float]:
    speeds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        done = rollout(RolloutRequest(prompts, sampling))
        speeds.append(len(done.tokens) / (time.perf_counter() - start))
    return speeds[1:]


def _offline(options: argparse.Namespace, model: Path, prompts: tuple[Any, ...]) -> list[float]:
    asked = {
        "model": str(model),
        "context": 64 + options.tokens,
        "concurrency": options.concurrency,
        "prompts": [prompt.tolist() for prompt in prompts for _ in range(options.samples)],
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    done = subprocess.run(
        [options.python, "-c", OFFLINE, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"vLLM's offline interface failed:\n{done.stderr[-3000:]}")
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("SPEEDS ")]  # vLLM logs there as well
    return list(json.loads(told.removeprefix("SPEEDS ")))


# ------------------------------------------------------------------------------------ learning


def learning(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Held-out accuracy after 20 steps, and seconds a step, of each way and seed."""
    base = _trained_base(scratch)
    launcher = Launcher(Launch(str(base), "float32", 128, 128), options.python, scratch / "vllm.log", print)
    ways = {"local": {"kind": "local"}} | {
        f"vllm, ahead = {ahead}": {"kind": "vllm", "ahead": ahead, "inbox": str(scratch / "inbox")} for ahead in (0, 1)
    }
    try:
        untied = scratch / "served"
        _untied(base, untied)
        url = launcher.start(str(untied)).url
        return {
            name: [_run(base, engine, url, seed, scratch / f"{name}-{seed}") for seed in range(options.seeds)]
            for name, engine in ways.items()
        }
    finally:
        launcher.stop()


def _trained_base(scratch: Path) -> Path:
    start, base = write_base(scratch / "start"), scratch / "base"
    engine: Engine = registry.create("cpu", BackendSettings(model=str(start)))
    accuracy = train_base(engine, Tokenizer.load(str(start)), Plan())
    engine.export(base)
    engine.close()
    print(f"base: {accuracy:.1%}", flush=True)
    return base


def _untied(base: Path, folder: Path) -> None:
    import shutil

    from backends.vllm.folder import untie

    shutil.copytree(base, folder)
    untie(folder)


def _run(base: Path, engine: dict[str, Any], url: str, seed: int, folder: Path) -> dict[str, float]:
    keys = {
        "model.path": str(base),
        "run.steps": 20,
        "run.seed": seed,
        "update.learning_rate": 1e-3,
        "update.mini_batches": 2,
        "evaluation.every": 20,
        "evaluation.problems": 250,
    } | {f"engine.{name}": value for name, value in engine.items()}
    if engine["kind"] == "vllm":
        keys["engine.url"] = [url]
    recipe = load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in keys.items()])
    with open_trainer(recipe, "cpu", folder, Observer()) as trainer:
        trainer.run()
    metrics = list(read_lines(RunFolder(folder).metrics))
    evaluation = list(read_lines(RunFolder(folder).evaluations))[-1]
    middle = {name: statistics.median(each[name] for each in metrics[1:]) for name in ("seconds", "seconds_rollout")}
    trained = [sum(each[f"seconds_{phase}"] for phase in ("score", "credit", "update")) for each in metrics[1:]]
    found = {name: evaluation[name] for name in ("accuracy", "low", "high")} | middle
    found |= {"seconds_trained": statistics.median(trained)}
    print(folder.name, found, flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "learning"))
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        if options.what == "speed":
            found = speed(options, Path(scratch))
            middle = {name: statistics.median(speeds) for name, speeds in found.items()}
            rows = [
                {"way": name, "tokens/s": f"{value:,.0f}", "of offline": f"{value / middle['offline']:.2f}"}
                for name, value in middle.items()
            ]
        else:
            found = learning(options, Path(scratch))
            rows = [
                {"way": name, "seed": str(seed)} | {key: f"{value:.3f}" for key, value in run.items()}
                for name, runs in found.items()
                for seed, run in enumerate(runs)
            ]
    show(f"vLLM, {options.what}", rows)
    write(options.out, {"settings": {**vars(options), "python": ""}, "results": found})


if __name__ == "__main__":
    main()
