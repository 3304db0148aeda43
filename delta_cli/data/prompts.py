"""Prompt templates: by name, or a text with ``{question}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from backends.arrays import Ids
from delta_cli.data import word_problems
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError

FIELD = "{question}"
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."

_NAMES = re.compile(r"\{(\w+)\}")

RAW = {
    "plain": FIELD,
    "two_shot": word_problems.TEMPLATE,  # for small base models; ends with "\n" as rollout.stop
    "paper": f"User:\n{BOXED}\n\nAssistant:\n",  # the paper's, for base models
}
CHAT = {
    "chat": FIELD,  # through the model's chat template
    "chat_boxed": BOXED,
}


def render(template: str, question: str, tokenizer: Tokenizer) -> str:
    """The text of the prompt. ``template`` is a key of RAW or CHAT, or any text that contains ``{question}``.

    Other braces in a template stay as they are. Raises UserError if there is no such template.
    """
    check(template)
    if template in CHAT:
        return tokenizer.chat(CHAT[template].replace(FIELD, question))
    return RAW.get(template, template).replace(FIELD, question)


def render_problem(template: str, problem: Problem, tokenizer: Tokenizer) -> str:
    """The text of a problem's prompt: ``{NAME}`` holds its columns, and a chat keeps the turns before the question."""
    if not problem.columns and not problem.turns:
        return render(template, problem.question, tokenizer)
    check(template)
    values = {**problem.columns, "question": problem.question}
    if template in CHAT:
        return tokenizer.continue_chat(problem.turns, fill(CHAT[template], values))
    return fill(RAW.get(template, template), values)


def dropped_turns(template: str, problems: Sequence[Problem]) -> str:
    """A warning if ``template`` leaves out the turns that chats have before the question; else empty."""
    chats = [] if template in CHAT else [problem for problem in problems if problem.turns]
    if not chats:
        return ""
    return (
        f"{len(chats)} of {len(problems)} problems are chats with earlier turns (problem {chats[0].id} first), which "
        f"the prompt template {template!r} leaves out; set data.template to {' or '.join(CHAT)} to keep them"
    )


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with ``{name}`` replaced by the value of that name; other braces stay as they are."""
    return _NAMES.sub(lambda found: _as_text(values[found[1]]) if found[1] in values else found[0], template)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check(template: str) -> None:
    """Raise UserError unless ``template`` can be rendered."""
    if template not in CHAT and FIELD not in RAW.get(template, template):
        names = ", ".join([*RAW, *CHAT])
        raise UserError(
            f"prompt template {template!r} is none of {names} and does not contain {FIELD}; use one of them"
        )


def encode_prompt(problem: Problem, template: str, tokenizer: Tokenizer) -> Ids:
    """The prompt's token ids. A chat template writes its own special tokens, so none are added to it.

    Raises UserError if the template leaves nothing of the question.
    """
    text = render_problem(template, problem, tokenizer)
    ids = tokenizer.encode(text, special=template not in CHAT)
    if not len(ids):
        raise UserError(
            f"prompt template {template!r} renders problem {problem.id} to an empty prompt; set data.template to "
            "plain, or to a text with {question}"
        )
    return ids


def opened_think(prompt: str) -> str:
    """The unclosed ``<think>`` tag at the end of a prompt; empty if there is none.

    Templates of reasoning models end with this tag, so responses contain only the closing one. Put it before a
    response wherever the form of the response is judged or shown.
    """
    start = prompt.rfind("<think>")
    return prompt[start:] if start >= 0 and not prompt[start:].removeprefix("<think>").strip() else ""
