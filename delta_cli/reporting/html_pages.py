"""HTML pages that load nothing from a network: the template environment and the tokens of a response."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from delta_cli import text
from delta_cli.reporting.call_credit import CallCredit
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


@dataclass(frozen=True)
class ShownTurn:
    """A turn of an episode on a page. A response of one turn is shown as one without a heading."""

    heading: str
    calls: list[CallCredit]
    spans: list[Span]


def shown_turns(inspected: InspectedResponse, scale: ColourScale) -> list[ShownTurn]:
    """The tokens of a response, turn by turn; each turn ends with what the environment answered."""
    turns, coefficients = inspected.turns, inspected.response.coefficients
    if not turns:
        return [ShownTurn("", [], list(_spans(inspected, scale, slice(0, len(inspected.pieces)))))]
    found = []
    for number, (turn, calls) in enumerate(zip(turns, inspected.calls, strict=True), 1):
        mean = f", mean coefficient {coefficients[turn].mean():.3f}" if turn.stop > turn.start else ""
        found.append(ShownTurn(f"turn {number}{mean}", calls, list(_spans(inspected, scale, turn))))
    return found


def _spans(inspected: InspectedResponse, scale: ColourScale, part: slice) -> Iterator[Span]:
    """The tokens of a part of a response, and what the environment wrote after them."""
    response = inspected.response
    if part.start == 0 and inspected.written[0]:
        yield _written(inspected.written[0])
    levels = scale.levels(response.coefficients[part])
    for place, level in enumerate(levels.tolist(), part.start):
        coefficient = response.coefficients[place]
        classes = (css_class(level), "false" if inspected.false[place] else "")
        probability, entropy = math.exp(min(response.logprobs[place], 0)), response.entropies[place]
        hover = f"coefficient {coefficient:.3f}   p {probability:.3g}   entropy {entropy:.2f}"
        yield Span(text.visible(inspected.pieces[place], "↵\n"), " ".join(filter(None, classes)), hover)
        if inspected.written[place + 1]:
            yield _written(inspected.written[place + 1])


def _written(words: str) -> Span:
    return Span(text.visible(words, "↵\n"), ENVIRONMENT, "written by the environment")


def episode_facts(inspected: InspectedResponse) -> str:
    """How an episode went, in words; empty for a response of one turn."""
    episode = inspected.response.episode
    if not episode:
        return ""
    facts = [f"{episode[name]} {name}" for name in ("turns", "calls")]
    facts += [f"{episode['errors']} calls failed"] if episode["errors"] else []
    facts += [f"{episode['cut']} answers cut"] if episode["cut"] else []
    facts.append(f"{episode['observation_tokens']} tokens and {episode['seconds']:.3g} s of the environment")
    return ", ".join([*facts, f"ended: {inspected.response.failure or episode['ended']}"])


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
    made.globals |= {
        "shown_turns": shown_turns,
        "episode_facts": episode_facts,
        "LEVELS": LEVELS,
        "KINDS": KINDS,
        "mark": mark,
    }
    return made


def inspection_page(inspection: Inspection) -> str:
    """The page of ``delta inspect --format html``."""
    return environment().get_template("inspect.html.jinja").render(inspection=inspection)
