r"""Finding ``\boxed{…}`` and ``\fbox{…}`` in a response."""

from __future__ import annotations

import re

# The start of a box, an escaped brace, a line break (whose backslash escapes nothing), or a brace.
TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|\\\\(?!boxed|fbox)|[{}]")


def closed_boxes(response: str) -> tuple[list[str], bool]:
    """The contents of the outermost closed boxes in order, and whether a box is still open at the end.

    Takes one linear pass, whatever the braces around the boxes look like.
    """
    opened: list[tuple[int, bool]] = []  # for each open brace: where its content starts, whether it is a box
    boxes: list[tuple[int, int]] = []
    for token in TOKEN.finditer(response):
        text = token.group()
        if text == "}":
            if opened:
                start, is_box = opened.pop()
                if is_box:
                    while boxes and boxes[-1][0] > start:  # drop the boxes inside this one
                        boxes.pop()
                    boxes.append((start, token.start()))
        elif text.endswith("{") and text != "\\{":
            opened.append((token.end(), text != "{"))
    last = boxes[-1][1] if boxes else -1
    unfinished = any(is_box and start > last for start, is_box in opened)
    return [response[start:end] for start, end in boxes], unfinished


def last_box(response: str) -> str | None:
    """The content of the last box, or None if there is no box or the last one never closes."""
    if "\\boxed" not in response and "\\fbox" not in response:
        return None
    boxes, unfinished = closed_boxes(response)
    return boxes[-1].strip() if boxes and not unfinished else None
