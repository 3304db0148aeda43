#!/usr/bin/env python
"""DelTA's whole training loop, to be read from top to bottom: ``python docs/loop.py --steps 20``.

It samples responses to sums, grades them, computes a coefficient for every token, and updates the model. That is what
``delta train`` does on one process, without checkpoints, held-out problems, worker processes for grading, and handling
of everything that can go wrong. A test checks its update against the trainer's, number by number.

Shapes: G prompts, R responses, N response tokens in all, H the model's hidden size.
"""

from __future__ import annotations

import argparse

import numpy as np

from backends import registry
from backends.interface import Learner, Proxy, RolloutRequest, Sampling, Sequences, starts_of, token_index
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets import model_path
from delta_cli.credit import MiniBatch, Surrogate, group_advantages, method, token_coefficients
from delta_cli.data import arithmetic
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic
from delta_cli.rewards.math.verdict import math_reward

PROMPTS, RESPONSES, MAX_TOKENS = 32, 16, 48  # prompts a step, responses to each prompt, longest response in tokens
MINI_BATCHES = 4  # updates for each batch
LEARNING_RATE = 5e-4  # for a model this small; 1e-6 is usual for large ones
OPTIMIZER = Optimizer(beta2=0.95, weight_decay=0.0)


def rollout(learner: Learner, tokenizer: Tokenizer, problems: list[arithmetic.Problem], seed: int) -> Sequences:
    """Sample responses to each problem; the first R/G responses answer the first problem, and so on."""
    prompts = tuple(encode_prompt(problem, "chat", tokenizer) for problem in problems)  # G
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_ids=tokenizer.eos_ids, samples=RESPONSES, seed=seed)
    drawn = learner.rollout(RolloutRequest(prompts, sampling))
    # Keep the ids as they were sampled: tokenising the text again could give other ids.
    return Sequences(tuple(prompt for prompt in prompts for _ in range(RESPONSES)), drawn.tokens, drawn.starts)


def grade(sequences: Sequences, tokenizer: Tokenizer, problems: list[arithmetic.Problem]) -> np.ndarray:
    """Rewards [R]: 1 if the last \\boxed{} of a response holds the right answer, else 0."""
    texts = [tokenizer.decode(sequences.response(row)) for row in range(len(sequences))]
    golds = [str(problem.answer) for problem in problems for _ in range(RESPONSES)]
    return np.array([math_reward(text, gold) for text, gold in zip(texts, golds, strict=True)])


def update(learner: Learner, sequences: Sequences, rewards: np.ndarray, groups: np.ndarray) -> list[float]:
    """Update the model on one batch and return the gradient norms; ``groups`` [R] has each response's prompt."""
    delta = method("delta")
    # How much better a response is than the others of its group, in standard deviations.
    advantages = group_advantages(rewards, groups, delta.advantage)  # [R]
    # One forward pass: old log-probs [N], and features v [N, H], which stay on the device.
    scores = learner.score(sequences, Proxy())
    assert scores.features is not None
    # DelTA's coefficients: a few reductions over the features, no further forward pass.
    credit = token_coefficients(scores.features, advantages, sequences.starts)  # weights [N], mean 1
    scores.features.close()

    norms = []
    for part in np.array_split(np.unique(groups), MINI_BATCHES):  # whole groups
        rows = np.flatnonzero(np.isin(groups, part))
        tokens = token_index(sequences.starts, rows)  # where their tokens are among the N
        objective = Surrogate(
            delta,
            MiniBatch(
                logp_old=np.asarray(scores.logprobs, np.float64)[tokens],
                advantages=advantages[rows],
                starts=starts_of(sequences.lengths[rows]),
                weights=credit.weights[tokens],
            ),
        )
        if not objective.has_gradient:  # zero-variance groups only: nothing to learn
            continue
        # The learner asks the objective (plain numpy) for dloss/dlogp and back-propagates it.
        learner.accumulate(sequences.select(rows), objective)
        norms.append(learner.step(LEARNING_RATE, objective.scale))
    return norms


def main(steps: int, backend: str) -> list[float]:
    """Train the model that ships with the package; return the accuracy of each step."""
    model = model_path("tiny-base")
    tokenizer = Tokenizer.load(model)
    learner = registry.create(backend, BackendSettings.of(model, optimizer=OPTIMIZER))
    problems = arithmetic.problems(Arithmetic(), 5000, seed=0, split="train")
    rng = np.random.default_rng(0)
    accuracies = []
    for step in range(steps):
        asked = [problems[index] for index in rng.choice(len(problems), PROMPTS, replace=False)]
        sequences = rollout(learner, tokenizer, asked, seed=step)
        rewards = grade(sequences, tokenizer, asked)
        groups = np.repeat(np.arange(PROMPTS), RESPONSES)
        norms = update(learner, sequences, rewards, groups)
        accuracies.append(float(rewards.mean()))
        print(f"step {step + 1:>3}/{steps}  accuracy {rewards.mean():.1%}  gradient {np.mean(norms or [0.0]):.3f}")
    learner.close()
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default=registry.default())
    chosen = parser.parse_args()
    main(chosen.steps, chosen.backend)
