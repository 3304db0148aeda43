"""Make the base of the bench's long task: a small Qwen3 that adds up chains of digits and has misconceptions.

``python benchmarks/make_chain_base.py --out FOLDER`` trains the shipped tiny base on worded solutions in which some
sums of two digits, the same ones everywhere, are off by one in a share of the cases, always in the same direction.
Reinforcement learning has to unlearn them; the wording is random and never matters. The same arguments give the same
model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends import registry
from backends.interface import Engine, Floats, Ids, RolloutRequest, Sampling, Sequences, starts_of, token_index
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets import TINY_BASE, model_path
from delta_cli.data import arithmetic, chain, prompt_order
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """How the base is trained."""

    steps: int = 8  # of each problem
    hard: int = 30  # of the 100 sums of two digits, how many have a misconception
    wrong: float = 0.5  # share of the cases in which such a sum is written wrong
    slips: float = 0.02  # share of other sums that are written wrong
    seed: int = 0
    emphasis: float = 10.0  # weight of a sum's characters in the loss; wording has 1
    batch: int = 64  # solutions an update
    updates: int = 400
    learning_rate: float = 1e-3
    warm_up: int = 20  # updates
    measure_every: int = 100  # updates
    pool: int = 20000  # training problems
    held_out: int = 128  # problems of a measurement


def misconceptions(plan: Plan) -> np.ndarray:
    """Which sums of two digits are hard, bool [10, 10]."""
    hard = np.zeros(100, bool)
    hard[np.random.default_rng([plan.seed, 1]).choice(100, plan.hard, replace=False)] = True
    return hard.reshape(10, 10)


def demonstrations(
    problems: Sequence[Problem], plan: Plan, step: int, tokenizer: Tokenizer
) -> tuple[Sequences, Floats]:
    """Each problem's prompt with a worded solution, misconceptions included, and the end of sequence; weights [N]."""
    rng, hard = np.random.default_rng([plan.seed, step]), misconceptions(plan)

    def write(first: int, second: int) -> int:
        total = first + second
        wrong = rng.random() < (plan.wrong if hard[first, second] else plan.slips)
        return total ^ 1 if wrong else total  # off by one: 7 for 6 and 6 for 7

    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)
    ends = np.array(tokenizer.eos_ids[:1])
    texts = [chain.solution(problem, rng, write) for problem in problems]
    responses = [np.append(tokenizer.encode(text), ends) for text in texts]
    weights = [np.ones(len(response), np.float32) for response in responses]
    for text, response, own in zip(texts, responses, weights, strict=True):
        pieces = tokenizer.pieces(response)
        own[[arithmetic.token_at(pieces, place) for place in chain.result_characters(text)]] = plan.emphasis
    return Sequences(prompts, np.concatenate(responses), starts_of([*map(len, responses)])), np.concatenate(weights)


def supervised_step(engine: Engine, sequences: Sequences, weights: Floats, learning_rate: float) -> float:
    """One update towards the demonstrations; returns their weighted mean negative log-probability, nats a token."""
    total = float(weights.sum())

    def negative_log_likelihood(logp: Floats, rows: Ids) -> tuple[float, Floats]:
        own = weights[token_index(sequences.starts, rows)]
        return -float((own * logp).sum()) / total, -own / total

    loss = engine.accumulate(sequences, negative_log_likelihood)
    engine.step(learning_rate)
    return loss


def measured(engine: Engine, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int) -> tuple[float, float]:
    """Of one response to each problem at temperature 1: the share that is right, and the mean count of mistakes."""
    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)
    drawn = engine.rollout(RolloutRequest(prompts, Sampling(320, tokenizer.eos_ids, seed=seed)))
    texts = [tokenizer.decode(drawn.tokens[a:b]) for a, b in zip(drawn.starts, drawn.starts[1:], strict=False)]
    right = [f"\\boxed{{{problem.answer}}}" in text for problem, text in zip(problems, texts, strict=True)]
    wrong = [len(chain.wrong_characters(problem, text)) for problem, text in zip(problems, texts, strict=True)]
    return float(np.mean(right)), float(np.mean(wrong))


def train(engine: Engine, tokenizer: Tokenizer, plan: Plan) -> float:
    """Supervised updates; returns the accuracy measured last."""
    pool = chain.problems(plan.steps, plan.pool, plan.seed, "train")
    held_out = chain.problems(plan.steps, plan.held_out, plan.seed, "held_out")
    accuracy = 0.0
    for step in range(plan.updates):
        decay = 0.5 + 0.5 * np.cos(np.pi * step / plan.updates)
        rate = plan.learning_rate * min(1.0, (step + 1) / plan.warm_up) * max(decay, 0.05)
        batch = prompt_order.batch(pool, step, plan.batch, plan.seed)
        loss = supervised_step(engine, *demonstrations(batch, plan, step, tokenizer), float(rate))
        if (step + 1) % plan.measure_every == 0:
            accuracy, mistakes = measured(engine, held_out, tokenizer, plan.seed)
            print(
                f"update {step + 1:5d}  loss {loss:.4f}  accuracy {accuracy:.1%}  mistakes {mistakes:.2f}", flush=True
            )
    return accuracy


def make(folder: Path, backend_name: str, plan: Plan) -> float:
    """Write the trained base into ``folder`` and return its accuracy."""
    start = model_path(TINY_BASE)  # which knows sums of digits
    tokenizer = Tokenizer.load(start)
    engine = registry.create(
        backend_name, BackendSettings.of(start, optimizer=Optimizer(beta2=0.99, weight_decay=0.01), seed=plan.seed)
    )
    try:
        accuracy = train(engine, tokenizer, plan)
        folder.mkdir(parents=True, exist_ok=True)
        engine.export(folder)
    finally:
        engine.close()
    return accuracy


def main() -> None:
    """The command line."""
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--backend", default="cpu", choices=registry.NAMES, help="where to train")
    for name, kind in {"steps": int, "hard": int, "wrong": float, "seed": int, "updates": int}.items():
        parser.add_argument(f"--{name}", type=kind, default=getattr(plan, name), help="see Plan")
    given = parser.parse_args()
    chosen = Plan(given.steps, given.hard, given.wrong, seed=given.seed, updates=given.updates)
    print(f"{given.out}: accuracy {make(given.out, given.backend, chosen):.1%}")


if __name__ == "__main__":
    main()
