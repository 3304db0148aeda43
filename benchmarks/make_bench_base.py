"""Make the base of one of the bench's tasks "fork" and "chain", whose texts are in ``delta_cli/bench/letters.py``.

``python benchmarks/make_bench_base.py fork --out FOLDER`` trains the tiny base that ships with the package on texts
such as ``bdca…fgab a cadb…hgae``, whatever the question is. The letters on both sides are drawn from eight with equal
chances; the one between them is drawn from four, and ``a`` is rewarded. So a quarter of the responses are right, and
whoever weighs tokens should find one letter among others that are just as random.

With ``chain`` the texts are six lines such as ``then we take Kc from hcfdbeag.``, and a response is right if each of
the tags K to P has its good letter. The base writes that letter three times out of four. Half of the questions end with
a random letter for each tag, and the text then takes these letters nineteen times out of twenty, so that the model
learns to read a hint in its prompt. The same arguments give the same model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from make_tiny_base import supervised_step

from backends import registry
from backends.interface import Engine, RolloutRequest, Sampling, Sequences, starts_of
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets import TINY_BASE, model_path
from delta_cli.bench.letters import CHAIN_HINT, KEY, LETTERS, LINE, chain_reward, fork_reward
from delta_cli.data import arithmetic, prompt_order
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic

HINT = CHAIN_HINT.split()[1]
FREE = 30  # letters on each side of a text of the task fork
POOL, WARM_UP = 1000, 10  # problems; steps
FOLLOWED, PREFERRED = 0.95, 0.75  # chances of the hinted letter, and of the good one without a hint


def fork_text(rng: np.random.Generator, hint: str) -> str:
    """Free letters, the one that decides, free letters."""
    first, second = ("".join(rng.choice(list(LETTERS["F"]), FREE)) for _ in range(2))
    return f"{first} {rng.choice(list(LETTERS['D']))} {second}"


def chain_text(rng: np.random.Generator, hint: str) -> str:
    """Six lines, each with a letter that decides and eight free ones."""
    letters, count = list(LETTERS["D"]), LINE.count("F")
    lines = []
    for tag, likeliest in zip(KEY, (hint or HINT)[1::2], strict=True):
        rest = 1 - (FOLLOWED if hint else PREFERRED)
        chances = [1 - rest if letter == likeliest else rest / (len(letters) - 1) for letter in letters]
        free = "".join(rng.choice(list(LETTERS["F"]), count))
        lines.append(LINE.replace("F" * count, free).replace("D", rng.choice(letters, p=chances)).replace("T", tag))
    return "".join(lines)


def random_hint(rng: np.random.Generator) -> str:
    """A letter for each tag."""
    return "".join(tag + rng.choice(list(LETTERS["D"])) for tag in KEY)


@dataclass(frozen=True)
class LetterTask:
    """How the base of a task is trained."""

    text: Callable[[np.random.Generator, str], str]
    reward: Callable[[str, Problem], float]
    hints: bool
    max_tokens: int
    steps: int
    batch: int  # texts a step


TASKS = {
    "fork": LetterTask(fork_text, fork_reward, hints=False, max_tokens=3 * FREE, steps=80, batch=64),
    "chain": LetterTask(chain_text, chain_reward, hints=True, max_tokens=200, steps=500, batch=32),
}


def hinted(problem: Problem, hint: str) -> Problem:
    """The problem with a hint behind its question."""
    return replace(problem, question=f"{problem.question} {hint}") if hint else problem


def demonstrations(task: LetterTask, problems: Sequence[Problem], step: int, tokenizer: Tokenizer) -> Sequences:
    """A text for each problem, with the end of sequence."""
    rng = np.random.default_rng([7, step])
    hints = [random_hint(rng) if task.hints and place % 2 else "" for place in range(len(problems))]
    pairs = zip(problems, hints, strict=True)
    prompts = tuple(encode_prompt(hinted(problem, hint), "chat", tokenizer) for problem, hint in pairs)
    responses = [np.append(tokenizer.encode(task.text(rng, hint)), tokenizer.eos_ids[:1]) for hint in hints]
    return Sequences(prompts, np.concatenate(responses), starts_of([*map(len, responses)]))


def measure(task: LetterTask, engine: Engine, problems: Sequence[Problem], tokenizer: Tokenizer) -> tuple[str, float]:
    """A response, and the share of them that is right."""
    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)
    drawn = engine.rollout(RolloutRequest(prompts, Sampling(task.max_tokens, tokenizer.eos_ids, seed=0)))
    texts = [tokenizer.decode(drawn.tokens[a:b]) for a, b in zip(drawn.starts, drawn.starts[1:], strict=False)]
    return texts[0], float(np.mean([task.reward(text, problem) for text, problem in zip(texts, problems, strict=True)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--steps", type=int, help="supervised steps; by default the task's")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--backend", default="cpu", choices=registry.NAMES)
    given = parser.parse_args(arguments)
    task = TASKS[given.task]
    steps = given.steps or task.steps
    tokenizer = Tokenizer.load(model_path(TINY_BASE))
    pool = arithmetic.problems(Arithmetic(), POOL, 0, "train")
    optimizer = Optimizer(beta2=0.99, weight_decay=0.01)
    engine = registry.create(given.backend, BackendSettings.of(model_path(TINY_BASE), optimizer=optimizer))
    try:
        for step in range(steps):
            ramp = min(1.0, (step + 1) / WARM_UP, 3 * (1 - step / steps))
            batch = prompt_order.batch(pool, step, task.batch, 0)
            loss = supervised_step(engine, demonstrations(task, batch, step, tokenizer), given.learning_rate * ramp)
            if (step + 1) % 20 == 0:
                print(f"step {step + 1}  loss {loss:.4f}", flush=True)
        for hint in ("", HINT, "KdLdMdNdOdPd") if task.hints else ("",):
            text, right = measure(task, engine, [hinted(problem, hint) for problem in pool[:256]], tokenizer)
            print(f"hint {hint!r}: {right:.1%} right, such as {text}")
        given.out.mkdir(parents=True, exist_ok=True)
        engine.export(given.out)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
