r"""Finding the answer of a response: after the model's thinking, in a ``\boxed{…}`` or ``\fbox{…}``."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)
_FRACTION = r"\\(?:[dtc]?frac|[dt]?binom)\s*\{"
# The start of a box or of another group, an escaped brace, a line break (whose backslash escapes nothing), or a brace.
_TOKEN = re.compile(
    r"\\(?:boxed|fbox)\s*\{"
    r"|(?P<hides>\\(?:[hv]?phantom|[bx]?cancel|sout|st|xout)\s*\{)"
    rf"|(?P<fraction>{_FRACTION})|(?P<part>(?:\\sqrt\s*(?:\[[^\[\]{{}}]*\])?|[\^_])\s*\{{)"
    r"|\\[{}]|\\\\(?!boxed|fbox)|[{}]"
)
# LaTeX and HTML comments. A % after a word or a number in prose is a percent sign.
_COMMENT = re.compile(
    r"<!--(?:(?!-->).)*(?:-->)?"
    r"|\\begin\{comment\}(?:(?!\\end\{comment\}).)*|\\iffalse(?![A-Za-z])(?:(?!\\fi).)*"
    r"|^[ \t]*%[^\n]*|(?<=[}$\])\\])[ \t]+%[^\n]*|(?<!\\)%(?=[ \t$]*\\(?:boxed|fbox))[^\n]*",
    re.DOTALL | re.MULTILINE,
)
# A box with one of these directly before or after it is only part of an expression.
_PART_BEFORE = re.compile(
    r"(?:(?:[\d)}\]]|(?<![A-Za-z])[A-Za-z])[ \t]*[+−-]|[=(${\[][ \t]*[−-]|[/^]|~~"
    r"|\\(?:cdot|times|div|pm|mp|neq?|not|neg|sqrt|[dtc]?frac|sin|cos|tan|ln|log)(?![A-Za-z]))[ \t$]{0,4}$"
    r"|(?:^|\s)[−-]\$?$"
)
_PART_AFTER = re.compile(
    r"\s{0,4}(?:\^(?!\s*\{?\s*\\circ)|\\(?:cdot|times|div|pm|mp|pi|sqrt|[dtc]?frac)(?![A-Za-z])|[+/](?=[\s\w\\({]))|\(|\d|[A-Za-z](?![A-Za-z])"
)
NEARBY = 24  # characters around a box that are searched for the rest of an expression


def closed_boxes(response: str) -> tuple[list[str], bool]:
    """The contents of the outermost closed boxes in order, and whether a box is still open at the end.

    Takes one linear pass, whatever the braces around the boxes look like.
    """
    boxes, unfinished = _find(response)
    return [response[start:stop] for start, stop, _ in boxes], unfinished


def last_box(response: str) -> str | None:
    """The content of the last box that a reader sees as the answer.

    Boxes in the model's thinking, in comments, and in hidden or crossed-out text do not count. None if there
    is no other box, if the last one never closes, or if it is part of a larger expression, as in ``-\\boxed{5}``.
    """
    if "\\boxed" not in response and "\\fbox" not in response:
        return None
    text = without_thinking(response)
    if "%" in text or "<!--" in text or "comment}" in text or "\\iffalse" in text:
        text = _COMMENT.sub("", text)
    boxes, unfinished = _find(text)
    visible = [box for box in boxes if box[2] != "hides"]
    if not visible or unfinished:
        return None
    start, stop, inside = visible[-1]
    command = max(text.rfind("\\boxed", 0, start), text.rfind("\\fbox", 0, start))
    before, after = text[max(0, command - NEARBY) : command], text[stop + 1 : stop + 1 + NEARBY]
    if inside or _PART_BEFORE.search(before) or _PART_AFTER.match(after):
        return None
    return text[start:stop].strip()


def _find(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """The outermost closed boxes as (start, stop, kind of group around it), and whether one is still open.

    The kind is "hides" in hidden text, "part" in a fraction, root, power or index, else empty.
    """
    opened: list[tuple[int, str, str]] = []  # for each open brace: where its content starts, its own kind, all kinds
    boxes: list[tuple[int, int, str]] = []
    denominator = -1  # where the second group of a fraction would open
    for token in _TOKEN.finditer(text):
        word = token.group()
        if word == "}":
            if opened:
                start, own, kind = opened.pop()
                if own == "box":
                    while boxes and boxes[-1][0] > start:  # drop the boxes inside this one
                        boxes.pop()
                    boxes.append((start, token.start(), kind))
                denominator = token.end() if own == "fraction" else -1
        elif word[-1] == "{" and word != "\\{":
            around = opened[-1][2] if opened else ""
            own = token.lastgroup or ("box" if len(word) > 1 else "")
            if not own and denominator >= 0 and not text[denominator : token.start()].strip():
                own = "part"
            if around != "hides":
                around = "hides" if own == "hides" else "part" if own in ("part", "fraction") else around
            opened.append((token.end(), own, around))
            denominator = -1
    last = boxes[-1][1] if boxes else -1
    unfinished = any(own == "box" and start > last for start, own, _ in opened)
    return boxes, unfinished


def without_thinking(response: str) -> str:
    """``response`` without its thinking, in one linear pass.

    Keeps what follows the last ``</think>``. A prompt may have opened the tag, so the opening tag is
    optional. If a tag opens after that and never closes, keeps only the text before it.
    """
    if "<" not in response:
        return response
    start, stop = 0, len(response)
    for tag in _TAG.finditer(response):
        if tag[1]:
            start, stop = tag.end(), len(response)
        else:
            stop = min(stop, tag.start())
    return response[start:stop]
