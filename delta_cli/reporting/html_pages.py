"""Pages that open without a network: the templates, and what they show of a response."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from delta_cli import text
from delta_cli.reporting.coefficient_statistics import KINDS
from delta_cli.reporting.colour_scale import LEVELS, ColourScale, css_class, mark
from delta_cli.reporting.inspection import InspectedResponse, Inspection


@dataclass(frozen=True)
class Span:
    """A token on a page."""

    text: str
    css: str
    hover: str


def spans(read: InspectedResponse, scale: ColourScale, limit: int | None = None) -> Iterator[Span]:
    """The tokens of a response, the first ``limit`` of them, with what appears over each."""
    response = read.response
    levels = scale.levels(response.coefficients)
    columns = (read.pieces, levels, read.false, response.coefficients, response.logprobs, response.entropies)
    for piece, level, false, coefficient, logprob, entropy in zip(*(column[:limit] for column in columns), strict=True):
        classes = (css_class(level), "false" if false else "")
        hover = f"coefficient {coefficient:.3f}   p {math.exp(min(logprob, 0)):.3g}   entropy {entropy:.2f}"
        yield Span(text.visible(piece, "↵\n"), " ".join(filter(None, classes)), hover)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Everything that is put into a page is escaped, and a name that is missing is an error."""
    made = Environment(
        loader=PackageLoader("delta_cli.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "visible": text.visible,
        "number": text.number,
        "percent": text.percent,
        "signed": text.signed,
        "memory": text.memory,
        "duration": text.duration,
        "quoted": text.quoted,
    }
    made.globals |= {"spans": spans, "LEVELS": LEVELS, "KINDS": KINDS, "mark": mark}
    return made


def inspection_page(inspection: Inspection) -> str:
    """``delta inspect --format html``: one file, nothing fetched."""
    return environment().get_template("inspect.html.jinja").render(inspection=inspection)
