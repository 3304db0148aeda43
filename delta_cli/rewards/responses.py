"""Responses drawn from a policy, each handed to the grader while others are still growing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from backends.interface import Backend, Completions, Ids, Sampling
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, opened_think, render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.rewards.grader import Grader, Verdict


@dataclass(frozen=True)
class Graded:
    """A response whose verdict may still be to come."""

    text: str  # with the think tag that its prompt opened
    tokens: int
    truncated: bool
    verdict: Future[Verdict]


@dataclass(frozen=True)
class Drawn:
    """``samples`` responses to each of P problems, prompt-major: R in all."""

    prompts: tuple[Ids, ...]  # P
    completions: Completions
    responses: tuple[Graded, ...]  # R


def draw(
    backend: Backend,
    tokenizer: Tokenizer,
    grader: Grader,
    problems: Sequence[Problem],
    template: str,
    sampling: Sampling,
    heard: Callable[[int, int], None],
) -> Drawn:
    """Draw ``sampling.samples`` responses to each problem and grade each as soon as it is complete.

    ``heard(responses, tokens)`` is told how many are complete; what it raises ends the drawing.
    """
    prompts = tuple(encode_prompt(problem, template, tokenizer) for problem in problems)
    begun = [opened_think(render(template, problem.question, tokenizer)) for problem in problems]
    found: dict[int, Graded] = {}
    tokens_seen = 0

    def finished(row: int, tokens: Ids) -> None:
        nonlocal tokens_seen
        problem = row // sampling.samples
        text, count = begun[problem] + tokenizer.decode(tokens), len(tokens)
        truncated = not count or int(tokens[-1]) not in tokenizer.eos_ids
        found[row] = Graded(text, count, truncated, grader.submit(text, problems[problem], count, truncated))
        tokens_seen += count
        heard(len(found), tokens_seen)

    completions = backend.rollout(prompts, sampling, finished)
    return Drawn(prompts, completions, tuple(found[row] for row in range(len(problems) * sampling.samples)))
