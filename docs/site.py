"""Copy the documents to where the site generator reads them: ``python docs/site.py FOLDER``; ``make docs`` does it all.

The pages link to results, recipes and source files by relative paths, which work in the repository. The site needs
those files under the same paths, so every linked file is copied too. A link to a folder becomes plain text.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STYLE = Path("docs/site.css")
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s#]+)(?:#[^)\s]*)?\)")


def documents() -> list[Path]:
    """All pages, relative to the root of the repository."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
    return sorted(page.relative_to(ROOT) for page in pages)


def lay_out(out: Path) -> None:
    """Write the pages and the files they link to into ``out``, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    for page in documents():
        text = (ROOT / page).read_text(encoding="utf-8")
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(LINK.sub(lambda link, page=page: _link(link, page, out), text), encoding="utf-8")
    shutil.copyfile(ROOT / STYLE, out / STYLE)


def _link(link: re.Match[str], page: Path, out: Path) -> str:
    """The unchanged link, after copying its file; only its text if it leads to a folder or out of the repository."""
    target = (ROOT / page.parent / link["target"]).resolve()
    if ":" in link["target"]:
        return link[0]
    if not target.is_relative_to(ROOT) or not target.is_file():
        return link["text"]
    place = out / target.relative_to(ROOT)
    if target.suffix != ".md":
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, place)
    return link[0]


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
