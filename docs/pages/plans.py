"""The pages about memory and time, which are arithmetic: memory.md, scale.md, paper_hours.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pages.markdown import HEAD, bullets, table

from delta_cli.doctor import plan_text
from delta_cli.doctor.assumptions import ASSUMPTIONS
from delta_cli.doctor.gpus import GPUS
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, estimate_memory, peak_bytes, pooled
from delta_cli.doctor.model_shape import KNOWN, shape_of
from delta_cli.doctor.plan import RunPlan, fitted, plan
from delta_cli.doctor.plan_request import SAMPLERS, PlanRequest, SamplerKind
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.study.plan import load_study

RECIPES = Path(__file__).parents[2] / "recipes"


def memory() -> str:
    """What two recipes need, item by item, and what the moments' keys change."""
    parts = [
        HEAD,
        "# Where the memory goes\n",
        "What a run needs on CUDA, as `delta doctor RECIPE` and `delta train RECIPE --dry-run` work it out for any\n"
        "recipe on any machine. A gigabyte here is 10⁹ bytes. Phases do not overlap: the most that is needed at a\n"
        "time is what stays, and the largest of rollout, scoring and update. CUDA's own context and the gaps between\n"
        "allocations come on top, for which the recipes leave a tenth. Keys and values take what is free, and need\n"
        "room for one response of the longest. This is arithmetic. No model of this size has run here yet;\n"
        "[torch.md](torch.md#on-a-gpu) says what has.\n",
    ]
    for name, gpu in (("qwen3_8b.toml", 141), ("qwen3_8b_lora.toml", 24)):
        items, header = _items(name, gpu=gpu * 1e9), ("phase", "what", "GB", "arithmetic", "made smaller by")
        rows = [row for phase in bytes_by_phase(items) for row in _phase(phase, items)]
        needs = f"Most at a time on the device: **{peak_bytes(items) / 1e9:.1f} GB**, for one GPU of {gpu} GB.\n"
        parts += [f"## recipes/{name}\n", needs, table(header, rows)]
    packed = table(("model", "weights, GB", *(f"{size} GB" for size in SMALL_GPUS)), _packed())
    return "\n".join(
        [*parts, FOUR_BITS, packed, MOMENTS, table(("", "most on the device, GB", "on the host, GB"), _choices())]
    )


SMALL_GPUS = (16, 24, 48)
FOUR_BITS = """## Adapters on 4 bits

`model.load_in_4bit = true` keeps the matrices of the layers in 4 bits (NF4, by bitsandbytes); embeddings and head stay
in 16 bits. The table uses `recipes/qwen3_8b_lora.toml` with it, with `model.gradient_checkpointing` and with
`update.micro_batch_tokens = 4096`. It says how many responses can be drawn at a time (`rollout.batch`) if a tenth of
the GPU stays free; drawing more at a time only makes it faster. A dash means that not even one fits.
"""


def _packed() -> Iterator[tuple[str, ...]]:
    """For each model, the largest rollout.batch on each GPU."""
    for model in ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-14B-Base", "Qwen/Qwen3-32B"):
        keys = [f"model.path={model}", "model.load_in_4bit=true", "model.gradient_checkpointing=true"]
        keys += ["update.micro_batch_tokens=4096"]
        fits = {
            batch: peak_bytes(_items("qwen3_8b_lora.toml", *keys, f"rollout.batch={batch}"))
            for batch in (1, 2, 4, 8, 16, 32, 64)
        }
        weights = next(item for item in _items("qwen3_8b_lora.toml", *keys) if item.name == "weights").bytes
        most = (max((batch for batch, size in fits.items() if size <= 0.9e9 * gpu), default=None) for gpu in SMALL_GPUS)
        yield model, _gigabytes(weights), *("–" if batch is None else str(batch) for batch in most)


MOMENTS = """## AdamW's moments

The moments are twice as large as what is trained, and are needed only during an update. `update.offload = true` keeps
them in host memory. An update brings them to the device 256 MiB at a time, computes there as always and sends them
back; one piece is on its way back while the next one comes. Weights and checkpoints are the same bit for bit, and a
run may continue with or without it. The cost is the transfer: 8 bytes for each trained number to the device and back,
in every update.

`update.moments = "int8"` stores one byte for each number and a float32 scale for each block of 256, as in
[8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861). Weights with fewer than 4096 numbers
keep float32 moments. The second moment is stored as its square root, without a code for 0. In the published form it
can be rounded to 0 while the first moment is not, and then the update is divided by epsilon alone. With gradients
whose sizes within a block spread as exp(2·N(0, 1)), the largest of 60 updates was more than 100 times as large as
float32's in that form, and 1.5 times as large in ours. On noisy least squares the loss ends 4 % above float32's
(`tests/backends/test_torch_optimizer.py` has both). A run in 8 bits is resumed bit for bit, but it is not the run in
float32.

MLX refuses both keys: on a Mac the GPU and its host share one memory, and the moments of adapters are small. On a
processor the moments are in host memory anyway, so offloading only takes longer.

This is our own code for two reasons. torchao 0.18 (`AdamW8bit`) compiles its update in the first step, and fails
without a C++ compiler. bitsandbytes 0.50 brings compiled kernels, but the one for processors does not round to the
nearest of its own codes, so tests on a processor would say nothing about the GPU. Ours is the same few lines of torch
on both.

What `recipes/qwen3_8b.toml` needs with each:
"""


def scale() -> str:
    """What the paper's run would take on 1 to 512 GPUs, with four sizes of models."""
    first = ("model", "engine", *(f"{gpu}: fewest GPUs" for gpu in SCALE_GPUS), *(f"h of 64 {g}" for g in SCALE_GPUS))
    parts = [HEAD, SCALE, table(first, _fewest()), _outside(), "## What is assumed\n", bullets(ASSUMPTIONS)]
    header = ("GPU", "memory, GB", "bfloat16, TFLOP/s", "memory, TB/s", "link", "PCIe", "network of a node")
    parts += ["The data sheets' figures, links one way in GB/s:\n", table(header, map(_gpu, GPUS))]
    for model in SCALE_MODELS:
        parts.append(f"## {model}\n")
        for gpu in SCALE_GPUS:
            for engine in SAMPLERS.values():
                parts.append(_phases_table(model, gpu, engine))
    return "\n".join(parts)


SCALE_MODELS = {
    "Qwen3-8B": "Qwen/Qwen3-8B-Base",
    "Qwen3-14B": "Qwen/Qwen3-14B-Base",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
}
SCALE_GPUS = ("h100", "h200", "b200")
SCALE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCALE = """# Before renting GPUs

Every number on this page is arithmetic, from the models' shapes, the lengths in the recipe, the GPUs' data sheets
and the assumptions below. **No model on this page has run here.** Only SmolLM2-135M and a model of 0.4 billion
parameters have run on a GPU, one H100, for half an hour each ([torch.md](torch.md#on-a-gpu)). The page shows what
cannot fit, what limits a step, and when more GPUs stop helping; its seconds are rough estimates.

The recipe is `recipes/qwen3_8b.toml`, the paper's: 128 prompts × 16 responses of up to 20,480 tokens, the whole model
trained, with another model in its place for the other sizes. The keys that change no result (`rollout.batch`,
`update.offload`, `update.micro_batch_tokens`, `update.feature_bytes`) are set to what each GPU has room for. Any other
recipe, GPU and number of processes:

```
delta doctor recipes/qwen3_8b.toml --gpu h100 --processes 8
delta doctor recipes/qwen3_8b.toml --gpu b200 --processes 64 --engine vllm --mean-tokens 3000
delta doctor recipes/qwen3_8b.toml --gpu h200 --processes 16 --set model.path=Qwen/Qwen3-32B --json
```

The engine "local" is the trainer itself; "vllm" is vLLM on the same GPUs. On more than one GPU weights, gradients
and moments are sharded (FSDP2). Fewest GPUs that fit, and hours of the recipe's 220 steps on 64:
"""


PAPER_HOURS = """# How long the paper's tables take

Hours on one machine with 8 GPUs, by the arithmetic of [scale.md](scale.md) and its assumptions: **none of these
studies has been run on a GPU**. A run has 220 steps. Its evaluations are AIME25 avg@8 every 4 steps and the
measurement of the chosen checkpoint, with responses as long as in training, which is a quarter of their limit on
average. Runs that two studies share (`dapo` and `delta` at 8B) are counted in both.
"""
PAPER_GPUS = ("h200", "b200")
PAPER_PROBLEMS = {"math7": 6 * 30 + 33, "math4": 3 * 30 + 33, "ood2": 198 + 600}  # code3's window has no fixed count
AIME25 = (30, 8)  # problems and samples of a training run's evaluations


def paper_hours() -> str:
    """What each of the paper's studies would take on 8 GPUs."""
    parts = [HEAD, PAPER_HOURS]
    for gpu in PAPER_GPUS:
        header = ("study", "runs", "local: training", "local: evaluations", "vllm: training", "vllm: evaluations")
        parts += [
            f"## 8 × {gpu}\n",
            table(header, (_study_hours(file, gpu) for file in sorted(RECIPES.glob("paper_*")))),
        ]
    return "\n".join(parts)


def _study_hours(file: Path, gpu: str) -> tuple[str, ...]:
    if "arms" not in file.read_text(encoding="utf-8"):  # a recipe
        plans = [_hours(load_recipe(file), gpu, engine, None) for engine in SAMPLERS.values()]
        return f"`{file.name}`", "1", *(f"{hours:,.0f}" for pair in plans for hours in pair)
    study = load_study(file)
    assert study.measure is not None
    suite = study.suite()
    measured = (PAPER_PROBLEMS.get(suite.name), suite.settings.samples)
    cells = []
    for engine in SAMPLERS.values():
        recipes = [study.recipe_of(arm, 0) for arm in study.arms]
        found = [_hours(recipe, gpu, engine, measured, trained=study.runs_of is None) for recipe in recipes]
        training, evaluations = map(sum, zip(*found, strict=True))
        known = measured[0] is not None
        cells += ["–" if study.runs_of else f"{training:,.0f}", f"{evaluations:,.0f}" if known else "not counted"]
    return f"`{file.name}`", "none" if study.runs_of else str(len(study.arms)), *cells


def _hours(
    recipe: Recipe, gpu: str, engine: SamplerKind, measured: tuple[int | None, int] | None, trained: bool = True
) -> tuple[float, float]:
    """Of a run's training, and of its evaluations, with ``measured`` problems and samples at its end."""
    asked = PlanRequest(recipe, *shape_of(recipe.model.path), GPUS[gpu], 8, engine=engine)
    evaluations = 0.0
    if trained:
        evaluations += _drawing(asked, *AIME25) * (recipe.run.steps // recipe.evaluation.every)
    if measured is not None and measured[0] is not None:
        evaluations += _drawing(asked, measured[0], measured[1])
    found = plan(fitted(asked))
    assert found.fits, f"{recipe.model.path} on {gpu}"
    return found.hours, evaluations / 3600


def _drawing(asked: PlanRequest, problems: int, samples: int) -> float:
    """Seconds of drawing so many problems' responses."""
    rollout = asked.recipe.rollout.model_copy(update={"prompts": problems, "responses": samples})
    recipe = asked.recipe.model_copy(update={"rollout": rollout})
    return next(
        phase.seconds for phase in plan(fitted(replace(asked, recipe=recipe))).phases if phase.name == "drawing"
    )


def _plans(model: str, gpu: str, engine: SamplerKind) -> list[RunPlan]:
    recipe = load_recipe(RECIPES / "qwen3_8b.toml")
    shape = KNOWN[SCALE_MODELS[model]]
    requests = (PlanRequest(recipe, shape, {}, GPUS[gpu], count, engine=engine) for count in SCALE_COUNTS)
    return [plan(fitted(request)) for request in requests]


def _fewest() -> Iterator[tuple[str, ...]]:
    for model in SCALE_MODELS:
        for engine in SAMPLERS.values():
            plans = {gpu: _plans(model, gpu, engine) for gpu in SCALE_GPUS}
            fewest = [next((str(p.layout.processes) for p in plans[gpu] if p.fits), "none") for gpu in SCALE_GPUS]
            sixty_four = [next(p for p in plans[gpu] if p.layout.processes == 64) for gpu in SCALE_GPUS]
            yield model, engine, *fewest, *(f"{p.hours:.0f}" if p.fits else "–" for p in sixty_four)


def _phases_table(model: str, gpu: str, engine: SamplerKind) -> str:
    plans = _plans(model, gpu, engine)
    if not any(each.fits for each in plans):
        least = min(plans, key=lambda each: each.bytes)
        largest = max((item for item in least.items if item.phase != "host"), key=lambda item: item.bytes)
        return (
            f"On {gpu} with the {engine} engine it fits no number of GPUs: {least.bytes / 1e9:.0f} GB at the least, "
            f"{largest.bytes / 1e9:.0f} of it\n{largest.name} ({largest.phase}).\n"
        )
    lines = "\n".join(plan_text.table(plans))
    return f"On {gpu} with the {engine} engine, seconds of a step:\n\n```text\n{lines}\n```\n"


def _outside() -> str:
    """The paper's one figure of time beside the plan's."""
    recipe = load_recipe(RECIPES / "qwen3_8b.toml")
    asked = PlanRequest(recipe, KNOWN[SCALE_MODELS["Qwen3-8B"]], {}, GPUS["b200"], 8, engine="vllm")
    for mean in range(100, recipe.rollout.max_tokens, 100):
        found = plan(fitted(replace(asked, mean_tokens=mean)))
        forward = next(phase.seconds for phase in found.phases if phase.name == "scoring")
        if 3 * forward >= 37:
            break
    return (
        "One figure from outside: the paper's code makes three more forwards than ours, which took 37 s of a first\n"
        f"step of 363 s on eight B200. Here three forwards take 37 s where responses have {mean:,} tokens on average,\n"
        f"and the whole step, those three and vLLM included, would take {found.step_seconds + 37:.0f} s. The paper\n"
        "does not give its mean length.\n"
    )


def _gpu(name: str) -> tuple[str, ...]:
    gpu = GPUS[name]
    links = (f"{value / 1e9:g}" for value in (gpu.link, gpu.host, gpu.network))
    return name, f"{gpu.memory / 1e9:.1f}", f"{gpu.flops / 1e12:g}", f"{gpu.bandwidth / 1e12:g}", *links


def _items(name: str, *overrides: str, gpu: float | None = None) -> list[MemoryItem]:
    """What a recipe needs; ``gpu`` is the memory of a GPU whose free part holds keys and values, a tenth left."""
    recipe = load_recipe(RECIPES / name, overrides)
    shape, config = shape_of(recipe.model.path)
    items = estimate_memory(recipe, shape, config)
    return items if gpu is None else pooled(recipe, shape, items, int(0.9 * gpu))


def _phase(phase: str, items: list[MemoryItem]) -> Iterator[tuple[str, ...]]:
    mine = sorted((item for item in items if item.phase == phase and item.bytes), key=lambda item: -item.bytes)
    for item in mine:
        yield phase, item.name, _gigabytes(item.bytes), item.how, item.remedy
    if mine:
        yield f"**{phase}**", "", f"**{_gigabytes(sum(item.bytes for item in mine))}**", "", ""


def _choices() -> Iterator[tuple[str, ...]]:
    for offload in ("false", "true"):
        for moments in ("float32", "int8"):
            items = _items("qwen3_8b.toml", f"update.offload={offload}", f"update.moments={moments}", gpu=141e9)
            name = f'`moments = "{moments}"`, `offload = {offload}`'
            yield name, f"{peak_bytes(items) / 1e9:.1f}", f"{bytes_by_phase(items)['host'] / 1e9:.1f}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f}"
