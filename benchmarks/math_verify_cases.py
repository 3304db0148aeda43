"""Our mathematics verifier on the pairs of gold and answer in math-verify's own tests.

    git clone https://github.com/huggingface/Math-Verify
    python benchmarks/math_verify_cases.py Math-Verify/tests --out benchmarks/results/math_verify_cases.json

Pairs are the literal rows of tests that are parametrized by ``gold,pred,expected``. The last formula of a prediction
without a box is put into one, or the whole prediction if it has no formula; so is that of a gold answer.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from common import show, write

from delta_cli.rewards import math_reward
from delta_cli.rewards.math.boxed import last_box

FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)


def pairs(file: Path) -> Iterator[tuple[str, str, bool]]:
    """Gold, prediction and whether it is expected to be right."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize" and len(node.args) > 1):
            continue
        names, rows = node.args
        columns = ast.unparse(names).strip("'\"").replace(" ", "").split(",")
        if columns[:2] != ["gold", "pred"] or columns[-1] == "strict" or not isinstance(rows, ast.List):
            continue
        place = next((columns.index(name) for name in ("expected", "result") if name in columns), None)
        for row in rows.elts:
            try:
                values = ast.literal_eval(row)
            except ValueError:
                continue
            if place is not None and all(isinstance(each, str) for each in values[:2]):
                yield values[0], values[1], bool(values[place])


def formula(text: str) -> str:
    """The last formula of a text, or all of it."""
    found = [next(filter(None, match.groups())) for match in FORMULA.finditer(text)]
    return found[-1] if found else text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="math-verify's tests")
    parser.add_argument("--out", type=Path, help="JSON with the counts and the pairs that differ")
    options = parser.parse_args()
    counts = {"pairs": 0, "as expected": 0, "refused": 0, "accepted": 0}
    differing = []
    for file in sorted(options.folder.glob("test_*.py")):
        for gold, answer, expected in pairs(file):
            boxed = answer if last_box(answer) else rf"\boxed{{{formula(answer)}}}"
            truth = last_box(gold) or formula(gold)
            found = math_reward(boxed, truth) == 1.0
            counts["pairs"] += 1
            counts["as expected" if found == expected else "accepted" if found else "refused"] += 1
            if found != expected:
                differing.append({"gold": gold, "answer": answer, "accepted": found})
    show("math-verify's pairs", [{name: str(count) for name, count in counts.items()}])
    for pair in differing:
        print(
            "accepted" if pair["accepted"] else "refused", repr(pair["answer"])[-90:], "for", repr(pair["gold"])[-90:]
        )
    write(options.out, {"results": counts})


if __name__ == "__main__":
    main()
