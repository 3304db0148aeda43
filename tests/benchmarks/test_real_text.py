"""Kinds of tokens and first wrong digits, by hand; the tables against loops over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from analysis.real_text import agreements, findings, first_wrong, kind_of, kind_rows, kinds
from scipy import stats

from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.runs.records import RecordedResponse


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("tiny-base"))


def response(tokenizer: Tokenizer, text: str, advantage: float, seed: int = 0, **changes: Any) -> RecordedResponse:
    tokens = np.append(tokenizer.encode(text), tokenizer.eos_ids[0])
    rng = np.random.default_rng(seed)
    numbers = {name: rng.random(len(tokens)) for name in ("coefficients", "entropies")}
    fields = {
        "group": 0,
        "problem": "p",
        "prompt": "",
        "answer": "",
        "text": text,
        "tokens": tokens,
        "logprobs": -rng.random(len(tokens)),
        "reward": 0.0,
        "correct": advantage > 0,
        "failure": None,
        "advantage": advantage,
        "truncated": False,
    }
    return RecordedResponse(**(fields | numbers | changes))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("7", "digits"),
        (" 12", "digits"),
        (" +", "operators"),
        ("==", "operators"),
        (" boxes", "words"),
        ("x2", "words"),
        (",", "formatting"),
        (" ", "formatting"),
        ("", "formatting"),
        ("\n\n", "formatting"),
    ],
)
def test_the_kind_of_a_token(text: str, kind: str) -> None:
    assert kind_of(text) == kind


def test_only_the_token_that_ends_a_response_is_its_end(tokenizer: Tokenizer) -> None:
    whole = response(tokenizer, "1\n", -1.0)
    assert kinds(whole, tokenizer) == ["digits", "formatting", "end"]
    stopped = response(tokenizer, "1\n", -1.0, tokens=tokenizer.encode("1\n"))
    assert kinds(stopped, tokenizer) == ["digits", "end"], "by a stop string"
    cut = response(tokenizer, "1\n", -1.0, truncated=True)
    assert kinds(cut, tokenizer)[-1] != "end"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("2 * 7 = 14, 14 + 3 = 17", None),
        ("2 * 7 = 15, 14 + 3 = 18", "5"),  # the first of two
        ("12 * 3 = 46", "4"),
        ("12 * 3 = 3", " "),  # it stops too early: the token after it
        ("12 * 3 = 361", "1"),  # it goes on too long
        ("9 - 12 = 3", "3"),
        ("7 / 2 = 4", "4"),
        ("7 / 0 = 4", None),
        ("1.5 * 2 = 4", None),  # no whole numbers
        ("x = 4", None),
        ("", None),
    ],
)
def test_the_first_wrong_token(text: str, wrong: str | None) -> None:
    pieces = list(text + " ")
    found = first_wrong(pieces)
    if wrong is None:
        assert found is None
        return
    assert found is not None
    expected = {
        "5": text.find("15") + 1,
        "4": text.find("= ") + 2,
        " ": len(text),
        "1": len(text) - 1,
        "3": len(text) - 1,
    }
    assert found == expected[wrong]
    assert pieces[found] == wrong


def test_tables_against_loops(tokenizer: Tokenizer) -> None:
    """Means, shares, rank correlations and AUCs of a few responses with random numbers."""
    texts = [("2 * 7 = 14 so", 1.0), ("2 * 7 = 15 so", -1.0), ("3 + 3 = 9", -2.0), ("3 + 3 = 6", 0.0), ("no", -1.0)]
    responses = [response(tokenizer, text, advantage, seed) for seed, (text, advantage) in enumerate(texts)]
    tokens = [
        (np.sign(each.advantage), kind, each.coefficients[at], -each.logprobs[at], each.entropies[at])
        for each in responses
        if each.advantage
        for at, kind in enumerate(kinds(each, tokenizer))
    ]
    rows = kind_rows(responses, tokenizer)
    assert {row.kind for row in rows} == {"digits", "operators", "words", "formatting", "end"}
    for row in rows:
        side = [token for token in tokens if token[0] == (1 if row.side == "+" else -1)]
        own = [token for token in side if token[1] == row.kind]
        assert row.share == pytest.approx(len(own) / len(side))
        means = np.mean([token[2:] for token in own], axis=0)
        assert (row.coefficient, row.surprisal, row.entropy) == pytest.approx(tuple(means))
    for found, sign in zip(agreements(responses, tokenizer), (1, -1), strict=True):
        coefficient, surprisal, entropy = np.array([token[2:] for token in tokens if token[0] == sign]).T
        assert found.tokens == len(coefficient)
        assert found.surprisal == pytest.approx(stats.spearmanr(coefficient, surprisal).statistic)
        assert found.entropy == pytest.approx(stats.spearmanr(coefficient, entropy).statistic)
    for finding, name in zip(findings(responses, tokenizer), ("coefficients", "logprobs", "entropies"), strict=True):
        chances, among_digits = [], []
        for each in responses[1:3]:
            pieces = tokenizer.pieces(each.tokens)
            wrong = first_wrong(pieces)
            values = getattr(each, name) * (-1 if name == "logprobs" else 1)
            others = [at for at in range(len(pieces)) if at != wrong]
            chances.append(np.mean([values[wrong] > values[at] for at in others]))
            among_digits.append(np.mean([values[wrong] > values[at] for at in others if pieces[at].strip().isdigit()]))
        assert finding.responses == 2
        assert (finding.auc, finding.auc_digits) == pytest.approx((np.mean(chances), np.mean(among_digits)))


def test_nothing_to_find_is_not_a_number(tokenizer: Tokenizer) -> None:
    found = findings([response(tokenizer, "no", -1.0)], tokenizer)
    assert all(np.isnan(each.auc) and each.responses == 0 for each in found)
