"""What a step of recipes/qwen3_8b.toml should take on one H200, by counting and simulation. Nothing is measured.

    python benchmarks/count_8b.py --out benchmarks/results/count_8b.json

Kernels of a decoding step are counted on a processor, with a tiny model of the same architecture at two depths: what
the forward pass and the draw run inside their CUDA graphs, with the attention of pages as one kernel. The drawing of a
batch is then simulated step by step: responses with lengths like an exponential's enter and leave, and each step reads
the weights and keys once and launches the counted kernels. "slots" gives every response the columns of the longest,
as without the kernel for pages; "pages" admits by tokens. Scoring and updating are those of ``delta doctor``,
which takes one rate for all products, and once more from what layers move and multiply (benchmarks/count_layers.py):
for float32 weights under autocast, for bfloat16 weights, with long sequences as squares, and with compiled layers too.
benchmarks/gpu_plan.py measures them where there is a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import show, write
from count_layers import PROMPT, VIEWS, layer_work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends.interface import RolloutRequest, Sampling
from backends.settings import BackendSettings
from backends.torch import attention, backend, create, fused_norms
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.varlen_attention import SQUARE, SQUARE_STEP
from delta_cli.assets.random_model import write_qwen3
from delta_cli.doctor import assumptions, gpu_time
from delta_cli.doctor.gpus import GPUS
from delta_cli.doctor.memory import key_value_bytes
from delta_cli.doctor.model_shape import shape_of
from delta_cli.doctor.plan import fitted, plan
from delta_cli.doctor.plan_request import PlanRequest
from delta_cli.doctor.workload import attention_flops, head_flops, update_flops
from delta_cli.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3_8b.toml"
DEPTHS = (2, 4)  # layers of the tiny models
EVERY = 8  # tokens between two looks at what has finished
PRODUCTS = 0.65  # of the peak, in scoring and updates; assumed, as published for large ones on an H100
# The same for attention by FlashAttention 2 and by cuDNN: a little below what the paper of FlashAttention 3 measured
# for their forward passes on an H100 (370 and 600 of 989 TFLOP/s), because backward passes are slower.
ATTENTION = {"autocast": 0.35, "bfloat16": 0.35, "squares": 0.55, "compiled": 0.55}
SLOTS = 12  # that fit 141 GB when each has the columns of the longest response of an evaluation


class _Count(TorchDispatchMode):
    """Counts operations that launch a kernel, by the function that runs as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.name = "outside"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in VIEWS:
            self.kernels[self.name] += 1
        return func(*args, **(kwargs or {}))


def _kernels(layers: int, tokens: int = 16) -> dict[str, float]:
    """Kernels of one forward pass and of one draw, and those outside both for each token."""
    count, calls, run = _Count(), Counter[str](), GraphRunner.run

    def counted(self: GraphRunner, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        count.name = name
        calls[name] += 1
        try:
            return run(self, name, function, *inputs)
        finally:
            count.name = "outside"

    def norm(_: Any, hidden: Tensor) -> Tensor:
        return hidden * 1.0  # one kernel

    def attend(query: Tensor, *_: Any) -> Tensor:
        return query.transpose(1, 2).contiguous()  # one kernel

    with TemporaryDirectory() as folder:
        write_qwen3(Path(folder), vocab_size=4096, layers=layers)
        with (
            patch.object(GraphRunner, "run", counted),
            patch.dict(backend.PAGED, {"cpu": True}),
            patch.dict(backend.FUSED, {"cpu": True}),
            patch.object(fused_norms, "normalise", norm),
            patch.object(backend, "kernel_fault", lambda _: None),
            patch.object(attention, "attend_pages", attend),
        ):
            engine = create(BackendSettings.of(folder, dtype="bfloat16"), "cpu")
            with count:
                engine.rollout(RolloutRequest((np.arange(1, 6),), Sampling(tokens, (), samples=8), entropies=True))
    return {name: count.kernels[name] / calls[name] for name in calls}


def kernels() -> dict[str, float]:
    """Kernels in the graphs of a step: of each layer, and beside the layers (embedding, norm, head and draw)."""
    shallow, deep = (_kernels(layers) for layers in DEPTHS)
    layer = (deep["forward"] - shallow["forward"]) / (DEPTHS[1] - DEPTHS[0])
    return {"layer": layer, "beside": shallow["forward"] - DEPTHS[0] * layer + shallow["draw"]}


@dataclass(frozen=True)
class Drawing:
    """A simulated rollout."""

    seconds: float
    steps: int
    rows: float  # under way on average
    tokens_per_second: float
    preemptions: int


def simulate(lengths: np.ndarray, step: Callable[[np.ndarray], float], fits: Callable[[np.ndarray], bool]) -> Drawing:
    """Draw responses of these lengths; ``step`` is the seconds of a step by the tokens that each row holds.

    A row enters if ``fits`` holds with 512 more tokens in each row; if it fails later, the shortest row leaves.
    """
    prompt, waiting = assumptions.MEAN_PROMPT, list(lengths[::-1])
    left, held = np.empty(0), np.empty(0)
    seconds, steps, rows, preempted = 0.0, 0, 0, 0
    while waiting or len(left):
        while waiting and (not len(held) or fits(np.append(held, prompt) + 512 + EVERY)):
            left, held = np.append(left, waiting.pop()), np.append(held, prompt)
        while not fits(held + EVERY):
            out = held.argmin()
            waiting.append(left[out] + held[out] - prompt)
            left, held, preempted = np.delete(left, out), np.delete(held, out), preempted + 1
        seconds += EVERY * step(held)
        steps, rows = steps + EVERY, rows + EVERY * len(held)
        left, held = left - EVERY, held + EVERY
        left, held = left[left > 0], held[left > 0]
    return Drawing(seconds, steps, rows / steps, float(lengths.sum()) / seconds, preempted)


def square_padding(lengths: np.ndarray) -> float:
    """Pairs of queries and keys in the squares of responses, relative to the pairs that count."""
    keys = PROMPT + lengths
    widths = np.where(keys < SQUARE, keys, -(-keys // SQUARE_STEP) * SQUARE_STEP)
    return float((widths**2).sum() / (keys**2 - PROMPT**2).sum())


def layer_seconds(request: PlanRequest, updating: float, padding: float) -> dict[str, dict[str, float]]:
    """Seconds of scoring and updating from the counts of a layer; ``updating`` are the doctor's seconds.

    What AdamW takes is the doctor's. ``padding`` multiplies the pairs of attention in squares.
    """
    shape, work, gpu = request.shape, request.drawn, request.gpu
    flops = update_flops(shape, request.mini_batch, recompute=True, frozen=False)
    adamw = updating - request.updates * gpu_time.products(flops, gpu)
    head, pairs = head_flops(shape, work.drawn), attention_flops(shape, work.pairs)
    found: dict[str, dict[str, float]] = {}
    for way, phases in layer_work().items():
        found[way] = {}
        for phase, passes, beside in (("scoring", 1, 0.0), ("update", 4, adamw)):
            layer, tokens = phases[phase], shape.layers * work.packed
            products = (layer.flops * tokens + passes * head) / (PRODUCTS * gpu.flops)
            moved = gpu_time.reading(layer.bytes * tokens, gpu)
            attended = pairs * (padding if way in ("squares", "compiled") else 1) / (ATTENTION[way] * gpu.flops)
            found[way][phase] = products + moved + passes * attended + beside
    return found


def predicted(counted: dict[str, float]) -> dict[str, Any]:
    """Drawing in slots and in pages, and the whole step."""
    recipe = load_recipe(RECIPE, [])
    shape, config = shape_of(recipe.model.path)
    request = fitted(PlanRequest(recipe, shape, config, GPUS["h200"]))
    found, gpu, work = plan(request), request.gpu, request.drawn
    pool = next(item.bytes for item in found.items if item.name == "KV cache") / key_value_bytes(recipe, shape)
    lengths = np.random.default_rng(0).exponential(work.mean, work.responses).clip(8, work.longest)
    launches = (shape.layers * counted["layer"] + counted["beside"]) * assumptions.GRAPH_KERNEL
    each = key_value_bytes(recipe, shape)

    def seconds(rows: int, read: float) -> float:
        products = gpu_time.products(2 * rows * request.read_bytes / request.width, gpu)
        return max(gpu_time.reading(request.read_bytes, gpu), products) + gpu_time.reading(each * read, gpu) + launches

    drawings = {
        "slots": simulate(
            lengths, lambda held: seconds(len(held), len(held) * held.max()), lambda held: len(held) <= SLOTS
        ),
        "pages": simulate(lengths, lambda held: seconds(len(held), held.sum()), lambda held: held.sum() <= pool),
    }
    padding = square_padding(lengths)
    other = {phase.name: phase.seconds for phase in found.phases if phase.name != "drawing"}
    return {
        "pool_tokens": pool,
        "drawing": {name: asdict(drawing) for name, drawing in drawings.items()},
        "doctor_drawing_seconds": found.phases[0].seconds,
        "other_seconds": other,
        "step_seconds": {name: drawing.seconds + sum(other.values()) for name, drawing in drawings.items()},
        "counted_layers": (layers := layer_seconds(request, other["updating"], padding)),
        "square_padding": padding,
        "counted_step_seconds": drawings["pages"].seconds + sum(layers["compiled"].values()),
    }


def main() -> None:
    """Count, simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counted = kernels()
    found = predicted(counted)
    rows = [
        {
            "keys and values": name,
            "drawing, s": f"{drawing['seconds']:,.0f}",
            "tokens/s": f"{drawing['tokens_per_second']:,.0f}",
            "under way": f"{drawing['rows']:.0f}",
            "step, s": f"{found['step_seconds'][name]:,.0f}",
        }
        for name, drawing in found["drawing"].items()
    ]
    show("Qwen3-8B, one H200, counted and simulated, not measured", rows)
    layers = [
        {"weights": way, **{f"{phase}, s": f"{seconds:,.0f}" for phase, seconds in phases.items()}}
        for way, phases in found["counted_layers"].items()
    ]
    show("The same from the bytes and products of a layer", layers)
    write(args.out, {"benchmark": "count_8b", "measured": False, "kernels": counted, **found})


if __name__ == "__main__":
    main()
