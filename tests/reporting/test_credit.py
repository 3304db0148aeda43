"""Colours, the prefix tree and the table of tokens, against what was worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.reporting.coefficient_statistics import CoefficientStatistics, kind_of
from delta_cli.reporting.colour_scale import BLUE, LEVELS, ORANGE, ColourScale, css_class, mark, terminal_style
from delta_cli.reporting.prefix_tree import PrefixNode, first_parting, prefix_tree
from delta_cli.runs.records import RecordedResponse
from tests.reporting.synthetic import record, start


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes and a few special tokens."""
    return start(tmp_path_factory.mktemp("runs") / "run")[1]


def test_scale_ends_and_middle() -> None:
    """1 has no colour; the ends have the strongest; what lies beyond has no more."""
    scale = ColourScale(0.2)
    levels = scale.levels(np.array([0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 5.0]))
    assert levels.tolist() == [-LEVELS, -LEVELS, -LEVELS // 2, 0, LEVELS // 2, LEVELS, LEVELS]
    assert [css_class(int(level)) for level in levels[1:6]] == ["d8", "d4", "", "u4", "u8"]
    assert [mark(int(level)) for level in levels[1:6]] == ["▼", "▼", " ", "▲", "▲"]
    assert terminal_style(LEVELS) == "black on rgb({},{},{})".format(*ORANGE)
    assert terminal_style(-LEVELS) == "black on rgb({},{},{})".format(*BLUE)
    assert terminal_style(0) == ""
    assert scale.ends == pytest.approx((0.8, 1.2))


def test_scale_covers_all_but_outliers() -> None:
    """One coefficient among hundreds does not fade the others; equal ones give a scale that colours nothing."""
    usual = np.tile([0.8, 1.2], 500)
    assert ColourScale.covering([usual, np.array([40.0])]).reach == pytest.approx(0.2)
    flat = ColourScale.covering([np.ones(5)])
    assert flat.levels(np.ones(5)).tolist() == [0] * 5


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of WCAG 2."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("tint", [ORANGE, BLUE])
def test_black_is_legible_on_every_colour(tint: tuple[int, int, int]) -> None:
    """The contrast of the letters is at least 4.5, the AA level."""
    assert (luminance(tint) + 0.05) / 0.05 >= 4.5


def test_prefix_tree_by_hand(tokenizer: Tokenizer) -> None:
    r"""Four responses: ``abcX`` right, ``abcY`` wrong, ``abZ`` wrong, ``q`` right.

    They part at once into ab… and q; after ab into c and Z; after abc into X (right) and Y (wrong).
    """
    texts = {"abcX": True, "abcY": False, "abZ": False, "q": True}
    group = [RecordedResponse.read(record(tokenizer, text, correct=right)) for text, right in texts.items()]
    root = prefix_tree(group)

    def shape(node: PrefixNode) -> tuple[int, int, tuple[int, ...], int, int, bool, list]:  # type: ignore[type-arg]
        children = [shape(child) for child in node.children]
        return node.start, node.stop, node.rows, node.right, node.wrong, node.parts, children

    abc = (2, 3, (0, 1), 1, 1, True, [(3, 5, (0,), 1, 0, False, []), (3, 5, (1,), 0, 1, False, [])])
    ab = (0, 2, (0, 1, 2), 1, 2, True, [abc, (2, 4, (2,), 0, 1, False, [])])
    assert shape(root) == (0, 0, (0, 1, 2, 3), 2, 2, True, [ab, (0, 2, (3,), 1, 0, False, [])])
    assert first_parting(root) is root


def test_prefix_tree_without_a_parting(tokenizer: Tokenizer) -> None:
    """One outcome, one response, or equal responses: a tree, but no place where right and wrong part."""
    same = [RecordedResponse.read(record(tokenizer, "ab", correct=True)) for _ in range(3)]
    root = prefix_tree(same)
    assert (root.start, root.stop, root.rows, root.children) == (0, 3, (0, 1, 2), ())
    assert first_parting(root) is None


def test_first_parting_is_after_the_shared_beginning(tokenizer: Tokenizer) -> None:
    """``7+8=15`` and ``7+8=14`` part after ``7+8=1``."""
    pair = [RecordedResponse.read(record(tokenizer, text, correct=text.endswith("5"))) for text in ("7+8=15", "7+8=14")]
    parting = first_parting(prefix_tree(pair))
    assert parting is not None
    assert tokenizer.decode(pair[0].tokens[: parting.stop]) == "7+8=1"


def test_token_table_by_hand(tokenizer: Tokenizer) -> None:
    """Means and counts by token and side; responses without an advantage do not count."""
    statistics = CoefficientStatistics()
    for _ in range(5):
        statistics.add(RecordedResponse.read(record(tokenizer, "7a", correct=True, coefficients=[1.2, 1.1, 0.9])))
        statistics.add(RecordedResponse.read(record(tokenizer, "7-", correct=False, coefficients=[0.8, 0.7, 0.95])))
        statistics.add(
            RecordedResponse.read(record(tokenizer, "9", correct=True, advantage=0.0, coefficients=[0.8, 0.8]))
        )
    table = statistics.table(tokenizer)
    assert (table.responses, table.tokens) == (15, 30)

    def rows(part: dict) -> dict[str, list[tuple[str, str, float, int]]]:  # type: ignore[type-arg]
        return {kind: [(c.text, c.side, round(c.mean, 6), c.count) for c in found] for kind, found in part.items()}

    end = "<|endoftext|>"
    assert rows(table.amplified) == {"formatting": [], "digits": [("7", "+", 1.2, 5)], "words": [("a", "+", 1.1, 5)]}
    assert rows(table.damped) == {
        "formatting": [("-", "−", 0.7, 5), (end, "+", 0.9, 5), (end, "−", 0.95, 5)],
        "digits": [("7", "−", 0.8, 5)],
        "words": [],
    }


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("7", "digits"), (" 12", "digits"), ("the", "words"), (" é", "words"),
        ("\\boxed", "formatting"), ("+", "formatting"), ("\n\n", "formatting"), ("", "formatting"),
    ],
)  # fmt: skip
def test_kinds(text: str, kind: str) -> None:
    """Digits, words, and everything that only shapes the text."""
    assert kind_of(text) == kind
