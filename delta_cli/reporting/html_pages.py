"""HTML pages that load nothing from a network: the template environment and the tokens of a response."""

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

ENVIRONMENT = "quiet"  # CSS class of what an environment wrote


@dataclass(frozen=True)
class Span:
    """A token on a page: its text, its CSS classes, and the text shown on hovering."""

    text: str
    css: str
    hover: str


def spans(inspected: InspectedResponse, scale: ColourScale) -> Iterator[Span]:
    """The tokens of a response."""
    response = inspected.response
    levels = scale.levels(response.coefficients)
    columns = (inspected.pieces, levels, inspected.false, response.coefficients, response.logprobs, response.entropies)
    *before, after = inspected.written
    for written, (piece, level, false, coefficient, logprob, entropy) in zip(
        before, zip(*columns, strict=True), strict=True
    ):
        if written:
            yield Span(text.visible(written, "↵\n"), ENVIRONMENT, "written by the environment")
        classes = (css_class(level), "false" if false else "")
        hover = f"coefficient {coefficient:.3f}   p {math.exp(min(logprob, 0)):.3g}   entropy {entropy:.2f}"
        yield Span(text.visible(piece, "↵\n"), " ".join(filter(None, classes)), hover)
    if after:
        yield Span(text.visible(after, "↵\n"), ENVIRONMENT, "written by the environment")


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The template environment: values are escaped, and a missing name is an error."""
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
    """The page of ``delta inspect --format html``."""
    return environment().get_template("inspect.html.jinja").render(inspection=inspection)
