"""Brackets in LaTeX: where they close, how deep they nest, and cutting a text outside of all of them."""

from __future__ import annotations

import re

BRACKET = re.compile(r"\\[{}]|[\[\](){}]")
_DEPTH = {"(": 1, "[": 1, "{": 1, "\\{": 1, "\\begin": 1, ")": -1, "]": -1, "}": -1, "\\}": -1, "\\end": -1}


def closing(text: str, start: int) -> int:
    """The index at which the bracket that opens at ``start`` closes, whatever its kind; -1 if it does not."""
    depth = 0
    for token in BRACKET.finditer(text, start):
        depth += 1 if token.group()[-1] in "([{" else -1
        if depth == 0:
            return token.end() - 1
    return -1


def closing_brace(text: str, start: int) -> int:
    """The index at which the brace that opens at ``start`` closes; other brackets do not count. -1 if it does not."""
    depth = 0
    for token in re.finditer(r"\\[{}]|[{}]", text[start:]):
        if len(token.group()) == 1:
            depth += 1 if token.group() == "{" else -1
            if depth == 0:
                return start + token.start()
    return -1


def depth(text: str) -> int:
    """The greatest number of brackets open at once."""
    now = deepest = 0
    for token in BRACKET.finditer(text):
        now += 1 if token.group()[-1] in "([{" else -1
        deepest = max(deepest, now)
    return deepest


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Cut ``text`` at the separators outside every bracket. Returns the parts and the separators between them."""
    parts, separators, open_brackets, first = [], [], 0, 0
    for token in re.finditer(rf"\\begin\b|\\end\b|{BRACKET.pattern}|{separator.pattern}", text):
        word = token.group()
        if word in _DEPTH:
            open_brackets += _DEPTH[word]
        elif open_brackets == 0:
            parts.append(text[first : token.start()])
            separators.append(word.strip())
            first = token.end()
    return [*parts, text[first:]], separators


def trim(text: str) -> str:
    """``text`` without the spaces, closing punctuation, line breaks and superfluous braces around it."""
    while True:
        text = text.strip()
        shorter = re.sub(r"(?<!\\)[.,;:]$", "", text)
        shorter = re.sub(r"\\\\$", "", shorter)
        opening = re.match(r"(?:\\boxed|\\fbox)?\s*\{", shorter)
        if opening and closing(shorter, opening.end() - 1) == len(shorter) - 1:
            shorter = shorter[opening.end() : -1]
        if shorter == text:
            return text
        text = shorter
