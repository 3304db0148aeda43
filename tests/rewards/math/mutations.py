"""Small edits of gold answers, each a wrong answer that looks like the right one.

    python tests/rewards/math/mutations.py GOLDS...

grades every edit of every gold answer of local files (one gold a line, or JSON lines with an ``answer``, GSM8K's
form included) and lists those that were accepted.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

UNITS = (r"\text{ cm}", r"\text{ dozen}", r"\text{ million}", r"\text{ wrong}", r"\%", "^\\circ", "_3")
SWAPS = [  # one kind of edit after another: its name, what is replaced once, and by what
    ("operator", r"(?<=[\w})])\s*\+", "-"),
    ("operator", r"(?<=[\w})])\s*-", "+"),
    ("operator", r"\\cdot", "+"),
    ("operator", r"\\pm", "+"),
    ("operator", r"\\pm", "-"),
    ("operator", "/", r"\\cdot "),
    ("relation", "=", "<"),
    ("relation", "=", r"\\ne "),
    ("relation", "<", ">"),
    ("relation", ">", "<"),
    ("relation", "<", r"\\le "),
    ("relation", ">", r"\\ge "),
    ("relation", r"\\leq?(?![a-z])", "<"),
    ("relation", r"\\leq?(?![a-z])", r"\\ge "),
    ("relation", r"\\geq?(?![a-z])", ">"),
    ("relation", r"\\neq?", "="),
    ("relation", r"\\approx", "<"),
    ("relation", r"\\in(?![a-z])", "="),
    ("relation", r"\\cup", r"\\cap"),
    ("bracket", r"\[", "("),
    ("bracket", r"\(", "["),
    ("bracket", r"\]", ")"),
    ("bracket", r"\)", "]"),
    ("function", r"\\sin", r"\\cos"),
    ("function", r"\\cos", r"\\sin"),
    ("function", r"\\ln", r"\\sin"),
    ("function", r"\\arctan", r"\\tan"),
    ("function", r"\\tan", r"\\cot"),
    ("function", r"\\sqrt", ""),
    ("function", r"\\frac", r"\\binom"),
    ("function", r"\\binom", r"\\frac"),
    ("function", "!", ""),
    ("function", r"\\pi", "e"),
    ("function", r"\\infty", "0"),
    ("function", r"\\max", r"\\min"),
    ("function", r"\\lfloor|\\rfloor", ""),
    ("function", r"\^", ""),
    ("function", r"\\overline", ""),
    ("name", r"(?<![A-Za-z\\{])[a-z](?![A-Za-z])", "w"),
    ("name", r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])", "W"),
    ("name", r"\\(?:alpha|beta|theta|lambda)", r"\\mu "),
    ("unit", r"\\text\{ ?[^}]*\}", r"\\text{ kg}"),
    ("unit", r"\\%", ""),
    ("unit", r"\\\$", ""),
    ("unit", r"\\pmod\{7\}", r"\\pmod{8}"),
    ("unit", r"_\d$", ""),
    ("unit", r"\^\{?\\circ\}?", ""),
    ("word", r"Yes", "No"),
    ("word", "Evelyn", "Eve"),
    ("word", "even", "odd"),
    ("element", r",[^,()\[\]{}]*(?=,|$)", ""),
    ("element", r"(?<=[({\[])[^,()\[\]{}]*,", ""),
    ("element", r"&", r"\\\\"),
    ("coefficient", r"(?<![\d.\w\\])(?=[a-z(]|\\(?:frac|sqrt|pi|sin|cos|ln|binom))", "2"),
    ("coefficient", r"(?<![\d.^_{])\d+\s*(?=[a-z(]|\\(?:frac|sqrt|pi|sin|cos|ln|cdot))", ""),
    ("sign", r"(?<![\w}.)\\-])(?=\d)", "-"),
    ("sign", r"-(?=\d|\\)", ""),
    ("sign", r"(?<=[=,(\[{<>])\s*(?=[a-z\\])", "-"),
]


def mutations(gold: str) -> Iterator[tuple[str, str]]:
    """Kind of edit and edited answer, none twice, none the gold itself."""
    seen = {gold, ""}
    for kind, text in _all(gold):
        if text not in seen:
            seen.add(text)
            yield kind, text


def _all(gold: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"\d", gold):
        for digit in "0123456789":
            yield "digit", gold[: match.start()] + digit + gold[match.end() :]
        yield "digit", gold[: match.start()] + gold[match.end() :]
        yield "digit", gold[: match.end()] + match.group() + gold[match.end() :]
    for kind, pattern, replacement in SWAPS:
        for match in re.finditer(pattern, gold):
            yield kind, gold[: match.start()] + match.expand(replacement) + gold[match.end() :]
    yield "sign", "-" + gold
    yield "sign", f"-({gold})"
    for unit in UNITS:
        yield "unit", gold + unit
    yield from (("coefficient", text) for text in (f"2({gold})", rf"\frac{{{gold}}}{{2}}", f"{gold}+1", f"{gold}^2"))
    yield from (
        ("element", text) for text in (f"{gold}, 1", f"0, {gold}", rf"{gold} \text{{ or }} 17", f"{gold} \\cup [17,18]")
    )
    yield from (
        ("relation", text) for text in (f"{gold}=0", f"1={gold}", f"{gold}<0", "1=2", "1<2", "0=0", f"{gold}=17")
    )
    items = re.split(",", gold.strip("()[]{}\\ "))
    if len(items) > 1:
        core = ",".join(reversed(items))
        yield "order", gold.replace(",".join(items), core)
        yield "name", re.sub(r"[A-Za-z_\d]+\s*=", "", gold)
        yield "order", ",".join(reversed(re.sub(r"[A-Za-z_\d]+\s*=", "", gold).split(",")))


def golds(path: Path) -> list[str]:
    """The gold answers of a file, each once."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".jsonl":
        lines = [str(json.loads(line)["answer"]).split("####")[-1].strip() for line in lines]
    return list(dict.fromkeys(line for line in lines if line))


def main() -> None:
    """Print the accepted edits of the files' golds, and the counts."""
    from delta_cli.rewards.math.verdict import math_reward

    edits = accepted = 0
    slowest = 0.0
    for path in map(Path, sys.argv[1:]):
        for gold in golds(path):
            if math_reward(rf"\boxed{{{gold}}}", gold) != 1.0:
                print(f"not an answer to itself: {gold}")
            for kind, text in mutations(gold):
                edits += 1
                started = time.process_time()
                if math_reward(rf"\boxed{{{text}}}", gold) == 1.0:
                    accepted += 1
                    print(f"{kind}\t{gold}\t{text}")
                slowest = max(slowest, time.process_time() - started)
    print(f"{edits} edits, {accepted} accepted, the slowest {slowest:.3f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
