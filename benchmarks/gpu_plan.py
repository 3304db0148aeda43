"""Qwen3-8B on one GPU, in about 25 minutes: kernels, decoding, scoring, an update, and three steps of the recipe.

    make gpu                                               # writes benchmarks/results/gpu_plan.json
    python benchmarks/gpu_plan.py --device cpu --tiny      # the same code with a tiny model, in a minute

The weights are random, made on the device (16 GB of bfloat16 shards). Moments are stored in 8 bits and features stay
on the device, so that 128 GiB of host memory and 64 GiB of disk are enough. Each stage runs on its own: one that fails
says why in its line of the table, and the next one begins. The JSON is written after each stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import show, write
from random_shards import TINY, Size, write_random
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from backends.interface import Engine, GraphUse, RolloutRequest, Sampling, Sequences, starts_of
from backends.settings import BackendSettings, Optimizer
from backends.torch import create
from backends.torch.backend import PAGED
from backends.torch.fused_norms import fuse_norms
from delta_cli.recipe import load_recipe, to_toml

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "qwen3_8b.toml"
Row = dict[str, Any]  # "what" was measured, a "value" in a "unit"


class Plan:
    """The stages, and what they share."""

    def __init__(self, device: str, size: Size, folder: Path) -> None:
        self.device, self.size, self.folder = device, size, folder
        self.model = folder / "model"
        self._engine: Engine | None = None

    def clock(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Seconds of one call, after two that do not count."""
        for _ in range(2):
            run()
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, gradient: bool = False) -> Tensor:
        """Random bfloat16 numbers."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16, requires_grad=gradient)

    def engine(self, **changes: Any) -> Engine:
        """An engine on the random model; the one before it is closed."""
        self.close()
        settings = {"optimizer": Optimizer(moments="int8"), "feature_host_bytes": 0, "rollout_batch": 512, **changes}
        options = {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 24576}
        self._engine = create(BackendSettings.of(str(self.model), **options, **settings), self.device)
        return self._engine

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    # ----------------------------------------------------------------------------------- stages

    def weights(self) -> Iterator[Row]:
        """Random shards of the model, a layer each, and the tokenizer of the tiny base."""
        start = time.perf_counter()
        write_random(self.model, self.size, self.device)
        yield {"what": "random weights written", "value": time.perf_counter() - start, "unit": "s"}
        start = time.perf_counter()
        engine = self.engine()
        self.wait()
        yield {
            "what": f"{engine.parameters / 1e9:.2f} billion loaded",
            "value": time.perf_counter() - start,
            "unit": "s",
        }

    def decoding(self) -> Iterator[Row]:
        """Milliseconds of a step at several contexts, in pages and in slots; whether graphs ran."""
        for paged in (True, False):
            PAGED[self.device] = paged
            engine = self.engine()
            for rows, context in self.size.contexts:
                yield self._decoded(engine, "pages" if paged else "slots", rows, context)
            if engine.slower_path:
                yield {"what": "decoding", "error": engine.slower_path}
        PAGED[self.device] = self.device == "cuda"

    def _decoded(self, engine: Engine, layout: str, rows: int, context: int) -> Row:
        """The contexts are prompts, so that no time goes into reaching them; the prefill is subtracted."""
        rng, seconds = np.random.default_rng(0), []
        prompts = tuple(rng.integers(1, 100, context) for _ in range(rows))
        for tokens in (8, 8 + self.size.decoded, 8 + 2 * self.size.decoded):
            engine.take_graph_use()
            start = time.perf_counter()
            engine.rollout(RolloutRequest(prompts, Sampling(tokens, ()), entropies=True))
            self.wait()
            seconds.append(time.perf_counter() - start)
        step = (seconds[2] - seconds[1]) / self.size.decoded
        read = 2 * (self.size.matrices + self.size.vocabulary * self.size.hidden)
        read += rows * context * self.size.key_value_bytes
        used = engine.take_graph_use() or GraphUse(launched=1)
        return {
            "what": f"decoding step in {layout}, {rows} rows × {context} tokens",
            "value": 1e3 * step,
            "unit": "ms",
            "rate": f"{read / step / 1e12:.2f} TB/s useful, {used.share:.0%} replayed",
        }

    def attention(self) -> Iterator[Row]:
        """Kernels for one packed response: now, square causal blocks, and rows of unequal length."""
        size, tokens, prompt = self.size, self.size.packed, min(152, self.size.packed // 4)
        shapes = (size.heads, tokens), (size.kv_heads, tokens + prompt), (size.kv_heads, tokens + prompt)
        query, keys, values = (self.random(1, *shape, size.head_dim, gradient=True) for shape in shapes)
        square = self.random(1, size.heads, tokens + prompt, size.head_dim, gradient=True)
        work = 4 * size.heads * size.head_dim * (tokens * prompt + tokens**2 / 2) * 3.5
        bias = causal_lower_right(tokens, tokens + prompt)

        def now() -> Tensor:
            return F.scaled_dot_product_attention(query, keys, values, bias, enable_gqa=True)

        def squared() -> Tensor:
            return F.scaled_dot_product_attention(square, keys, values, is_causal=True, enable_gqa=True)

        yield self._attended("rectangle, causal to the lower right", now, work)
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            with sdpa_kernel([getattr(SDPBackend, name), SDPBackend.MATH]):
                yield self._attended(f"square, {name}", squared, work)
        lengths = [tokens * part // 10 for part in (4, 3, 2, 1)]
        rows = self.random(sum(lengths), size.heads, size.head_dim, gradient=True)
        own = [self.random(sum(lengths), size.kv_heads, size.head_dim, gradient=True) for _ in range(2)]
        starts = torch.tensor(starts_of(lengths), device=self.device, dtype=torch.int32)

        def ragged() -> Tensor:
            from torch.nn.attention.varlen import varlen_attn

            longest, window = max(lengths), (-1, 0)
            found = varlen_attn(rows, *own, starts, starts, longest, longest, window_size=window, enable_gqa=True)
            assert isinstance(found, Tensor)
            return found

        work = 4 * size.heads * size.head_dim * sum(length**2 / 2 for length in lengths) * 3.5
        yield self._attended("four rows of unequal length, varlen", ragged, work)

    def _attended(self, what: str, run: Callable[[], Tensor], work: float) -> Row:
        try:
            seconds = self.clock(lambda: run().sum().backward())
        except Exception as error:  # a kernel that this build or device lacks
            return {"what": f"attention, {what}", "error": str(error).splitlines()[0][:100]}
        rate = f"{work / seconds / 1e12:.0f} TFLOP/s"
        return {"what": f"attention, {what}", "value": 1e3 * seconds, "unit": "ms", "rate": rate}

    def training(self) -> Iterator[Row]:
        """Scoring and accumulating one micro-batch with several chunks of the head, and a step of the optimizer."""
        size, rng = self.size, np.random.default_rng(0)
        lengths = [size.packed * part // 10 for part in (4, 3, 2, 1)]
        prompt = rng.integers(1, 100, min(150, size.packed // 4))
        tokens = rng.integers(1, 100, sum(lengths))
        batch = Sequences((prompt,) * len(lengths), tokens, starts_of(lengths))
        forward = 2 * size.matrices * size.packed
        forward += 4 * size.layers * size.heads * size.head_dim * sum(length**2 / 2 for length in lengths)
        head = 2 * size.vocabulary * size.hidden * size.packed
        for chunk in size.chunks:
            engine = self.engine(head_chunk_tokens=chunk)
            seconds = self.clock(lambda engine=engine: engine.score(batch), 2)  # type: ignore[misc]
            yield self._worked(f"scoring, chunks of {chunk}", seconds, forward + head)

            def accumulate(engine: Engine = engine) -> None:
                engine.accumulate(batch, lambda logp, _: (float(-logp.sum()), np.full(len(logp), -1e-4)))

            yield self._worked(f"update, chunks of {chunk}", self.clock(accumulate, 2), 4 * forward + 4 * head)
        policy: Any = engine._policy  # type: ignore[attr-defined]
        yield {"what": "attention without padding is used", "value": int(policy.varlen), "unit": ""}
        yield {"what": "long sequences take cuDNN's kernel", "value": int(policy.squares), "unit": ""}
        policy.squares = False
        yield self._worked("update with FlashAttention 2 alone", self.clock(accumulate, 2), 4 * forward + 4 * head)
        policy.varlen = False
        yield self._worked("update in padded rectangles", self.clock(accumulate, 2), 4 * forward + 4 * head)
        start = time.perf_counter()
        engine.step(1e-6, 1e-4)
        self.wait()
        yield {"what": "optimizer, int8 moments, first step", "value": time.perf_counter() - start, "unit": "s"}
        peak = engine.peak_memory() / 1e9
        yield {"what": "peak memory of scoring and update", "value": peak, "unit": "GB"}

    def _worked(self, what: str, seconds: float, work: float) -> Row:
        return {"what": what, "value": seconds, "unit": "s", "rate": f"{work / seconds / 1e12:.0f} TFLOP/s"}

    def layer(self) -> Iterator[Row]:
        """Two layers, forward and backward: float32 weights under autocast, and bfloat16 weights in four ways."""
        from transformers import AutoConfig, AutoModel

        self.close()
        config = AutoConfig.from_pretrained(self.model)
        config.num_hidden_layers, config.vocab_size, config.layer_types = 2, 1024, ["full_attention"] * 2
        ids = torch.zeros(1, self.size.packed, dtype=torch.long, device=self.device)
        kinds = ("under autocast", "as they are", "norms as one kernel", "feed-forwards compiled", "compiled")
        for kind in kinds[: 5 if self.device == "cuda" else 3]:
            mixed = kind == kinds[0]
            with torch.device(self.device):
                model = AutoModel.from_config(config, dtype=torch.float32 if mixed else torch.bfloat16)
            if kind == kinds[2]:
                fuse_norms(model)
            for part in model.layers if kind in kinds[3:] else ():
                (part.mlp if kind == kinds[3] else part).compile()

            def run(model: Any = model, mixed: bool = mixed) -> None:
                with torch.autocast(self.device, torch.bfloat16, enabled=mixed):
                    out = model(input_ids=ids, use_cache=False).last_hidden_state
                out.sum().backward()
                model.zero_grad()

            what = f"two layers, {'float32' if mixed else 'bfloat16'} weights, {kind}"
            yield {"what": what, "value": 1e3 * self.clock(run, 2), "unit": "ms"}

    def recipe(self) -> Iterator[Row]:
        """Three steps of the recipe with few prompts, a checkpoint, and a fourth step after resuming."""
        self.close()
        run, changed = self.folder / "run", self.folder / "recipe.toml"
        cheap = ["update.moments=int8", "update.offload=false", "update.feature_host_bytes=0", "update.mini_batches=2"]
        short = ["data.source=arithmetic", "data.template=plain", "reward.workers=2", *self.size.recipe]
        short.append("reward.flip=0.5")  # random weights answer nothing right, and an update needs both kinds
        rest = ["checkpoint.every=3", "checkpoint.keep_best=accuracy", "evaluation.every=never"]
        recipe = load_recipe(RECIPE, [f"model.path={self.model}", *cheap, *short, *rest])
        evaluation = recipe.evaluation.model_copy(update={"suite": None})  # its problems would be downloaded
        changed.write_text(to_toml(recipe.model_copy(update={"evaluation": evaluation})))
        command = [sys.executable, "-m", "delta_cli", "train", str(changed), "--quiet", "--backend", self.device]
        command += ["--run-dir", str(run)]
        for steps, more in ((3, []), (4, ["--resume"])):
            start = time.perf_counter()
            options = [*more, "--set", f"run.steps={steps}"]
            done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1])
            seconds = time.perf_counter() - start
            yield {"what": f"delta train to step {steps}, loading included", "value": seconds, "unit": "s"}
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for name in ("seconds_rollout", "seconds_score", "seconds_update", "rollout_tokens_per_second", "peak_memory"):
            value = float(np.median([record[name] for record in records if record.get(name) is not None]))
            yield {"what": f"a step's {name}", "value": value, "unit": ""}


STAGES = ("weights", "decoding", "attention", "training", "layer", "recipe")


def cell(row: Row) -> dict[str, str]:
    """A line of the table."""
    value = "failed" if "error" in row else f"{row['value']:,.3g} {row['unit']}"
    return {"what": row["what"], "measured": value, "rate": row.get("rate", row.get("error", ""))}


def main() -> None:
    """Run the stages, write the JSON after each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script itself")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which; the first makes the model")
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("make gpu needs an NVIDIA GPU; to try the script: --device cpu --tiny")
    folder, rows = Path(mkdtemp(prefix="gpu_plan")), list[Row]()
    plan = Plan(args.device, TINY if args.tiny else Size(), folder)
    try:
        for stage in STAGES:
            if stage not in args.stages:
                continue
            start = time.perf_counter()
            try:
                for row in getattr(plan, stage)():
                    rows.append({"stage": stage, **row})
                    print(json.dumps(rows[-1]), flush=True)
            except Exception as error:  # the other stages still tell something
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                rows.append({"stage": stage, "what": stage, "error": f"{type(error).__name__}: {line[:160]}"})
                print(json.dumps(rows[-1]), flush=True)
            rows.append(
                {"stage": stage, "what": f"the stage {stage}", "value": time.perf_counter() - start, "unit": "s"}
            )
            write(args.out, {"benchmark": "gpu_plan", "device": args.device, "tiny": args.tiny, "results": rows})
    finally:
        plan.close()
        rmtree(folder, ignore_errors=True)
    show("Qwen3-8B on one GPU" if not args.tiny else "a tiny model", [cell(row) for row in rows])


if __name__ == "__main__":
    main()
