r"""Verifier for multiple choice: which letter does a response choose?

The answer is the content of the last box. Without a box it is the last sentence of the form "the
answer is …". It must name exactly one letter: ``C``, ``(C)``, ``C.``, ``\text{C}``, ``C) 4 m/s``. A response
that names several letters is wrong; otherwise a policy could name them all and always be right.
"""

from __future__ import annotations

import re

from delta_cli.rewards.math.boxed import last_box, without_thinking

LETTERS = "ABCDEFGHIJ"

_SAID = re.compile(r"\banswer\s{0,9}(?:is\b|:)\s{0,9}:?", re.IGNORECASE)
_DRESS = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|bf|rm|left|right|boxed|,|;|!|quad)(?![A-Za-z])|[${}*_`~\s]"
)
_ONE = re.compile(rf"[(\[]?([{LETTERS}])[)\].:]*")
_WITH_TEXT = re.compile(rf"(?:[(\[]([{LETTERS}])[)\]]|([{LETTERS}])[).:])\s*(?=\S)")
# A second letter in the text after the first, where "A" and "I" may also be ordinary words; or a denial of the first.
_OTHER = re.compile(
    rf"(?<![A-Za-z])(?![AI]\s+[a-z])[{LETTERS}](?![A-Za-z'])"
    r"|[(\[]\s*[a-j]\s*[)\]]|(?<![A-Za-z])[a-j]\s*[).:](?!\w)|\b(?:or|and|nor)\s+(?:\w+\s+)?[b-hj]\b"
    r"|(?<=[).:])\s*(?:(?:is|was|are)\s+(?:not|wrong|incorrect|false|n['’]t)\b|(?:is|was)n['’]t\b)"
)


def choice_reward(response: str, gold: str) -> float:
    """1.0 if the response chooses the letter ``gold`` and no other, else 0.0."""
    return float(chosen(response) == letter(gold) is not None)


def chosen(response: str) -> str | None:
    """The letter a response chooses, or None if it names none or several."""
    boxed = last_box(response)
    if boxed is not None:
        return letter(boxed)
    response = without_thinking(response)
    if "\\boxed" in response:  # a box that never closes, or is no answer
        return None
    said = list(_SAID.finditer(response))
    if not said:
        return None
    sentence = re.split(r"(?<=[.!?])\s|\n", response[said[-1].end() :].lstrip()[:200])[0]
    return letter(sentence)


def letter(answer: str) -> str | None:
    """The single letter that the content of a box names, or None."""
    bare = _DRESS.sub("", answer)
    if match := _ONE.fullmatch(bare):
        return match[1]
    plain = _DRESS.sub(" ", answer).strip()
    match = _WITH_TEXT.match(plain)
    if match is None or _OTHER.search(plain, match.end(1) if match[1] else match.end(2)):
        return None
    return match[1] or match[2]
