r"""Finding ``\boxed{…}`` and ``\fbox{…}`` in a response."""

from __future__ import annotations

import re

# A box that opens, an escaped brace, a line break (so that its backslash escapes nothing), or a brace.
TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|\\\\(?!boxed|fbox)|[{}]")


def closed_boxes(response: str) -> tuple[list[str], bool]:
    """Contents of the outermost closed boxes in order, and whether a box is still open at the end.

    One pass, linear in the response, whatever the braces around the boxes do.
    """
    opened: list[tuple[int, bool]] = []  # where the content of each open brace begins, whether it is a box
    boxes: list[tuple[int, int]] = []
    for token in TOKEN.finditer(response):
        text = token.group()
        if text == "}":
            if opened:
                start, is_box = opened.pop()
                if is_box:
                    while boxes and boxes[-1][0] > start:  # those inside this one
                        boxes.pop()
                    boxes.append((start, token.start()))
        elif text.endswith("{") and text != "\\{":
            opened.append((token.end(), text != "{"))
    last = boxes[-1][1] if boxes else -1
    unfinished = any(is_box and start > last for start, is_box in opened)
    return [response[start:end] for start, end in boxes], unfinished


def last_box(response: str) -> str | None:
    """What the last box holds; None without a box, or when the last one never closes."""
    if "\\boxed" not in response and "\\fbox" not in response:
        return None
    boxes, unfinished = closed_boxes(response)
    return boxes[-1].strip() if boxes and not unfinished else None
