"""Fill in the measured numbers of the pages: ``python docs/figures``; with ``--check`` it only compares.

A page names a figure in a comment, ``<!--step.speedup-->2.9<!--/-->``, and this program writes what stands between the
two comments. A table has both comments on lines of their own, with blank lines inside. speed.py, learning.py and
bench.py compute every figure from a file in benchmarks/results, so no measured number is typed by hand.
"""

from __future__ import annotations

import re
import sys
from itertools import chain

import bench
import learning
import speed
from results import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"(?P<open><!--(?P<name>[a-z0-9_.]+)-->)(?P<text>.*?)(?P<close><!--/-->)", re.DOTALL)
# Markdown takes a line that begins with a comment for HTML.
BROKEN = re.compile(r"^\s*(?:[-*>]|\d+\.)?\s*<!--[a-z0-9_.]+-->.", re.MULTILINE)
FIGURES = dict(chain.from_iterable(source() for source in (*speed.SOURCES, *learning.SOURCES, *bench.SOURCES)))


def filled(text: str) -> str:
    """A page with every figure as the results have it; ValueError for unknown names and marks that Markdown breaks."""
    if broken := BROKEN.search(text):
        raise ValueError(f"a line must not begin with a figure, put a word before it: {broken[0].strip()}")
    if unknown := {mark["name"] for mark in MARK.finditer(text)} - set(FIGURES):
        raise ValueError(f"docs/figures has no {', '.join(sorted(unknown))}")
    return MARK.sub(lambda mark: mark["open"] + FIGURES[mark["name"]] + mark["close"], text)


def main(check: bool) -> int:
    """Write the pages, or with ``check`` only name those that differ from the results; the exit code."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    stale = [page for page, text in texts.items() if filled(text) != text]
    for page in stale:
        if not check:
            page.write_text(filled(texts[page]), encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'differs from benchmarks/results' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
