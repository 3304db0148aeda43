"""Random and hostile responses, and gold answers of every kind, for tests and the fuzzer."""

from __future__ import annotations

import random
from typing import Any

LONG = 100_000  # characters of the longest responses
TEXT = r"""
0 1 2 5 9 85 86 0.5 1/2 1,000 x y i e f(x) A B C D + - − * / ^ _ = < > ! , ; : . | ' " & ( ) [ ] { } % $ ~ ° π ∞ ½ √ ٣
\frac{1}{2} \frac \sqrt \sqrt[3]{ \pi \cdot \times \le \ne \in \cup \infty \sum_{k=1}^{9} \int_0^1 \lim \binom \sin \ln
\left( \right) \{ \} \text{cm} \text{ \begin{pmatrix} \end{pmatrix} \\ \boxed{ \boxed \fbox{ \mathbb{Z} \% \$ ^{2} ^{-1}
#### answer is (A) A. <think> </think> ``` ```python ~~~ print( def f(x): return import os
"""
BLANKS = [" ", "\n", "\t", "\0", "\ud800", "\u202e", "💥", "\u2028", "```\n", "\n```python\n", "the answer is "]
PIECES = [*TEXT.split(), *BLANKS]
GOLDS: list[Any] = ["85", "1/2", r"\frac{1}{2}", "x^2+1", "A", "", "-0.5", "1" * 5000, r"\{1,2\}", "words", "\ud800"]
GOLDS += [None, 85, {"a": 1}, [1]]  # which a loader would refuse
# What careless regular expressions and parsers take long to read when it is repeated.
REPEATED = r"""
1 ,111 { } ( [ \boxed{ \boxed \frac{ \frac{1}{ #### ` $ \ \\ a (A) 1/ 1. - 9^ x^{ | \text{ <think> ~ % \left( 1+ =1 , e9
! \sqrt{ &
"""
SPACED = [" ", "\n", "```\n", "~~~\n", "#### ", "the answer is ", "− ", "1 + ", ", ", "\0", "\ud800", "💥", "1 ", "$ "]
UNITS = [*REPEATED.split(), *SPACED]


def repeated(count: int) -> list[str]:
    """Each of the units, repeated to about ``count`` characters."""
    return [unit * (count // len(unit)) for unit in UNITS]


def responses(seed: int, count: int) -> list[str]:
    """``count`` responses: token soup, soup in a box or a block, numbers of many digits, and repeated patterns."""
    rng = random.Random(seed)
    patterns = repeated(LONG)
    dresses = ["{}", "{}", "\\boxed{{{}}}", "#### {}", "```python\n{}\n```", "<think>{}</think>\\boxed{{85}}", "so {}."]

    def soup() -> str:
        return rng.choice(["", " "]).join(rng.choices(PIECES, k=rng.randint(0, 40)))

    def pattern() -> str:
        start, end = rng.choice(["", "1", "\\boxed{", "#### "]), rng.choice(["", ",", "}"])
        return start + rng.choice(patterns)[: rng.choice([100, 5000, LONG])] + end

    def digits() -> str:
        return "".join(rng.choices("0123456789,./^", k=rng.choice([20, 4301, 5000])))

    kinds = [soup, soup, soup, digits, pattern]
    return [rng.choice(dresses).format(rng.choice(kinds if place % 10 == 0 else kinds[:4])()) for place in range(count)]
