"""The part of a response that is its answer: what follows the model's thinking."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)


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
