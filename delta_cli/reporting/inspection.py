"""``delta inspect``: the credit of each token in the responses to one prompt, and by token over a step or run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from backends.arrays import Bools
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.reporting.call_credit import CallCredit, call_credits
from delta_cli.reporting.coefficient_statistics import CoefficientStatistics, TokenTable
from delta_cli.reporting.colour_scale import ColourScale
from delta_cli.reporting.prefix_tree import PrefixNode, first_parting, prefix_tree
from delta_cli.rewards.equations import Equation, find_equations
from delta_cli.runs.records import RecordedResponse, RecordedRun

LISTED = 8  # problems in an error message


@dataclass(frozen=True)
class InspectedResponse:
    """A recorded response with the text of each token and the equations in it.

    The n tokens are those that the model wrote. ``written`` is what an environment wrote before each of them and after
    the last; it is read for equations, too.
    """

    response: RecordedResponse
    pieces: list[str]  # [n]
    equations: tuple[Equation, ...]
    false: Bools  # [n] whether the token is part of an equation that does not hold
    written: list[str]  # [n + 1] empty without an environment

    @classmethod
    def of(cls, response: RecordedResponse, tokenizer: Tokenizer) -> InspectedResponse:
        """Split the response into the texts of its tokens and check its equations."""
        region, own = response.whole_region
        pieces = tokenizer.pieces(region)
        equations = find_equations("".join(pieces))
        stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        false = np.zeros(len(pieces), bool)
        for equation in equations:
            if not equation.holds:
                false |= (stops > equation.start) & (starts < equation.stop)
        written = [""] * (int(own.sum()) + 1)
        for place, piece in zip(np.cumsum(own)[~own], itertools.compress(pieces, ~own), strict=True):
            written[place] += piece
        return cls(response, list(itertools.compress(pieces, own)), equations, false[own], written)

    @property
    def turns(self) -> list[slice]:
        """The model's tokens of each turn of an episode; empty for a response of one turn."""
        begins = [0, *(place for place in range(1, len(self.pieces)) if self.written[place])]
        ends = [*begins[1:], len(self.pieces)]
        return [slice(*both) for both in zip(begins, ends, strict=True)] if self.response.episode else []

    @cached_property
    def calls(self) -> list[list[CallCredit]]:
        """The tool calls of each turn; empty for a response of one turn."""
        coefficients = self.response.coefficients
        return [call_credits(self.pieces[turn], coefficients[turn]) for turn in self.turns]

    @property
    def turn_means(self) -> str:
        """The mean coefficient of each turn of an episode, in words; otherwise empty."""
        means = [f"{self.response.coefficients[turn].mean():.3f}" for turn in self.turns if turn.stop > turn.start]
        return f"turns {', '.join(means)}" if len(means) > 1 else ""

    @property
    def mean(self) -> float:
        """Mean coefficient of the tokens; 1 if there are none."""
        return float(self.response.coefficients.mean()) if len(self.response) else 1.0


Variant = tuple[InspectedResponse, int]  # a response and how often it was drawn


@dataclass(frozen=True)
class Inspection:
    """The responses to one prompt in one step, and statistics of the tokens of the step or the run."""

    run: str
    step: int
    problem: str
    prompt: str
    answer: str
    others: tuple[str, ...]  # ids of all problems of the step
    responses: tuple[InspectedResponse, ...]  # right ones first, otherwise as recorded
    tree: PrefixNode  # its rows index ``reads``
    table: TokenTable
    table_of: str  # "step 12" or "the run"

    @cached_property
    def variants(self) -> list[Variant]:
        """Each different response and how often it was drawn: right ones first, then by frequency."""
        counts = Counter(inspected.response.tokens.tobytes() for inspected in self.responses)
        first = {inspected.response.tokens.tobytes(): inspected for inspected in reversed(self.responses)}
        ordered = sorted(first.items(), key=lambda item: (not item[1].response.correct, -counts[item[0]]))
        return [(inspected, counts[tokens]) for tokens, inspected in ordered]

    @cached_property
    def scale(self) -> ColourScale:
        """The colour scale that covers the responses."""
        return ColourScale.covering(inspected.response.coefficients for inspected in self.responses)

    @cached_property
    def parting(self) -> PrefixNode | None:
        """Where a right and a wrong response first branch."""
        return first_parting(self.tree)

    def text(self, node: PrefixNode, limit: int | None = None) -> str:
        """The text of the first ``limit`` tokens of a node, or of all of them."""
        stop = node.stop if limit is None else min(node.stop, node.start + limit)
        return "".join(self.responses[node.rows[0]].pieces[node.start : stop])

    def coefficient(self, node: PrefixNode) -> float:
        """Mean coefficient of a node's first token over the responses that run through it."""
        return float(np.mean([self.responses[row].response.coefficients[node.start] for row in node.rows]))

    def false_mean(self) -> float | None:
        """Mean coefficient of the tokens of false equations in wrong responses; None if there are none."""
        found = [
            inspected.response.coefficients[inspected.false]
            for inspected in self.responses
            if not inspected.response.correct
        ]
        values = np.concatenate(found) if found else np.zeros(0)
        return float(values.mean()) if len(values) else None


def inspect_run(path: Path, step: int | None = None, problem: str | None = None, whole_run: bool = False) -> Inspection:
    """What ``delta inspect`` shows.

    ``step`` is the last recorded step by default. ``problem`` is an id, the number of a prompt of the step (from 1),
    or words of the prompt; by default it is a prompt with right and wrong responses. With ``whole_run`` the table of
    tokens covers every recorded step. Raises UserError if there is no such run, step or problem.
    """
    run = RecordedRun(path)
    step = run.check_step(step)
    statistics = CoefficientStatistics()
    groups: list[list[RecordedResponse]] = []
    for _, responses in groupby(run.responses(step), key=lambda response: response.group):
        groups.append(list(responses))
        for response in groups[-1]:
            statistics.add(response)
    if not groups:
        raise UserError(f"{path}: step {step} holds no whole response; choose another with --step")
    for other in run.steps if whole_run else ():
        if other != step:
            for response in run.responses(other):
                statistics.add(response)
    chosen = choose(groups, problem, f"{path}: step {step}")
    return build(
        run,
        step,
        chosen,
        others=tuple(group[0].problem for group in groups),
        table=statistics.table(run.tokenizer),
        table_of="the run" if whole_run else f"step {step}",
    )


def build(
    run: RecordedRun,
    step: int,
    group: Sequence[RecordedResponse],
    others: tuple[str, ...],
    table: TokenTable,
    table_of: str,
) -> Inspection:
    """The inspection of the responses ``group`` to one prompt."""
    ordered = sorted(group, key=lambda response: not response.correct)
    return Inspection(
        run=run.name,
        step=step,
        problem=group[0].problem,
        prompt=group[0].prompt,
        answer=group[0].answer,
        others=others,
        responses=tuple(InspectedResponse.of(response, run.tokenizer) for response in ordered),
        tree=prefix_tree(ordered),
        table=table,
        table_of=table_of,
    )


def most_mixed(groups: Iterable[Sequence[RecordedResponse]]) -> Sequence[RecordedResponse]:
    """The group whose share of right responses is closest to one half; the first one if several are."""
    return min(groups, key=lambda group: abs(2 * sum(each.correct for each in group) - len(group)) / len(group))


def choose(groups: Sequence[Sequence[RecordedResponse]], problem: str | None, where: str) -> Sequence[RecordedResponse]:
    """The group that ``problem`` names; raises UserError if it names none or several."""
    if problem is None:
        return most_mixed(groups)
    for group in groups:
        if group[0].problem == problem:
            return group
    if problem.isdecimal() and 1 <= int(problem) <= len(groups):
        return groups[int(problem) - 1]
    found = [group for group in groups if problem in group[0].prompt or problem in group[0].problem]
    if len(found) == 1:
        return found[0]
    named = ", ".join(group[0].problem for group in (found or groups)[:LISTED])
    what = f"{len(found)} problems contain '{problem}'" if found else f"no problem is or contains '{problem}'"
    raise UserError(f"{where}: {what}; choose an id ({named}, …) or a number from 1 to {len(groups)}")


def to_json(inspection: Inspection) -> str:
    """The inspection as JSON: an object with run, step, problem, responses, tree and tokens."""
    parting = inspection.parting
    return json.dumps(
        {
            "run": inspection.run,
            "step": inspection.step,
            "problem": inspection.problem,
            "prompt": inspection.prompt,
            "answer": inspection.answer,
            "problems": inspection.others,
            "responses": [_response(inspected) for inspected in inspection.responses],
            "tree": _node(inspection, inspection.tree),
            "first_parting": None if parting is None else {"tokens_before": parting.stop, "after": _before(inspection)},
            "tokens": {"of": inspection.table_of} | asdict(inspection.table),
        },
        indent=1,
    )


def _before(inspection: Inspection) -> str:
    """The text that right and wrong responses share before they first branch."""
    parting = inspection.parting
    return "" if parting is None else "".join(inspection.responses[parting.rows[0]].pieces[: parting.stop])


def _response(inspected: InspectedResponse) -> dict[str, Any]:
    response = inspected.response
    return {
        "text": response.text,
        "reward": response.reward,
        "rewards": dict(response.rewards),
        "correct": response.correct,
        "advantage": response.advantage,
        "truncated": response.truncated,
        "failure": response.failure,
        "pieces": inspected.pieces,
        "environment": inspected.written if response.episode else [],
        "episode": dict(response.episode),
        "calls": [{"turn": turn} | asdict(call) for turn, calls in enumerate(inspected.calls, 1) for call in calls],
        "tokens": response.tokens.tolist(),
        "coefficients": response.coefficients.tolist(),
        "logprobs": response.logprobs.tolist(),
        "entropies": response.entropies.tolist(),
        "equations": [asdict(equation) for equation in inspected.equations],
    }


def _node(inspection: Inspection, node: PrefixNode) -> dict[str, Any]:
    return {
        "start": node.start,
        "stop": node.stop,
        "text": inspection.text(node),
        "responses": list(node.rows),
        "right": node.right,
        "wrong": node.wrong,
        "parts": node.parts,
        "coefficient": inspection.coefficient(node) if node.stop > node.start else None,
        "children": [_node(inspection, child) for child in node.children],
    }
