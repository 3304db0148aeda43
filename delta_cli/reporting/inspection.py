"""``delta inspect``: the credit of one prompt's responses, token by token, and of the tokens of a batch or run."""

from __future__ import annotations

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
from delta_cli.reporting.coefficient_statistics import CoefficientStatistics, TokenTable
from delta_cli.reporting.colour_scale import ColourScale
from delta_cli.reporting.prefix_tree import PrefixNode, first_parting, prefix_tree
from delta_cli.rewards.equations import Equation, find_equations
from delta_cli.runs.records import RecordedResponse, RecordedRun

NAMED = 8  # problems that an error message lists


@dataclass(frozen=True)
class InspectedResponse:
    """A response with the text of each token and the equations it writes."""

    response: RecordedResponse
    pieces: list[str]  # [n]
    equations: tuple[Equation, ...]
    false: Bools  # [n] tokens inside an equation that does not hold

    @classmethod
    def of(cls, response: RecordedResponse, tokenizer: Tokenizer) -> InspectedResponse:
        """Find the pieces and check the equations."""
        pieces = tokenizer.pieces(response.tokens)
        equations = find_equations("".join(pieces))
        stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        false = np.zeros(len(pieces), bool)
        for equation in equations:
            if not equation.holds:
                false |= (stops > equation.start) & (starts < equation.stop)
        return cls(response, pieces, equations, false)

    @property
    def mean(self) -> float:
        """Mean coefficient of its tokens; 1 without tokens."""
        return float(self.response.coefficients.mean()) if len(self.response) else 1.0


@dataclass(frozen=True)
class Inspection:
    """One prompt's responses in one step, and the tokens of the step or run around them."""

    run: str
    step: int
    problem: str
    prompt: str
    answer: str
    others: tuple[str, ...]  # ids of all problems of the step
    reads: tuple[InspectedResponse, ...]  # right ones first, otherwise as recorded
    tree: PrefixNode  # its rows index ``reads``
    table: TokenTable
    table_of: str  # "step 12" or "the run"

    @cached_property
    def variants(self) -> list[tuple[InspectedResponse, int]]:
        """The responses without repetitions, and how often each was drawn; the most frequent first on each side."""
        counts = Counter(read.response.tokens.tobytes() for read in self.reads)
        first = {read.response.tokens.tobytes(): read for read in reversed(self.reads)}
        ordered = sorted(first.items(), key=lambda item: (not item[1].response.correct, -counts[item[0]]))
        return [(read, counts[tokens]) for tokens, read in ordered]

    @cached_property
    def scale(self) -> ColourScale:
        """The colours' range, from the responses shown."""
        return ColourScale.covering(read.response.coefficients for read in self.reads)

    @cached_property
    def parting(self) -> PrefixNode | None:
        """Where a right and a wrong response first go different ways."""
        return first_parting(self.tree)

    def text(self, node: PrefixNode, limit: int | None = None) -> str:
        """What the tokens of a node say, the first ``limit`` of them."""
        stop = node.stop if limit is None else min(node.stop, node.start + limit)
        return "".join(self.reads[node.rows[0]].pieces[node.start : stop])

    def coefficient(self, node: PrefixNode) -> float:
        """Mean coefficient of a node's first token over the responses that go through it."""
        return float(np.mean([self.reads[row].response.coefficients[node.start] for row in node.rows]))

    def false_mean(self) -> float | None:
        """Mean coefficient of the tokens in false equations of wrong responses; None where there are none."""
        found = [read.response.coefficients[read.false] for read in self.reads if not read.response.correct]
        values = np.concatenate(found) if found else np.zeros(0)
        return float(values.mean()) if len(values) else None


def inspect_run(path: Path, step: int | None = None, problem: str | None = None, whole_run: bool = False) -> Inspection:
    """What ``delta inspect`` shows.

    ``step``: the last recorded one without it. ``problem``: an id, a number of the step's prompts
    counted from 1, or words of the prompt; without it a prompt with right and wrong responses.
    ``whole_run``: the table of tokens is over every recorded step instead of this one.

    Raises UserError where there is no such run, step or problem.
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
    """The inspection of one prompt's responses."""
    ordered = sorted(group, key=lambda response: not response.correct)
    return Inspection(
        run=run.name,
        step=step,
        problem=group[0].problem,
        prompt=group[0].prompt,
        answer=group[0].answer,
        others=others,
        reads=tuple(InspectedResponse.of(response, run.tokenizer) for response in ordered),
        tree=prefix_tree(ordered),
        table=table,
        table_of=table_of,
    )


def most_mixed(groups: Iterable[Sequence[RecordedResponse]]) -> Sequence[RecordedResponse]:
    """The group whose shares of right and wrong are nearest to one half; the first of equals."""
    return min(groups, key=lambda group: abs(2 * sum(each.correct for each in group) - len(group)) / len(group))


def choose(groups: Sequence[Sequence[RecordedResponse]], problem: str | None, where: str) -> Sequence[RecordedResponse]:
    """The group a person means; raises UserError where it is none, or several."""
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
    named = ", ".join(group[0].problem for group in (found or groups)[:NAMED])
    what = f"{len(found)} problems contain '{problem}'" if found else f"no problem is or contains '{problem}'"
    raise UserError(f"{where}: {what}; choose an id ({named}, …) or a number from 1 to {len(groups)}")


def to_json(inspection: Inspection) -> str:
    """The inspection for programs: an object with run, step, problem, responses, tree and tokens."""
    parting = inspection.parting
    return json.dumps(
        {
            "run": inspection.run,
            "step": inspection.step,
            "problem": inspection.problem,
            "prompt": inspection.prompt,
            "answer": inspection.answer,
            "problems": inspection.others,
            "responses": [_response(read) for read in inspection.reads],
            "tree": _node(inspection, inspection.tree),
            "first_parting": None if parting is None else {"tokens_before": parting.stop, "after": _before(inspection)},
            "tokens": {"of": inspection.table_of} | asdict(inspection.table),
        },
        indent=1,
    )


def _before(inspection: Inspection) -> str:
    """The text that right and wrong responses share before they first part."""
    parting = inspection.parting
    return "" if parting is None else "".join(inspection.reads[parting.rows[0]].pieces[: parting.stop])


def _response(read: InspectedResponse) -> dict[str, Any]:
    response = read.response
    return {
        "text": response.text,
        "reward": response.reward,
        "rewards": dict(response.rewards),
        "correct": response.correct,
        "advantage": response.advantage,
        "truncated": response.truncated,
        "failure": response.failure,
        "pieces": read.pieces,
        "tokens": response.tokens.tolist(),
        "coefficients": response.coefficients.tolist(),
        "logprobs": response.logprobs.tolist(),
        "entropies": response.entropies.tolist(),
        "equations": [asdict(equation) for equation in read.equations],
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
