"""Does the credit find the mistake? How well token weights single out the first wrong token of a response.

On the embedded task the solver knows every step, so the first token at which a wrong response
departs from the derivation is known exactly. A weight that finds it is larger there than on the
other tokens of the same response. Most mistakes are wrong results, and a weight may favour results
as such, so the comparison with the response's other results is the harder test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from backends.arrays import Bools, Doubles
from backends.interface import Ids, Learner, Proxy, ProxyKind
from delta_cli.credit import group_advantages, method, token_coefficients
from delta_cli.credit.surrogate import future_kl_weights
from delta_cli.data import arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.update import Updater


@dataclass(frozen=True)
class Variant:
    """A row of the table: DelTA with a proxy, a scope, and settings of the coefficients."""

    name: str
    proxy: ProxyKind = "output_row"
    by_group: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = (  # those of a proxy together: they share its forward
    Variant("delta"),
    Variant("delta, by group", by_group=True),
    Variant("delta, K = 0", settings={"refinements": 0}),
    Variant("delta, K = 2", settings={"refinements": 2}),
    Variant("delta, hard scores", settings={"score": "hard"}),
    Variant("delta, fixed temperature", settings={"temperature": 1.0}),
    Variant("delta, within side", settings={"contrast": "within"}),
    Variant("delta, random", settings={"score": "random"}),
    Variant("delta hidden_topk", "hidden_topk"),
    Variant("delta hidden_topk, by group", "hidden_topk", by_group=True),
    Variant("delta hidden_exact", "hidden_exact"),
    Variant("delta hidden_exact, by group", "hidden_exact", by_group=True),
)


@dataclass(frozen=True)
class Marks:
    """What the solver knows of the tokens of a batch."""

    mistakes: Ids  # [R] flat index of each wrong response's first wrong token; -1 without one
    results: Bools  # [N] digits after an equals sign, in responses with a mistake
    digits: Bools  # [N] digits; all other tokens are formatting


@dataclass(frozen=True)
class Separation:
    """How a weight treats the first wrong token against the other tokens of the same wrong responses.

    An AUC is the chance that the first wrong token outweighs another token of its response, ties
    counting half: 0.5 is no better than chance. It is NaN where no response can be compared.
    """

    weight: str
    there: float  # mean weight of the first wrong token
    elsewhere: float  # mean over responses of the mean weight of the other tokens
    auc: float  # against all other tokens
    auc_results: float  # against the other results, of mistakes in a result
    responses: int
    responses_results: int


@dataclass(frozen=True)
class KindMeans:
    """Mean weight of formatting and of digit tokens, in responses with A > 0 and with A < 0."""

    formatting_share: float  # of the tokens with an advantage
    formatting_positive: float
    digits_positive: float
    formatting_negative: float
    digits_negative: float


def mark(batch: RolloutBatch, task: Arithmetic, tokenizer: Tokenizer) -> Marks:
    """Find the digits, and the first wrong token of every response that is graded wrong and trained on.

    In a group that is all wrong no response has an advantage, and there is no credit to place.
    """
    starts, tokens = batch.sequences.starts, batch.sequences.tokens
    ids, inverse = np.unique(tokens, return_inverse=True)
    digits = np.array([tokenizer.decode([token]).isdigit() for token in ids], bool)[inverse]
    mistakes = np.full(len(batch.texts), -1, np.int64)
    results = np.zeros(len(tokens), bool)
    for row in np.flatnonzero(~batch.correct & np.isin(batch.groups, batch.mixed_groups)):
        own = batch.sequences.response(int(row))
        character = arithmetic.first_error(batch.problems[row // batch.samples], batch.texts[row], task)
        if character is None or not len(own):
            continue
        pieces = tokenizer.pieces(own)
        mistakes[row] = starts[row] + arithmetic.token_at(pieces, character)
        for match in re.finditer(r"=(\d+)", "".join(pieces)):
            first, last = (arithmetic.token_at(pieces, place) for place in (match.start(1), match.end(1) - 1))
            results[starts[row] + first : starts[row] + last + 1] = True
    return Marks(mistakes, results, digits)


def separation(name: str, weights: Doubles, marks: Marks, starts: Ids) -> Separation:
    """Summarise weights [N] over the responses with a mistake; ``starts`` [R+1]."""
    there, elsewhere, wins, wins_results = [], [], [], []
    for row in np.flatnonzero(marks.mistakes >= 0):
        place = marks.mistakes[row]
        others = np.arange(starts[row], starts[row + 1])
        others = others[others != place]
        if not len(others):
            continue
        there.append(weights[place])
        elsewhere.append(weights[others].mean())
        wins.append(_outweighs(weights[place], weights[others]))
        results = others[marks.results[others]]
        if marks.results[place] and len(results):
            wins_results.append(_outweighs(weights[place], weights[results]))
    return Separation(
        weight=name,
        there=_mean(there),
        elsewhere=_mean(elsewhere),
        auc=_mean(wins),
        auc_results=_mean(wins_results),
        responses=len(wins),
        responses_results=len(wins_results),
    )


def _mean(values: ArrayLike) -> float:
    found = np.asarray(values, np.float64)
    return float(found.mean()) if found.size else np.nan


def _outweighs(weight: np.float64, others: Doubles) -> float:
    return float(np.mean((weight > others) + 0.5 * (weight == others)))


def kind_means(weights: Doubles, advantages: Doubles, digits: Bools) -> KindMeans:
    """Mean weights [N] by kind and side; ``advantages`` of the tokens [N]."""
    positive, negative = advantages > 0, advantages < 0
    return KindMeans(
        formatting_share=_mean(~digits[positive | negative]),
        formatting_positive=_mean(weights[positive & ~digits]),
        digits_positive=_mean(weights[positive & digits]),
        formatting_negative=_mean(weights[negative & ~digits]),
        digits_negative=_mean(weights[negative & digits]),
    )


def token_weights(learner: Learner, batch: RolloutBatch, step: int) -> dict[str, Doubles]:
    """The weight [N] that each variant, and each plain statistic, gives every token under the current policy."""
    advantages = group_advantages(batch.rewards, batch.groups)
    found: dict[str, Doubles] = {}
    for proxy, variants in groupby(VARIANTS, key=lambda variant: variant.proxy):
        scores = learner.score(batch.sequences, Proxy(proxy))
        assert scores.features is not None
        for variant in variants:
            found[variant.name] = token_coefficients(
                scores.features,
                advantages,
                batch.sequences.starts,
                groups=batch.groups if variant.by_group else None,
                rng=np.random.default_rng(step),
                **variant.settings,
            ).weights
        scores.features.close()
    found["entropy (forking tokens)"] = np.asarray(scores.entropies, np.float64)
    found["surprisal"] = -np.asarray(scores.logprobs, np.float64)
    return found


def updated_future_kl(updater: Updater, batch: RolloutBatch, step: int) -> Doubles:
    """Make the step's updates and return FIPO's weights [N] after them; before, they are all 1."""
    scored = updater.score(batch, every=True)
    updater.update(scored, updater.credit(scored, step), step)
    moved = np.asarray(updater.learner.score(batch.sequences).logprobs, np.float64)
    delta = np.clip(moved - scored.old_logprobs, -20, 20)
    lengths = batch.sequences.lengths
    weights, _ = future_kl_weights(delta, np.repeat(scored.advantages, lengths), lengths, method("fipo"))
    return weights
