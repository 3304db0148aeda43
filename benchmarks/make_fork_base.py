"""Make the base of the bench's task "fork": one free letter decides the reward, sixty others do not matter.

``python benchmarks/make_fork_base.py --out FOLDER`` trains the tiny base that ships with the package on texts such as
``bdca…fgab a cadb…hgae``, whatever the question is. The letters on both sides are drawn from eight with equal chances;
the one between them is drawn from four, and ``a`` is rewarded. So a quarter of the responses are right, and whoever
weighs tokens should find one letter among others that are just as random. The same arguments give the same model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from make_tiny_base import supervised_step

from backends import registry
from backends.interface import RolloutRequest, Sampling, Sequences, starts_of
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets import TINY_BASE, model_path
from delta_cli.bench.fork_reward import reward
from delta_cli.data import arithmetic, prompt_order
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic

LETTERS, DECIDING, FREE = list("abcdefgh"), list("abcd"), 30  # FREE letters on each side
POOL, BATCH, WARM_UP = 1000, 64, 10  # problems; texts a step; steps


def text(rng: np.random.Generator) -> str:
    """A response: free letters, the deciding one, free letters."""
    first, second = ("".join(rng.choice(LETTERS, FREE)) for _ in range(2))
    return f"{first} {rng.choice(DECIDING)} {second}"


def demonstrations(problems: Sequence[Problem], step: int, tokenizer: Tokenizer) -> Sequences:
    """A text for each problem, with the end of sequence."""
    rng = np.random.default_rng([7, step])
    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)
    responses = [np.append(tokenizer.encode(text(rng)), tokenizer.eos_ids[:1]) for _ in problems]
    return Sequences(prompts, np.concatenate(responses), starts_of([*map(len, responses)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--backend", default="cpu", choices=registry.NAMES)
    given = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(model_path(TINY_BASE))
    pool = arithmetic.problems(Arithmetic(), POOL, 0, "train")
    optimizer = Optimizer(beta2=0.99, weight_decay=0.01)
    engine = registry.create(given.backend, BackendSettings.of(model_path(TINY_BASE), optimizer=optimizer))
    try:
        for step in range(given.steps):
            ramp = min(1.0, (step + 1) / WARM_UP, 3 * (1 - step / given.steps))
            batch = prompt_order.batch(pool, step, BATCH, 0)
            loss = supervised_step(engine, demonstrations(batch, step, tokenizer), given.learning_rate * ramp)
            if (step + 1) % 20 == 0:
                print(f"step {step + 1}  loss {loss:.4f}", flush=True)
        prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in pool[:256])
        drawn = engine.rollout(RolloutRequest(prompts, Sampling(3 * FREE, tokenizer.eos_ids, seed=0)))
        texts = [tokenizer.decode(drawn.tokens[a:b]) for a, b in zip(drawn.starts, drawn.starts[1:], strict=False)]
        print(*texts[:4], f"right {np.mean([reward(each, None) for each in texts]):.1%}", sep="\n")
        given.out.mkdir(parents=True, exist_ok=True)
        engine.export(given.out)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
