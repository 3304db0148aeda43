"""A commented recipe for the user's data and model, filled in after a look at both."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_cli.data import sources
from delta_cli.data.columns import Columns, find_columns
from delta_cli.data.dataset_layouts import LAYOUTS
from delta_cli.data.loading import load_problems
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.doctor.fit import with_fit
from delta_cli.doctor.machine import describe_machine
from delta_cli.doctor.model_shape import shape_of
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, parse_recipe
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.document import toml_value

SAMPLE = 200  # rows to look at
FEW = 200  # rows; with fewer, a larger share is held out
COMMENTS = 32  # column of the comments
TOY = 1e6  # parameters of a model that follows no instructions
SMALL = 50e6  # parameters, below which the learning rate is large
LARGE = 900e6  # parameters, above which adapters are trained


@dataclass(frozen=True)
class StarterInputs:
    """What the user says about data and model."""

    source: str  # data file or hub name
    model: str  # folder, hub name or tiny-base
    question: str | None = None
    answer: str | None = None


def starter_recipe(inputs: StarterInputs, name: str, tokenizer: Tokenizer | None, machine: str) -> str:
    """The text of the recipe. ``tokenizer`` is the model's, or None if it is not on this machine.

    ``machine`` is the backend that will train it, whose memory the batches fit.

    Raises UserError if the data file cannot be read or its columns cannot be identified.
    """
    import jinja2

    loader = jinja2.PackageLoader("delta_cli", "assets")
    environment = jinja2.Environment(loader=loader, autoescape=False, undefined=jinja2.StrictUndefined)
    environment.filters["toml"] = toml_value
    values: dict[str, Any] = {"name": name, "model": inputs.model, "source": inputs.source, "steps": 100}
    values |= _data(inputs) | _template(inputs, tokenizer)
    values |= _size(inputs) | _lengths(values, inputs, tokenizer)
    template = environment.get_template("starter.toml.jinja")
    recipe = parse_recipe(tomllib.loads(template.render(values | {"fit": {}})), name)
    lines = template.render(values | {"fit": _fit(recipe, machine)}).rstrip("\n").split("\n")
    return "\n".join(map(_aligned, lines)) + "\n"


def _fit(recipe: Recipe, machine: str) -> dict[str, str]:
    """The keys that make the recipe fit this machine and their values; none if nothing does, as the doctor says."""
    try:
        overrides = with_fit(recipe, describe_machine(machine), machine)[1]
    except UserError:
        return {}
    return {key: value for key, _, value in (each.partition("=") for each in overrides)}


def _aligned(line: str) -> str:
    """The line with the text after ## as a comment, aligned with the other comments."""
    setting, mark, comment = line.partition(" ## ")
    return f"{setting.rstrip():<{COMMENTS - 1}} # {comment}" if mark else line.rstrip()


def _data(inputs: StarterInputs) -> dict[str, Any]:
    """Columns and reward."""
    if not (inputs.source.endswith(sources.SUFFIXES) or Path(inputs.source).is_file()):
        known = inputs.source in LAYOUTS
        why = "mathematics, in \\boxed{}" if known else "or choice, code, custom"
        return {"columns": None, "there": "", "kind": "math", "why": why, "held_out": 0.05}
    rows = sources.first_rows(inputs.source, SAMPLE)
    found = find_columns(inputs.source, rows, inputs.question, inputs.answer)
    return {
        "columns": found,
        "there": ", ".join(rows[0]),
        "kind": found.kind,
        "why": found.why,
        "held_out": 0.1 if len(rows) < FEW else 0.05,
    }


def _template(inputs: StarterInputs, tokenizer: Tokenizer | None) -> dict[str, str]:
    if is_toy(inputs.model):
        return {"template": "chat", "template_why": "only the question: the model is too small for instructions"}
    if tokenizer is None:
        return {"template": "chat_boxed", "template_why": "for a model with a chat template; paper for a base model"}
    if not tokenizer.converses:
        return {"template": "paper", "template_why": "the model has no chat template"}
    return {"template": "chat_boxed", "template_why": "the model's chat template; asks for the answer in \\boxed{}"}


def is_toy(model: str) -> bool:
    """Whether the model is as small as the one that ships with the package."""
    try:
        return shape_of(model)[0].parameters < TOY
    except UserError:
        return False


def asks_in_words(source: str, question: str) -> bool:
    """Whether the questions of a file are prose, and not sums."""
    return any(re.search(r"[^\W\d_]{3}", str(row[question])) for row in sources.first_rows(source, SAMPLE))


def _size(inputs: StarterInputs) -> dict[str, Any]:
    """The keys that depend on the size of the model, with defaults if the size is not known."""
    try:
        shape, config = shape_of(inputs.model)
    except UserError:
        return {"lora": True, "learning_rate": "1e-5", "weight_decay": None, "context": None}
    context = config.get("max_position_embeddings")
    common = {"context": context if isinstance(context, int) else None}
    if shape.parameters < SMALL:
        return common | {"lora": False, "learning_rate": "5e-4", "weight_decay": "0.0"}
    large = shape.parameters > LARGE
    return common | {"lora": large, "learning_rate": "1e-5" if large else "2e-6", "weight_decay": None}


def _lengths(values: dict[str, Any], inputs: StarterInputs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Room for prompts and responses within the model's context."""
    columns: Columns | None = values["columns"]
    context = _size(inputs)["context"] or 4096
    wanted = 48 if is_toy(inputs.model) else 1024
    if columns is None or tokenizer is None:
        return {"max_prompt_tokens": min(2048, context // 2), "max_tokens": min(wanted, context // 2), "longest": None}
    data = DataSection(
        source=inputs.source,
        question=columns.question,
        answer=columns.answer,
        answer_pattern=columns.pattern,
        limit=SAMPLE,
        held_out=0.0,
    )
    problems = load_problems(data).problems
    longest = max(len(encode_prompt(problem, values["template"], tokenizer)) for problem in problems)
    room = max(32, 2 ** (longest * 5 // 4).bit_length())
    tokens = max(min(wanted, context - room), 16)
    return {"max_prompt_tokens": room, "max_tokens": tokens, "longest": longest, "sampled": len(problems)}
