"""Lay out the documents for the site generator: ``python docs/site.py FOLDER``; ``make docs`` does it all.

The documents link to files beside them (results, recipes, sources) by relative paths, as a repository is read. The
site gets the documents and every file that they link to, under the same paths; a link to a folder becomes its name.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def documents() -> list[Path]:
    """The pages, relative to the root."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
    return sorted(page.relative_to(ROOT) for page in pages)


def lay_out(out: Path) -> None:
    """Write the pages and what they link to below ``out``, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    for page in documents():
        text = (ROOT / page).read_text(encoding="utf-8")
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(LINK.sub(lambda link, page=page: _link(link, page, out), text), encoding="utf-8")


def _link(link: re.Match[str], page: Path, out: Path) -> str:
    """The link as it is, with a copy of its file; of a folder or a file outside, without a target."""
    target = (ROOT / page.parent / link[1]).resolve()
    if ":" in link[1]:
        return link[0]
    if not target.is_relative_to(ROOT) or not target.is_file():
        return "]"
    place = out / target.relative_to(ROOT)
    if target.suffix != ".md":
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, place)
    return link[0]


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
