"""An earlier checkout against this one: MLX's update with checkpointing in turns, the quickstart side by side.

    git worktree add build/before d4c7fc3      # before responses without advantage were left out
    python benchmarks/before.py mlx --before build/before --out benchmarks/results/before_mlx.json
    python benchmarks/before.py quickstart --before build/before --out benchmarks/results/before_quickstart.json

Each turn is a process of its own with one of the two on its path. ``mlx``: forward, backward and step of 64 responses
to 8 prompts, a random Qwen3 in float32; the norm of the gradient of both must agree to 1e-6. With prompts as short as
16 tokens against responses of 48, and as long as they are. ``quickstart``: seconds to the last step, with the
evaluations between, and held-out accuracy at the end, another seed each round. It takes most of a minute, in which a
shared machine may come to be half as fast, so both run at the same time, each on a core that they swap every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import median_ratio, show, write

HERE = Path(__file__).resolve().parents[1]
SIZES = {"short prompts": (16, 48), "long prompts": (64, 64)}  # tokens of prompts and responses
PROMPTS, RESPONSES, VOCABULARY = 8, 64, 512


def mlx_update(prompt: int, length: int) -> dict[str, float]:
    """Median seconds of an update, the norm of its gradient, and the most memory; what both checkouts know is used."""
    from backends import registry
    from backends.interface import Floats, Ids, Sequences
    from backends.settings import BackendSettings
    from delta_cli.assets.random_model import write_qwen3

    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, prompt) for _ in range(PROMPTS)]
    owners = np.arange(RESPONSES) * PROMPTS // RESPONSES
    starts = np.arange(RESPONSES + 1) * length
    tokens, slopes = rng.integers(1, VOCABULARY, starts[-1]), rng.normal(size=starts[-1])
    sequences = Sequences(tuple(prompts[owner] for owner in owners), tokens, starts)

    class Linear:
        def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
            found = np.concatenate([slopes[starts[row] : starts[row + 1]] for row in rows])
            return float(found @ logp), found

        def restart(self) -> None:
            """Nothing is kept."""

    with TemporaryDirectory() as folder:
        shape = {"hidden": 128, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 384}
        write_qwen3(Path(folder) / "model", vocab_size=VOCABULARY, **shape)
        engine = registry.create("mlx", BackendSettings.of(str(Path(folder) / "model"), gradient_checkpointing=True))
        seconds, norms = [], []
        for _ in range(4):
            start = time.perf_counter()
            engine.accumulate(sequences, Linear())
            norms.append(engine.step(1e-6))
            seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "norm": norms[0], "peak_bytes": float(engine.peak_memory())}


def quickstart(seed: int) -> dict[str, float]:
    """Seconds of a quickstart's steps with the evaluations between them, and its accuracy at the end."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "delta_cli", "train", "--backend", "cpu", "--quiet", "--run-dir", str(folder)]
        subprocess.run([*command, "--set", f"run.seed={seed}"], check=True)
        steps, evaluations = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
            for name in ("metrics", "evaluations")
        )
    whole = sum(step["seconds"] for step in steps) - steps[0]["seconds_evaluate"]
    return {"seconds": whole} | {name: evaluations[-1][name] for name in ("accuracy", "low", "high")}


def turn(where: Path, *what: str, core: int | None = None) -> dict[str, float]:
    """One measurement of a checkout, on a core of its own if that is given."""
    environment = os.environ | {"PYTHONPATH": str(where), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    bound = [] if core is None else ["taskset", "-c", str(core)]
    command = [*bound, sys.executable, str(Path(__file__).resolve()), "--turn", *what]
    done = subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{where}: {' '.join(what)} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def side_by_side(before: Path, number: int, *what: str) -> tuple[dict[str, float], ...]:
    """Both checkouts at once, each on a core, which depends on the round's number."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(turn, where, *what, core=cores[(place + number) % 2])
            for place, where in enumerate((before, HERE))
        ]
        return tuple(each.result() for each in waiting)


def shares(pairs: Sequence[tuple[dict[str, float], ...]]) -> dict[str, Any]:
    """The measurements of both checkouts, and the share of the time that this one takes."""
    old, new = ([pair[side] for pair in pairs] for side in (0, 1))
    ratio = median_ratio([row["seconds"] for row in new], [row["seconds"] for row in old])
    return {"before": old, "now": new, "now/before": ratio}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, by name."""
    if args.what == "quickstart":
        return {"quickstart": shares([side_by_side(args.before, n, "quickstart", str(n)) for n in range(args.rounds)])}
    found = {
        name: shares(
            [tuple(turn(where, "mlx", *map(str, sizes)) for where in (args.before, HERE)) for _ in range(args.rounds)]
        )
        for name, sizes in SIZES.items()
    }
    for row in found.values():
        np.testing.assert_allclose([r["norm"] for r in row["now"]], [r["norm"] for r in row["before"]], rtol=1e-6)
    return found


def main() -> None:
    """Measure, print the table, write the JSON."""
    if sys.argv[1:2] == ["--turn"]:
        what, *numbers = sys.argv[2:]
        turns = {"mlx": mlx_update, "quickstart": quickstart}
        print(json.dumps(turns[what](*map(int, numbers))))  # type: ignore[operator]
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mlx", "quickstart"))
    parser.add_argument("--before", type=lambda path: Path(path).resolve(), required=True, help="the earlier checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args)
    rows = [
        {"": name, **{side: _middle(row[side]) for side in ("before", "now")}, "now/before": f"{row['now/before']:.2f}"}
        for name, row in found.items()
    ]
    show(f"{args.what}: median of {args.rounds} rounds", rows)
    write(args.out, {"benchmark": "before", "what": args.what, "results": found})


def _middle(rows: list[dict[str, float]]) -> str:
    names = {"seconds": "{:.2f} s", "accuracy": "{:.1%}", "peak_bytes": "{:,.0f} bytes"}
    return ", ".join(form.format(statistics.median(r[n] for r in rows)) for n, form in names.items() if n in rows[0])


if __name__ == "__main__":
    main()
