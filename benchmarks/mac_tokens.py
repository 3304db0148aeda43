"""Tokens per second of a 4-bit model with the shape of Qwen3-1.7B and random weights; a part of mac.py.

python benchmarks/mac_tokens.py RESULT.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.utils import quantize_model, save_model

from backends import registry
from backends.interface import RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings, Lora

SHAPE: dict[str, Any] = {  # config.json of Qwen/Qwen3-1.7B
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 512, "head_dim": 32}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A folder with random weights in 4 bits, 64 numbers to a scale."""
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs(**shape))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, shape, 64, 4)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))


def measure(engine: Any, vocabulary: int, prompts: int, tokens: int) -> dict[str, float]:
    """Seconds and tokens per second of drawing, scoring and an update of adapters, after a round that warms up."""
    rng = np.random.default_rng(0)
    given = tuple(rng.integers(0, vocabulary, 128) for _ in range(prompts))
    sampling = Sampling(max_tokens=tokens, stop_ids=(), samples=8)
    found: dict[str, float] = {}
    for _ in range(2):
        start = time.perf_counter()
        drawn = engine.rollout(RolloutRequest(given, sampling))
        found["rollout, tokens/s"] = len(drawn.tokens) / (time.perf_counter() - start)
        repeated = tuple(prompt for prompt in given for _ in range(8))
        sequences = Sequences(repeated, drawn.tokens, drawn.starts)
        start = time.perf_counter()
        engine.score(sequences)
        found["scoring, tokens/s"] = len(drawn.tokens) / (time.perf_counter() - start)
        start = time.perf_counter()
        engine.accumulate(sequences, lambda logp, rows: (float(logp.sum()), np.ones_like(logp)))
        engine.step(1e-5)
        found["update, tokens/s"] = len(drawn.tokens) / (time.perf_counter() - start)
    return {**found, "peak, GiB": engine.peak_memory() / 2**30}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("out")
    args = parser.parse_args()
    shape = SHAPE | (SMALL if args.small else {})
    with TemporaryDirectory() as scratch:
        write_model(Path(scratch), shape)
        settings = BackendSettings.of(
            scratch, lora=Lora(rank=8, targets=("q_proj", "v_proj")), gradient_checkpointing=True
        )
        engine = registry.create("mlx", settings)
        found = measure(engine, shape["vocab_size"], 1 if args.small else 4, 16 if args.small else 128)
        engine.close()
    print(found)
    Path(args.out).write_text(json.dumps({"shape": shape, **found}))


if __name__ == "__main__":
    main()
