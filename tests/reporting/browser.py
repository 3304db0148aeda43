"""A look at a page with headless Chromium: what it measures, and a screenshot."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Measures after the page is laid out; times scrolling by the layout that each step forces.
SCRIPT = """
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  const times = [];
  for (let place = 0; place < 40; place++) {
    const start = performance.now();
    scrollTo(0, document.body.scrollHeight * place / 40);
    document.elementFromPoint(50, 50)?.getBoundingClientRect();
    times.push(performance.now() - start);
  }
  const boxes = [...document.querySelectorAll(".card")].map(card => card.getBoundingClientRect());
  const colour = found => found && getComputedStyle(found).backgroundColor;
  const tables = [...document.querySelectorAll("table")].map(table => table.parentElement);
  const captions = [...document.querySelectorAll("caption")].map(caption => caption.getBoundingClientRect());
  parent.document.body.dataset.measured = JSON.stringify({
    cards: boxes.length,
    overlapping: boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1
                                                           && a.top < b.bottom - 1 && b.top < a.bottom - 1)),
    overflow: document.documentElement.scrollWidth - innerWidth,
    tables: tables.length,
    wide: tables.filter(table => table.scrollWidth > table.clientWidth).map(table => table.innerText.slice(0, 80)),
    beside: captions.every((caption, i) => i % 2 || captions[i + 1].top === caption.top
                                                  && captions[i + 1].left > caption.right),
    tokens: document.querySelectorAll(".tokens span").length,
    titles: document.querySelectorAll(".tokens span[title]").length,
    amplified: colour(document.querySelector(".tokens .u8")),
    damped: colour(document.querySelector(".tokens .d8")),
    figures: [...document.querySelectorAll("figure svg")].filter(svg => svg.getBoundingClientRect().height > 50).length,
    slowest: Math.max(...times),
  });
});
"""


def measure(page: Path, scratch: Path, width: int = 1280) -> dict[str, Any]:
    """What SCRIPT finds in a copy of the page that allows it to run, in a frame: windows cannot be as narrow."""
    text = page.read_text(encoding="utf-8")
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = scratch / "measured.html"
    framed = html.escape(opened.replace("</body>", f"<script>{SCRIPT}</script></body>"))
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{framed}"></iframe>'
    copy.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}</body>', encoding="utf-8")
    dump = _chromium("--dump-dom", f"--window-size={width + 100},1000", copy.resolve().as_uri())
    found = re.search(r'<body data-measured="([^"]*)"', dump)
    assert found, dump[-500:]
    return json.loads(html.unescape(found[1]))  # type: ignore[no-any-return]


def screenshot(page: Path, picture: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """The page as it looks to one who prefers a light or a dark theme."""
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _chromium(f"--screenshot={picture}", f"--window-size={width},{height}", theme, page.resolve().as_uri())


def _chromium(*arguments: str) -> str:
    assert CHROMIUM is not None
    # No sandbox: continuous integration runs as root; the pages are our own.
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
