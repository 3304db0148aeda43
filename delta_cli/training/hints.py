"""Prompts that hold a hint: credits with a second forward pass compare log-probabilities with and without it."""

from __future__ import annotations

from dataclasses import replace

from backends.arrays import Ids
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, fill
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.models import Recipe
from delta_cli.rollout.batch import RolloutBatch


def hinted_prompts(batch: RolloutBatch, recipe: Recipe, tokenizer: Tokenizer) -> tuple[Ids, ...]:
    """The prompt of each response with ``method.hint`` in place of the question, [R]."""
    hint, chat = recipe.method.hint, tokenizer.chatting(recipe.data.system, recipe.data.thinking)
    assert hint is not None

    def encode(problem: Problem) -> Ids:
        values = {**problem.columns, "question": problem.question, "answer": str(problem.answer)}
        return encode_prompt(replace(problem, question=fill(hint, values)), recipe.data.prompt_template, chat)

    prompts = [encode(problem) for problem in batch.problems]
    return tuple(prompts[group] for group in batch.groups)
