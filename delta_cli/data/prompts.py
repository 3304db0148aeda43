"""What a model is shown: prompt templates by name, or as a text with ``{question}``."""

from __future__ import annotations

from backends.arrays import Ids
from delta_cli.data import word_problems
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError

FIELD = "{question}"
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."

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
    """The prompt's text. ``template`` is a key of RAW or CHAT, or any text that contains ``{question}``.

    Other braces in a template stay as they are. Raises UserError where there is no such template.
    """
    check(template)
    if template in CHAT:
        return tokenizer.chat(CHAT[template].replace(FIELD, question))
    return RAW.get(template, template).replace(FIELD, question)


def check(template: str) -> None:
    """Raise UserError unless ``template`` can be rendered."""
    if template not in CHAT and FIELD not in RAW.get(template, template):
        names = ", ".join([*RAW, *CHAT])
        raise UserError(f"prompt template {template!r} is none of {names} and contains no {FIELD}; use one of them")


def encode_prompt(problem: Problem, template: str, tokenizer: Tokenizer) -> Ids:
    """The prompt's token ids. A chat template writes its own special tokens, so none are added to it."""
    text = render(template, problem.question, tokenizer)
    return tokenizer.encode(text, special=template not in CHAT)


def opened_think(prompt: str) -> str:
    """What the prompt has already begun of the answer: its unclosed ``<think>`` tag, or nothing.

    Templates of reasoning models end with the tag, so that responses carry only the closing one. Put
    this before a response wherever its form is judged or shown.
    """
    start = prompt.rfind("<think>")
    return prompt[start:] if start >= 0 and not prompt[start:].removeprefix("<think>").strip() else ""
