"""Responses drawn through vLLM's server: tokens a second, runs that learn, and steps that draw one batch ahead.

    python benchmarks/vllm_engine.py speed --python ~/vllm/bin/python --out benchmarks/results/vllm_speed.json
    python benchmarks/vllm_engine.py learning --python ~/vllm/bin/python --out benchmarks/results/vllm_learning.json
    python benchmarks/vllm_engine.py ahead --python ~/vllm/bin/python --out benchmarks/results/vllm_ahead.json

``speed``: the same token prompts, lengths, temperature and number of requests at a time through our sampler
(HTTP, a request for each response), through vLLM's own offline interface (one call with all of them, the same
environment, options and type), and through our local engine on the CPU. No response ends early: stop ids are
none, so all draw equally many tokens. The ways take turns, ``--rounds`` times, and are compared within each round.

``learning``: the embedded task and base, its heads widened to 32 numbers (``wide_heads.py``): ``--seeds`` runs of 20
steps with the local engine, with vLLM, and with vLLM one step ahead. All runs of vLLM use one server, which begins
each with the weights of the base.

``ahead``: seconds a step of such runs, with the server on one core and the trainer on another.

Runs that are done are kept in ``--keep`` and not done again, so these two can be broken off, or done in pieces
(``--only``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from common import median_ratio, show, write
from make_tiny_base import write_tokenizer
from wide_heads import write_wide

from backends import registry
from backends.interface import Ids, PublishedWeights, RolloutRequest, Sampler, Sampling
from backends.settings import BackendSettings, EngineSection
from backends.vllm import ServedModel, ServerLauncher, VllmSampler
from backends.vllm.folder import untie
from delta_cli.assets import model_path
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.observer import Observer
from delta_cli.training.setup import open_trainer

Results = dict[str, Any]
Draw = Callable[[int], int]  # responses with a seed; how many tokens they have

MEMORY = 0.1  # of the machine's, for a server
SERVERS, TRAINERS = {0}, {1}  # cores
WAYS: dict[str, dict[str, Any]] = {
    "local": {"kind": "local"},
    "vllm": {"kind": "vllm", "async_steps": 0},
    "vllm ahead": {"kind": "vllm", "async_steps": 1},
}
KEYS = {"update.mini_batches": 2}
LEARNING = {"run.steps": 20, "evaluation.every": 20, "evaluation.problems": 250}
TIMING = {"run.steps": 12, "evaluation.every": "never", "rollout.prompts": 24, "rollout.responses": 16}

OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
llm = LLM(model=asked["model"], dtype="float32", max_model_len=asked["context"], max_num_seqs=asked["concurrency"],
          logprobs_mode="processed_logprobs", generation_config="vllm", gpu_memory_utilization=asked["memory"],
          enable_chunked_prefill=False)
prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
for line in sys.stdin:
    seed = 10_000 * int(line)
    ways = [SamplingParams(temperature=1.0, max_tokens=asked["tokens"], seed=seed + i, ignore_eos=True, logprobs=0)
            for i in range(len(prompts))]
    done = llm.generate(prompts, ways, use_tqdm=False)
    print("DREW", sum(len(each.outputs[0].token_ids) for each in done), flush=True)
"""


def write_base(folder: Path, hidden: int = 64, layers: int = 2) -> Path:
    """A Qwen3 whose heads vLLM's CPU attention takes."""
    write_tokenizer(folder)
    vocabulary = Tokenizer.load(str(folder)).vocab_size
    heads = hidden // 32
    shape: dict[str, Any] = {"heads": heads, "kv_heads": heads, "head_dim": 32, "layers": layers}
    write_qwen3(folder, vocab_size=vocabulary, hidden=hidden, intermediate=3 * hidden, **shape)
    return folder


# --------------------------------------------------------------------------------------- speed


def speed(options: argparse.Namespace) -> Results:
    """Tokens a second of the three ways in each round."""
    model = write_base(options.keep / "speed-model", options.hidden, options.layers)
    prompts = tuple(np.random.default_rng(0).integers(1, 250, size=64) for _ in range(options.prompts))
    trainer = registry.create("cpu", BackendSettings.of(str(model), rollout_batch=options.concurrency))

    def through(draws: Sampler) -> Draw:
        sampling = Sampling(options.tokens, (), samples=options.samples)
        return lambda seed: len(draws.rollout(RolloutRequest(prompts, replace(sampling, seed=seed))).tokens)

    engine = EngineSection(
        kind="vllm", launch=True, python=options.python, concurrency=options.concurrency, memory=MEMORY
    )
    served = ServedModel(str(model), "float32", 64 + options.tokens)
    launcher = ServerLauncher(served, engine, options.keep / "vllm.log", print)
    sampler = VllmSampler(engine, launcher, inbox=options.keep / "inbox")
    launcher.check()
    with closing(sampler), _offline(options, model, prompts) as offline:
        sampler.load_weights(trainer.publish(sampler.inbox))
        ways = {"offline": offline, "ours over HTTP": through(sampler), "local engine": through(trainer)}
        speeds: Results = {name: [] for name in ways}
        for seed in range(options.rounds + 1):
            for name, draw in ways.items():
                start = time.perf_counter()
                speeds[name].append(draw(seed) / (time.perf_counter() - start))
            print({name: f"{found[-1]:.0f}" for name, found in speeds.items()}, flush=True)
    return {name: found[1:] for name, found in speeds.items()}


@contextmanager
def _offline(options: argparse.Namespace, model: Path, prompts: tuple[Ids, ...]) -> Iterator[Draw]:
    """vLLM's own interface, in a process of its environment."""
    asked = {
        "model": str(model),
        "context": 64 + options.tokens,
        "concurrency": options.concurrency,
        "prompts": [prompt.tolist() for prompt in prompts for _ in range(options.samples)],
        "tokens": options.tokens,
        "memory": MEMORY,
    }
    command = [options.python, "-c", OFFLINE, json.dumps(asked)]
    with (
        (options.keep / "offline.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None

        def draw(seed: int) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            print(seed, file=process.stdin, flush=True)
            for line in process.stdout:  # vLLM logs there as well
                if line.startswith("DREW "):
                    return int(line.split()[1])
            raise SystemExit(f"vLLM's offline interface ended; its log is {log.name}")

        yield draw
        process.stdin.close()


# ------------------------------------------------------------------------------------ learning


def learning(options: argparse.Namespace) -> Results:
    """Held-out accuracy after 20 steps of each way and seed."""
    return _runs(options, "learning", range(options.seeds), _learn, LEARNING)


def ahead(options: argparse.Namespace) -> Results:
    """Seconds of the steps of each way, and of what they are made of."""
    return _runs(options, "ahead", range(1), _step_times, TIMING)


def _runs(
    options: argparse.Namespace, what: str, seeds: range, run: Callable[[Recipe, Path], Any], keys: dict[str, Any]
) -> Results:
    """Each way's run of each seed; what ``run`` found in it, by name."""
    base = options.keep / "base"
    if not base.exists():
        write_wide(Path(model_path("tiny-base")), base)
    pinned = what == "ahead"
    with ExitStack() as stack:

        @cache
        def url() -> str:
            return stack.enter_context(_server(options, base, pinned))

        def of(engine: dict[str, Any], seed: int, name: str) -> Any:
            changes = KEYS | keys | {"model.path": str(base), "run.seed": seed, "update.learning_rate": options.rate}
            changes |= {f"engine.{key}": value for key, value in engine.items()}
            if engine["kind"] == "vllm":
                changes |= {"engine.url": [url()], "engine.inbox": str(options.keep / "inbox")}
            if pinned:
                os.sched_setaffinity(0, TRAINERS)
            folder = options.keep / name
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
            return run(load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in changes.items()]), folder)

        names = {f"{what}, {way}, seed {seed}": (engine, seed) for seed in seeds for way, engine in WAYS.items()}
        return _kept(options, {name: partial(of, *of_what, name) for name, of_what in names.items()})


@contextmanager
def _server(options: argparse.Namespace, base: Path, pinned: bool) -> Iterator[str]:
    """The address of a server on the base, its head written out."""
    served = options.keep / "served"
    shutil.copytree(base, served, dirs_exist_ok=True)
    untie(served)
    engine = EngineSection(
        kind="vllm",
        launch=True,
        python=options.python,
        concurrency=128,
        memory=MEMORY,
        arguments=("--enforce-eager",),  # up sooner
    )
    launcher = ServerLauncher(ServedModel(str(served), "float32", 128), engine, options.keep / "vllm.log", print)
    launcher.check()
    if pinned:  # children have the affinity of who starts them
        os.sched_setaffinity(0, SERVERS)
    try:
        yield launcher.start().url
    finally:
        launcher.stop()


def _learn(recipe: Recipe, folder: Path) -> dict[str, float]:
    with open_trainer(recipe, "cpu", folder, Observer()) as trainer:
        trainer.run()
    first, last = (list(read_lines(RunFolder(folder).evaluations))[place] for place in (0, -1))
    lags = [record["staleness"] for record in read_lines(RunFolder(folder).metrics)]
    return {"before": first["accuracy"], "lag": statistics.median(lags)} | {
        name: last[name] for name in ("accuracy", "low", "high")
    }


def _step_times(recipe: Recipe, folder: Path) -> dict[str, float]:
    """Medians over all steps but the first two and the last, seconds.

    Loading new weights and proving them is a part of drawing with ahead = 1 and of the update without.
    """
    spent: list[float] = []
    with open_trainer(recipe, "cpu", folder, Observer()) as trainer:
        sampler = trainer.worker.sampler
        load = sampler.load_weights

        def timed(weights: PublishedWeights) -> None:
            start = time.perf_counter()
            load(weights)
            spent.append(time.perf_counter() - start)

        sampler.load_weights = timed  # type: ignore[method-assign]
        trainer.run()
    records = list(read_lines(RunFolder(folder).metrics))[2:-1]
    loading = 0.0 if recipe.engine.kind == "local" else statistics.median(spent[2:])

    def middle(*phases: str) -> float:
        return float(statistics.median(sum(record[f"seconds_{phase}"] for phase in phases) for record in records))

    drawing, training = middle("rollout", "reward"), middle("score", "credit", "update")
    return {
        "step": statistics.median(record["seconds"] for record in records),
        "drawing": drawing - (loading if recipe.engine.async_steps else 0),
        "training": training - (0 if recipe.engine.async_steps else loading),
        "loading": loading,
    }


# ---------------------------------------------------------------------------------------- all


def _kept(options: argparse.Namespace, parts: dict[str, Callable[[], Any]]) -> Results:
    """What each part found, now or in a call before; those that are not in ``--only`` are left out until they are."""
    found = {}
    for name, part in parts.items():
        file = options.keep / f"{name}.json"
        if not file.exists() and (options.only is None or options.only in name):
            told = part()
            print(name, told, flush=True)
            file.write_text(json.dumps(told))
        if file.exists():
            found[name] = json.loads(file.read_text())
    return found


def _rows(what: str, found: Results) -> list[dict[str, str]]:
    if what != "speed":
        return [{"run": name} | {key: f"{value:.3f}" for key, value in run.items()} for name, run in found.items()]
    return [
        {
            "way": name,
            "tokens/s": f"{statistics.median(speeds):,.0f}",
            "of offline": f"{median_ratio(speeds, found['offline']):.2f}",
        }
        for name, speeds in found.items()
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "learning", "ahead"))
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--keep", type=Path, default=Path("build/vllm_engine"), help="folder for what is done")
    parser.add_argument("--only", help="do the parts whose name has this in it")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the runs")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.keep = options.keep.absolute()
    options.keep.mkdir(parents=True, exist_ok=True)
    found = {"speed": speed, "learning": learning, "ahead": ahead}[options.what](options)
    show(f"vLLM, {options.what}", _rows(options.what, found))
    settings = {name: value for name, value in vars(options).items() if name not in ("python", "keep", "only", "out")}
    write(options.out, {"settings": settings, "results": found})


if __name__ == "__main__":
    main()
