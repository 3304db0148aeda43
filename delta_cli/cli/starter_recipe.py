"""A commented recipe for one's own data and model, filled in with what can be seen of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_cli.data import sources
from delta_cli.data.columns import Columns, find_columns
from delta_cli.data.dataset_layouts import LAYOUTS
from delta_cli.data.loading import load_problems
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.doctor.model_shape import shape_of
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection
from delta_cli.recipe.document import toml_value

SAMPLE = 200  # rows that are looked at
FEW = 200  # rows; of fewer a larger share is held out
COMMENTS = 32  # column of the comments
TOY, SMALL, LARGE = 1e6, 50e6, 900e6  # parameters: no instructions; a large learning rate below; adapters above


@dataclass(frozen=True)
class Start:
    """What a starter recipe is made of."""

    source: str  # data file or hub name
    model: str  # folder, hub name or tiny-base
    question: str | None = None
    answer: str | None = None


def starter(start: Start, name: str, tokenizer: Tokenizer | None) -> str:
    """The text of a starter recipe. ``tokenizer``: the model's, None where it is not on this machine.

    Raises UserError where the data file cannot be read or its columns cannot be told.
    """
    import jinja2

    loader = jinja2.PackageLoader("delta_cli", "assets")
    environment = jinja2.Environment(loader=loader, autoescape=False, undefined=jinja2.StrictUndefined)
    environment.filters["toml"] = toml_value
    values: dict[str, Any] = {"name": name, "model": start.model, "source": start.source, "steps": 100}
    values |= _data(start) | _template(start, tokenizer)
    values |= _size(start) | _lengths(values, start, tokenizer)
    lines = environment.get_template("starter.toml.jinja").render(values).rstrip("\n").split("\n")
    return "\n".join(map(_aligned, lines)) + "\n"


def _aligned(line: str) -> str:
    """The line with what follows ## as its comment, in a column of its own."""
    setting, mark, comment = line.partition(" ## ")
    return f"{setting.rstrip():<{COMMENTS - 1}} # {comment}" if mark else line.rstrip()


def _data(start: Start) -> dict[str, Any]:
    """Columns and reward."""
    if not (start.source.endswith(sources.SUFFIXES) or Path(start.source).is_file()):
        known = start.source in LAYOUTS
        why = "mathematics, in \\boxed{}" if known else "or choice, code, custom"
        return {"columns": None, "there": "", "kind": "math", "why": why, "held_out": 0.05}
    rows = sources.first_rows(start.source, SAMPLE)
    found = find_columns(start.source, rows, start.question, start.answer)
    return {
        "columns": found,
        "there": ", ".join(rows[0]),
        "kind": found.kind,
        "why": found.why,
        "held_out": 0.1 if len(rows) < FEW else 0.05,
    }


def _template(start: Start, tokenizer: Tokenizer | None) -> dict[str, str]:
    if _toy(start.model):
        return {"template": "chat", "template_why": "the question alone: the model is too small for instructions"}
    if tokenizer is None:
        return {"template": "chat_boxed", "template_why": "for a model with a chat template; paper for a base model"}
    if not tokenizer.converses:
        return {"template": "paper", "template_why": "the model has no chat template"}
    return {"template": "chat_boxed", "template_why": "the model's chat template; asks for the answer in \\boxed{}"}


def _toy(model: str) -> bool:
    """Whether the model is like the one that ships with the package."""
    try:
        return shape_of(model)[0].parameters < TOY
    except UserError:
        return False


def _size(start: Start) -> dict[str, Any]:
    """What depends on how large the model is; the usual where that is not known."""
    try:
        shape, config = shape_of(start.model)
    except UserError:
        return {"lora": True, "learning_rate": "1e-5", "weight_decay": None, "context": None}
    context = config.get("max_position_embeddings")
    common = {"context": context if isinstance(context, int) else None}
    if shape.parameters < SMALL:
        return common | {"lora": False, "learning_rate": "5e-4", "weight_decay": "0.0"}
    large = shape.parameters > LARGE
    return common | {"lora": large, "learning_rate": "1e-5" if large else "2e-6", "weight_decay": None}


def _lengths(values: dict[str, Any], start: Start, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Room for prompts and responses, in what the model can read."""
    columns: Columns | None = values["columns"]
    context = _size(start)["context"] or 4096
    wanted = 48 if _toy(start.model) else 1024
    if columns is None or tokenizer is None:
        return {"max_prompt_tokens": min(2048, context // 2), "max_tokens": min(wanted, context // 2), "longest": None}
    data = DataSection(
        source=start.source,
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
