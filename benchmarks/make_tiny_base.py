"""Make the embedded base model: a small Qwen3 that solves its arithmetic some of the time.

``python benchmarks/make_tiny_base.py --out FOLDER`` writes a model folder with random weights
and a byte tokenizer, then trains it on written derivations until it answers the wanted share of
held-out problems, sampled at temperature 1. Training goes through the backend interface, as
everything else does: the loss of supervised learning is one more surrogate. The same arguments give
the same model. Bases for other arithmetic (see ``--help``) are made the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tokenizers
from pydantic import ValidationError
from tokenizers import decoders, models, pre_tokenizers

from backends import registry
from backends.interface import BackendError, Engine, Floats, Ids, RolloutRequest, Sampling, Sequences, starts_of
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data import arithmetic, prompt_order
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.data import Arithmetic
from delta_cli.rewards.math.boxed import last_box

EOS = "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


@dataclass(frozen=True)
class Plan:
    """How the base is trained."""

    task: Arithmetic = field(default_factory=Arithmetic)
    slips: float = 0.3  # share of the results in its demonstrations that are off by one
    accuracy: float = 0.4  # stop at the first measurement at or above
    ceiling: float = 0.5  # a measurement above this has overshot
    seed: int = 0
    batch: int = 64  # derivations a step
    learning_rate: float = 2e-3
    warm_up: int = 20  # steps
    measure_every: int = 50  # steps
    max_steps: int = 3000
    pool: int = 5000  # training problems, at most
    held_out: int = 500  # problems of a measurement


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes, ``\\boxed{`` and the end of sequence, which is id 0.

    In the files that transformers and mlx-lm read, with a chat template that ends a question with a
    line break.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([EOS])
    core.add_tokens([tokenizers.AddedToken("\\boxed{", normalized=False)])
    core.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def demonstrations(problems: Sequence[Problem], plan: Plan, step: int, tokenizer: Tokenizer) -> Sequences:
    """Each problem's prompt with its derivation, slips included, and the end of sequence."""
    rng = np.random.default_rng([plan.seed, step])

    def compute(exact: int) -> int:
        return abs(exact + int(rng.choice([-1, 1]))) if rng.random() < plan.slips else exact

    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)
    ends = np.array(tokenizer.eos_ids[:1])
    responses = [
        np.append(tokenizer.encode(arithmetic.solution(problem, plan.task, compute)), ends) for problem in problems
    ]
    return Sequences(prompts, np.concatenate(responses), starts_of([*map(len, responses)]))


def supervised_step(engine: Engine, sequences: Sequences, learning_rate: float) -> float:
    """One update towards the demonstrations; returns their mean negative log-probability, nats a token."""
    tokens = len(sequences.tokens)

    def negative_log_likelihood(logp: Floats, rows: Ids) -> tuple[float, Floats]:
        return -float(logp.sum()) / tokens, np.full_like(logp, -1 / tokens)

    loss = engine.accumulate(sequences, negative_log_likelihood)
    engine.step(learning_rate)
    return loss


def sampled_accuracy(
    engine: Engine, problems: Sequence[Problem], tokenizer: Tokenizer, task: Arithmetic, seed: int
) -> float:
    """Share of problems whose one response at temperature 1 boxes the right answer."""
    prompts = [encode_prompt(problem, "chat", tokenizer) for problem in problems]
    longest = max(len(tokenizer.encode(arithmetic.solution(problem, task))) for problem in problems)
    drawn = engine.rollout(RolloutRequest(tuple(prompts), Sampling(2 * longest, tokenizer.eos_ids, seed=seed)))
    spans = zip(problems, drawn.starts, drawn.starts[1:], strict=False)
    right = [last_box(tokenizer.decode(drawn.tokens[start:stop])) == problem.answer for problem, start, stop in spans]
    return float(np.mean(right))


def train(engine: Engine, tokenizer: Tokenizer, plan: Plan) -> float:
    """Supervised updates until the wanted accuracy is measured, which is returned.

    Raises UserError if it is not reached within the allowed steps, or is exceeded by too much.
    """
    pool = _pool(plan)
    held_out = arithmetic.problems(plan.task, plan.held_out, plan.seed, "held_out")
    for step in range(plan.max_steps):
        learning_rate = plan.learning_rate * min(1.0, (step + 1) / plan.warm_up)
        batch = prompt_order.batch(pool, step, plan.batch, plan.seed)
        loss = supervised_step(engine, demonstrations(batch, plan, step, tokenizer), learning_rate)
        if (step + 1) % plan.measure_every:
            continue
        accuracy = sampled_accuracy(engine, held_out, tokenizer, plan.task, plan.seed)
        print(f"step {step + 1:5d}  loss {loss:.4f}  held-out accuracy {accuracy:.1%}", flush=True)
        if accuracy > plan.ceiling:
            raise UserError(f"accuracy jumped to {accuracy:.1%}; raise --slips or lower --learning-rate")
        if accuracy >= plan.accuracy:
            return accuracy
    raise UserError(
        f"accuracy {plan.accuracy:.0%} not reached in {plan.max_steps} steps; raise --max-steps or lower --slips"
    )


def _pool(plan: Plan) -> list[Problem]:
    """Training problems: as many as the plan wants and the task has."""
    available = (10**plan.task.digits - 10 ** (plan.task.digits - 1)) ** 2
    return arithmetic.problems(plan.task, min(plan.pool, available // 2), plan.seed, "train")


def make(folder: Path, backend_name: str, plan: Plan) -> float:
    """Write the trained base into ``folder`` and return its measured accuracy."""
    with TemporaryDirectory() as scratch:
        start = Path(scratch)
        write_tokenizer(start)
        tokenizer = Tokenizer.load(str(start))
        write_qwen3(
            start,
            vocab_size=tokenizer.vocab_size,
            hidden=64,
            layers=2,
            intermediate=192,
            scale=0.08,
            eos_id=tokenizer.eos_ids[0],
            seed=plan.seed,
        )
        optimizer = Optimizer(beta2=0.99, weight_decay=0.01)
        engine = registry.create(backend_name, BackendSettings.of(str(start), optimizer=optimizer))
        try:
            accuracy = train(engine, tokenizer, plan)
            folder.mkdir(parents=True, exist_ok=True)
            engine.export(folder)
        finally:
            engine.close()
    return accuracy


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; a mistake in it or an accuracy that is not reached ends with one line."""
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="python benchmarks/make_tiny_base.py",
        description="Make a small Qwen3 that solves arithmetic some of the time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--backend", default="cpu", choices=registry.NAMES, help="where to train")
    parser.add_argument("--operation", default=plan.task.operation, choices=list(arithmetic.SIGNS), help="arithmetic")
    parser.add_argument("--digits", type=int, default=plan.task.digits, help="digits of each operand")
    parser.add_argument("--filler", type=int, default=plan.task.filler, help="formatting characters before each step")
    options = {
        "accuracy": float,
        "ceiling": float,
        "slips": float,
        "seed": int,
        "learning_rate": float,
        "max_steps": int,
    }
    for name, kind in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(plan, name), help="see Plan")
    given = parser.parse_args(arguments)
    try:
        task = Arithmetic(operation=given.operation, digits=given.digits, filler=given.filler)
        accuracy = make(given.out, given.backend, Plan(task, **{name: getattr(given, name) for name in options}))
    except ValidationError as error:
        mistakes = (f"--{mistake['loc'][0]}: {mistake['msg']}" for mistake in error.errors())
        raise SystemExit("; ".join(mistakes)) from error
    except (UserError, BackendError) as error:
        raise SystemExit(str(error)) from error
    print(f"{given.out}: held-out accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
