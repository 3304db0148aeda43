r"""One spelling for answers that look alike: what LaTeX typesets the same, and what people type instead."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_CHARACTERS = 2000  # of an answer; a longer one is refused unread
MAX_DEPTH = 24  # of its brackets

UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "≈": r"\approx ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
    "€": r"\text{€}", "£": r"\text{£}", "θ": r"\theta ", "′": "'", "’": "'", "\u00a0": " ", "％": "%",
}  # fmt: skip

ORDER = {"leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ", "geqslant": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">"}
NAMES = {"pi": r"\pi ", "sqrt": r"\sqrt", "infinity": r"\infty "}
LETTER_COMMANDS = ("mathbf", "mathit", "boldsymbol", "bm")

Replacement = str | Callable[[re.Match[str]], str]


def _text(match: re.Match[str]) -> str:
    """One command for upright text; a lone letter set upright as mathematics is that letter."""
    command, words = match.groups()
    words = words.replace("~", " ").strip()
    if words.lower() in ("and", "or"):
        return ","
    if re.fullmatch("[A-Za-z]", words) and (command in LETTER_COMMANDS or words in "eid"):
        return words
    return rf"\text{{{words}}}" if words else " "


SPELLINGS: list[tuple[str, Replacement]] = [
    (r"[\s\u200b]+", " "),
    (r"\\(?:left|right|middle)(?![A-Za-z])\s*\.?", ""),
    (r"\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
    (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|phantom\{[^{}]*\})(?![A-Za-z])", " "),
    (r"(?<=\d)\s*(?:,|\{\s*,\s*\})\s*\\!\s*(?=\d{3}(?!\d))", "{,}"),  # 11,\! 111
    (r"\\!|\\hspace\{[^{}]*\}|\\label\{[^{}]*\}", ""),
    (r"(?<!\\)\\\(|(?<!\\)\\\)|(?<!\\)\\\[|(?<!\\)\\\]|(?<!\\)\$", " "),
    (r"(?<=\d)(?:\{,\}|\\,|\\ |~|\\;)(?=\d{3}(?!\d))", "{,}"),  # a thousands separator
    (r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace)(?![A-Za-z])|(?<!\\)~", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}"),
    (r"\\log\s*_\s*(\d)", r"\\log_{\1}"),
    (r"\\(text|textbf|textit|textrm|textnormal|textsf|mbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm)"
     r"\s*\{([^{}\\]*)\}", _text),
    (r"\{\s*\\rm\s+([A-Za-z ]+)\}", r"\\text{\1}"),
    (r"\s*(?<![A-Za-z])(?:and|or)(?![A-Za-z])\s*", ","),
    (r",\s*(?:,\s*)+", ","),  # 19, 46, and 82
    (r"(?:\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z]))", r"^{\\circ}"),
    (r"(?<!\\)%", r"\\%"),
    (r"\s*(?<![A-Za-z\\])(?:per\s?cent|pct)(?![A-Za-z])|\s*\\text\{(?:per\s?cent|pct)\}", r"\\%"),
    (r"\\(leq|leqslant|geq|geqslant|neq|lt|gt)(?![A-Za-z])", lambda m: ORDER[m.group(1)]),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=", r"\\ne "),
    (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\\\\s*\[[^\[\]]*\]", r"\\\\ "),  # the space between rows of a matrix
    (r"(?<![\w.\\^])(\d+(?:\.\d+)?)\s*\(", r"\1\\cdot ("),
    (r"\)\s*\(", r")\\cdot ("),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\[lr]vert(?![A-Za-z])|\\vert(?![A-Za-z])", "|"),
    (r"\\mid(?![A-Za-z])", "|"),
    (r"(?<![A-Za-z\\])(pi|sqrt|infinity)(?![A-Za-z])", lambda m: NAMES[m.group(1)]),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
]  # fmt: skip
RULES = [(re.compile(pattern), replacement) for pattern, replacement in SPELLINGS]

BRACKET = re.compile(r"\\[{}]|[\[\](){}]")
TRANSLATION = str.maketrans(UNICODE)


def normalise(answer: str) -> str | None:
    """The answer in one spelling; None where it is empty, too long or nested too deeply to be one."""
    if not answer or len(answer) > MAX_CHARACTERS or _depth(answer) > MAX_DEPTH:
        return None
    text = answer.translate(TRANSLATION)
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return trim(text) or None


def trim(text: str) -> str:
    """Without the spaces, closing punctuation and superfluous outer braces around an answer."""
    while True:
        text = text.strip()
        shorter = re.sub(r"(?<!\\)[.,;:]+$", "", text)
        opening = re.match(r"(?:\\boxed|\\fbox)?\s*\{", shorter)
        if opening and closing(shorter, opening.end() - 1) == len(shorter) - 1:
            shorter = shorter[opening.end() : -1]
        if shorter == text:
            return text
        text = shorter


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at ``start`` closes, of whatever kind; -1 when it does not."""
    depth = 0
    for token in BRACKET.finditer(text, start):
        depth += 1 if token.group()[-1] in "([{" else -1
        if depth == 0:
            return token.end() - 1
    return -1


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Cut at the separators that stand outside every bracket: the parts, and the separators between them."""
    parts, separators, depth, first = [], [], 0, 0
    for token in re.finditer(rf"\\begin\b|\\end\b|{BRACKET.pattern}|{separator.pattern}", text):
        word = token.group()
        if word in BRACKETS:
            depth += BRACKETS[word]
        elif depth == 0:
            parts.append(text[first : token.start()])
            separators.append(word.strip())
            first = token.end()
    return [*parts, text[first:]], separators


BRACKETS = {"(": 1, "[": 1, "{": 1, "\\{": 1, "\\begin": 1, ")": -1, "]": -1, "}": -1, "\\}": -1, "\\end": -1}


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in BRACKET.finditer(text):
        depth += 1 if token.group()[-1] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest
