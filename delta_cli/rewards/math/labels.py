r"""Labels: the left side of ``x = 5``, ``f(2) = 5`` or ``\text{Area} = 5``, which only names the answer.

A label is read by a grammar of its own. A function, an operation or a negation on the left side, such as
``\sin x = 5``, ``2x = 5`` or ``\text{not } x = 5``, states something else than the answer.
"""

from __future__ import annotations

import re

from delta_cli.rewards.math.tokens import DERIVATIVE, GREEK

_GREEK = "|".join(re.escape(letter) for letter in sorted(GREEK - {r"\infty", r"\emptyset"}, reverse=True))
_LETTER = rf"(?:(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|(?:{_GREEK})(?![A-Za-z])|\\ell(?![A-Za-z]))"
_ACCENT = (
    r"\\(?:hat|vec|bar|tilde|overline|overrightarrow|widehat|dot|ddot|mathbf|mathcal|mathbb)\s*\{\s*[A-Za-z]{1,3}\s*\}"
)
_INDEX = r"\s*_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w|\\[A-Za-z]+)"
_MARK = r"\s*'+|\s*\^\s*(?:\{\s*\*\s*\}|\*|\\(?:ast|star)(?![A-Za-z]))"
_NAME = rf"(?:{_LETTER}|{_ACCENT})(?:{_INDEX})?(?:{_MARK})*(?:{_INDEX})?"
_POINTS = r"(?<![A-Za-z\\])[A-Z]{2,4}(?![A-Za-z])"
_FIGURE = (
    rf"(?:m\s*)?\\(?:angle|triangle|measuredangle)\s*(?:{_POINTS}|[A-Z])|\\overline\s*\{{\s*{_POINTS}\s*\}}"
    rf"|\|\s*(?:{_POINTS}|{_ACCENT}|\\overline\s*\{{\s*{_POINTS}\s*\}})\s*\||\[\s*{_POINTS}\s*\]|{_POINTS}"
    r"|\|\s*\|?\s*(?:[a-z]|\\(?:vec|mathbf)\{\s*[a-z]\s*\})\s*\|\s*\|"
)
_SEGMENTS = rf"\\frac\{{\s*{_POINTS}\s*\}}\{{\s*{_POINTS}\s*\}}|{_POINTS}\s*/\s*{_POINTS}"
_ATOM = rf"-?\s*(?:\d+(?:\.\d+)?|\\infty|\\pi|{_NAME})"
_SUM = rf"{_ATOM}(?:\s*[-+]\s*{_ATOM})*"
_ARGUMENTS = rf"[(\[]\s*{_SUM}(?:\s*[,;]\s*{_SUM})*\s*[)\]]"
_EVENT_COMMAND = r"\\(?:(?:cap|cup|mid|le|ge|ne)(?![A-Za-z])|text\{[A-Za-z ]*\}|(?:overline|bar)\{[^{}]*\})"
_EVENT = rf"[(\[](?:[^()\[\]\\]|{_EVENT_COMMAND})+[)\]]"
_CALL = (
    rf"(?:{_NAME})\s*{_ARGUMENTS}"
    rf"|(?:[PEV]|\\Pr|\\Var|\\text\{{\s*(?:Var|Cov|E|P|Pr)\s*\}}|\\mathbb\{{[PE]\}})\s*{_EVENT}"
)
_SUMS = r"m\s*\+\s*n(?:\s*\+\s*p)?|p\s*\+\s*q(?:\s*\+\s*r)?|a\s*\+\s*b(?:\s*\+\s*c(?:\s*\+\s*d)?)?"  # as AIME asks for
_QUOTIENTS = r"\\frac\{\s*m\s*\}\{\s*n\s*\}|\\frac\{\s*p\s*\}\{\s*q\s*\}|m\s*/\s*n|p\s*/\s*q"
_TUPLE = rf"\(\s*{_NAME}(?:\s*[,;]\s*{_NAME})*\s*\)"
_DERIVATIVES = rf"{DERIVATIVE}|d[a-z]\s*/\s*d[a-z]"
_LABEL = re.compile(rf"\s*(?:{_CALL}|{_NAME}|{_FIGURE}|{_SEGMENTS}|{_SUMS}|{_QUOTIENTS}|{_TUPLE}|{_DERIVATIVES})\s*")
_TEXT_LABEL = re.compile(
    rf"\s*(?:\\text\{{([A-Za-z][A-Za-z .'-]*)\}}\s*(?:{_NAME}|{_FIGURE})?|([A-Za-z]{{3,}}(?:\s+[A-Za-z]{{2,}})*))\s*"
)
_WORDS = frozenset(
    """
    area answer ans sum total minimum maximum mean median mode range perimeter volume probability distance length width
    height cost price speed time age slope number value result solution radius diameter circumference average
    """.split()  # noqa: SIM905 (one string per word reads worse)
)
# Words that deny or change what follows.
_DENIALS = frozenset(
    """
    not no never isn t isnt non cannot wrong false except without half twice thrice double triple minus negative inverse
    reciprocal opposite squared cubed reject rejected neither nor third quarter complement least most greater less more
    than over under above below plus times unless between bound bounds
    """.split()  # noqa: SIM905
)


def is_label(text: str) -> bool:
    """Whether the side of an equation only names the answer: ``x``, ``f(2)``, ``AB``, ``\\text{Area}``, ``(x, y)``."""
    if _LABEL.fullmatch(text):
        return text.strip() not in ("e", "i")
    words = _TEXT_LABEL.fullmatch(text)
    if words is None:
        return False
    names = re.findall("[a-z]+", (words[1] or words[2]).lower())
    if words[1] is None:
        return bool(_WORDS & set(names)) and not _DENIALS & set(names)
    return not _DENIALS & set(names) and not re.search(r"\bsquare\s+of\b", words[1])


def bare(label: str) -> str:
    """A label without the commands and spaces that make no difference."""
    label = re.sub(r"\\text|\\mathbf|\\frac|[{}/\s]", "", label)
    return re.sub(r"^d([a-z])d[a-z]$", r"\1'", label)
