"""How long a report takes, how large it is, and how a long heatmap scrolls.

``python -m benchmarks.report [--steps 200] [--responses 512] [--tokens 32]`` writes a synthetic run, reports on it
three times, and prints a table; with Chromium installed it also opens an inspection of about 20,000 tokens and times
scrolling through it. ``--json FILE`` writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from delta_cli.reporting.html_pages import inspection_page
from delta_cli.reporting.inspection import inspect_run
from delta_cli.reporting.report import write_report
from delta_cli.runs.folder import RunFolder
from tests.reporting import synthetic
from tests.reporting.browser import CHROMIUM, measure

SAMPLES = 16  # responses of a prompt
HEATMAP_TOKENS = 20_000


def write_run(path: Path, steps: int, responses: int, tokens: int) -> RunFolder:
    """A run whose responses are random sums of about ``tokens`` tokens."""
    folder, tokenizer = synthetic.start(path)
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        records = []
        for row in range(responses):
            group = row // SAMPLES
            terms = rng.integers(0, 10, (max(tokens // 7, 1), 2))
            text = " ".join(f"{a}+{b}={a + b + (rng.random() < 0.1)}" for a, b in terms)
            count = len(tokenizer.encode(text)) + 1
            coefficients = np.round(rng.uniform(0.8, 1.2, count), 6).tolist()
            correct = bool(rng.random() < 0.5)
            line = synthetic.record(
                tokenizer, text, correct=correct, group=group, problem=f"sum {group}", coefficients=coefficients
            )
            records.append(line)
        folder.write_rollouts(step, records)
        folder.append(folder.metrics, synthetic.metrics(step, step / steps))
    return folder


def time_report(run: Path, output: Path) -> float:
    """Seconds of one report."""
    start = time.perf_counter()
    write_report([run], output)
    return time.perf_counter() - start


def scroll(scratch: Path) -> dict[str, float]:
    """An inspection of HEATMAP_TOKENS tokens in Chromium: its size and its slowest scrolling step."""
    folder = write_run(scratch / "heatmap", steps=1, responses=SAMPLES, tokens=HEATMAP_TOKENS // SAMPLES)
    page = scratch / "inspect.html"
    page.write_text(inspection_page(inspect_run(folder.path)), encoding="utf-8")
    found = measure(page, scratch)
    return {"tokens": found["tokens"], "slowest_ms": found["slowest"], "bytes": page.stat().st_size}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        scratch = Path(name)
        run = write_run(scratch / "run", given.steps, given.responses, given.tokens).path
        output = scratch / "report.html"
        seconds = [time_report(run, output) for _ in range(3)]
        found = {
            "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
            "steps": given.steps,
            "responses": given.responses,
            "tokens": given.tokens,
            "report_seconds": [round(each, 2) for each in seconds],
            "report_bytes": output.stat().st_size,
            "heatmap": scroll(scratch) if CHROMIUM else None,
        }
    for key, value in found.items():
        print(f"{key:16} {value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
