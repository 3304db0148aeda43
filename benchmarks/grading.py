"""How fast grading is, also of hostile answers and of programs.

    python benchmarks/grading.py --gsm8k gsm8k_test.jsonl --humaneval HumanEval.jsonl.gz --out grading.json

Responses go through the grader as in training: plain numbers are graded in this process, the rest in
workers. The hostile answers are generated and graded ``--workers`` at a time, so that each one's own
time is measured. It includes the start of a new worker after one was killed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

from delta_cli.data.problem import Problem
from delta_cli.recipe.reward import Reward
from delta_cli.rewards import code_reward
from delta_cli.rewards.code.sandbox import ProcessLimits, SandboxRun, find_sandbox
from delta_cli.rewards.grader import Grader, Verdict

Row = dict[str, Any]
Item = tuple[str, Any]  # a response and its gold answer

LATEX = [  # gold and answer, half of them right, with a number that makes each one new
    (r"\frac{{{i}}}{{7}}", r"\dfrac{{{i}}}{{7}}"),
    (r"x^2+{i}x", r"x(x+{i})"),
    (r"\sqrt{{{i}}}+1", r"1+\sqrt{{{i}}}"),
    (r"\left[{i},\infty\right)", r"[{i}, \infty)"),
    (r"\{{{i},2,3\}}", r"\{{3, {i}, 2\}}"),
    (r"{i}\pi", r"{i} \pi + 1"),
    (r"\frac{{x+{i}}}{{2}}", r"\frac{{x}}{{2}}+{i}"),
    (r"{i}\text{{ cm}}", r"{i}\text{{ m}}"),
    (r"\begin{{pmatrix}}{i}\\2\end{{pmatrix}}", r"\begin{{pmatrix}}2\\{i}\end{{pmatrix}}"),
    (r"y={i}x+1", r"y={i}x-1"),
]
TOKENS = [
    *[
        r"\frac",
        r"\sqrt",
        r"\sum_{i=1}^{10^9}",
        r"\int_0^1",
        r"\left(",
        r"\right)",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\boxed{",
        r"\cup",
        r"\infty",
        r"\text{",
    ],
    *[
        r"{",
        r"}",
        r"(",
        r")",
        r"[",
        r"]",
        r"^",
        r"^{",
        r"_",
        r",",
        r";",
        r"=",
        r"<",
        r">",
        r"!",
        r"&",
        r"\\",
        r"$",
        r"%",
        r"x",
        r"y",
        r"i",
        r"e",
        r"1",
        r"2",
        r"9",
        r"99",
        r"0.5",
        r"-1",
        r"+",
    ],
    *("import os", "while True: pass", "'; DROP", "\0", "\u202e", "💥", "∑", "१२", "NaN", "1e999", "__import__('os')"),
]


def main() -> None:
    """Run the measurements that were asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=20_000, help="integer answers; a tenth of it in LaTeX")
    parser.add_argument("--hostile", type=int, default=10_000, help="hostile answers")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for one answer")
    parser.add_argument("--gsm8k", type=Path, help="the test split as JSON lines")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    rows = [throughput("integers", integers(args.count), args), throughput("LaTeX", latex(args.count // 10), args)]
    rows.append(hostile(args))
    if args.gsm8k:
        rows.append(throughput("GSM8K gold against itself", gsm8k(args.gsm8k), args))
    rows.append(overhead())
    if args.humaneval:
        rows += [humaneval(args, cut=False), humaneval(args, cut=True)]
    for row in rows:
        common.show(row["name"], [{key: _text(value) for key, value in row.items() if key != "name"}])
    common.write(args.out, {"settings": {"workers": args.workers, "limit": args.limit}, "results": rows})


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def grade(grader: Grader, items: Iterable[Item]) -> list[Verdict]:
    """All verdicts, after everything was submitted at once."""
    futures = [grader.submit(answer, Problem("p", "q", gold), 100, truncated=False) for answer, gold in items]
    return [future.result() for future in futures]


def integers(count: int) -> list[Item]:
    return [(rf"7+8=15 \boxed{{{i}}}", str(i + i % 2)) for i in range(count)]


def latex(count: int) -> list[Item]:
    pairs = [LATEX[i % len(LATEX)] for i in range(count)]
    return [
        (rf"so \boxed{{{answer.format(i=i + 11)}}}", gold.format(i=i + 11)) for i, (gold, answer) in enumerate(pairs)
    ]


def gsm8k(path: Path) -> list[Item]:
    golds = [json.loads(line)["answer"].split("####")[1].strip() for line in path.read_text().splitlines()]
    return [(rf"\boxed{{{gold}}}", gold) for gold in golds]


def throughput(name: str, items: list[Item], args: argparse.Namespace) -> Row:
    """Verdicts a second, once the workers are running."""
    with Grader(Reward(workers=args.workers, timeout=args.limit)) as grader:
        grade(grader, [(rf"\boxed{{x+{i}}}", f"{i}+x") for i in range(8 * args.workers)])
        started = time.perf_counter()
        verdicts = grade(grader, items)
        seconds = time.perf_counter() - started
    return {
        "name": name,
        "count": len(items),
        "correct": sum(verdict.correct for verdict in verdicts),
        "failed": sum(verdict.failure is not None for verdict in verdicts),
        "seconds": seconds,
        "verdicts a second": len(items) / seconds,
    }


def hostile_answers(count: int, seed: int = 0) -> list[str]:
    """Token soup, unbalanced and deep brackets, megabytes of digits, towers of powers, sums without end."""
    rng = random.Random(seed)

    def soup() -> str:
        return rng.choice(["", " "]).join(rng.choices(TOKENS, k=rng.randint(1, 40)))

    special = [
        lambda: "9" * rng.choice([10, 1000, 10**6, 2 * 10**6]),
        lambda: "{" * rng.randint(1, 10**5),
        lambda: "(" * (n := rng.randint(1, 1000)) + "1" + ")" * n,
        lambda: r"\frac{1}{" * (n := rng.randint(1, 200)) + "1" + "}" * n,
        lambda: rf"{rng.randint(2, 9)}^{{{rng.randint(2, 9)}^{{{rng.randint(2, 9)}^{{{rng.randint(2, 9)}}}}}}}",
        lambda: rf"x^{{{rng.randint(100, 10**6)}}} + {rng.randint(10, 10**9)}!",
        lambda: rf"\sum_{{k=1}}^{{{10 ** rng.randint(3, 12)}}} \frac{{1}}{{k^2}}",
        lambda: rf"\int_0^{{\infty}} e^{{-x^{{{rng.randint(2, 9)}}}}} \sin(x^{rng.randint(2, 9)}) dx",
        lambda: "+".join(rf"\sqrt{{{rng.randint(2, 999)}}}" for _ in range(rng.randint(10, 100))),
        lambda: "x" + "!" * rng.randint(2, 50),
        lambda: "(" + "+".join(f"x_{i}" for i in range(rng.randint(5, 60))) + ")^{30}",
        lambda: r"\begin{pmatrix}" + r"\\".join("&".join("1" * 9) for _ in range(9)) + r"\end{pmatrix}^{99}",
    ]
    return [rng.choice(special)() if rng.random() < 0.1 else soup() for _ in range(count)]


def hostile(args: argparse.Namespace) -> Row:
    """The time of each hostile answer, the failures, and the memory of this process and the workers."""
    golds = ["41", r"\frac{41}{3}", "x^2+41", r"\{41, 42\}", "y = 41x", r"41\sqrt{2}"]
    slots, times, verdicts = threading.Semaphore(args.workers), [], []
    with Grader(Reward(workers=args.workers, timeout=args.limit)) as grader:
        grade(grader, [(rf"\boxed{{x+{i}}}", f"{i}+x") for i in range(8 * args.workers)])
        before, started = resident(), time.perf_counter()
        for i, answer in enumerate(hostile_answers(args.hostile)):
            slots.acquire()
            begun = time.perf_counter()
            future = grader.submit(rf"\boxed{{{answer}}}", Problem("p", "q", golds[i % 6]), 100, truncated=False)
            future.add_done_callback(
                lambda done, begun=begun: (times.append(time.perf_counter() - begun), slots.release())
            )
            verdicts.append(future)
        results = [future.result() for future in verdicts]
        seconds, growth = time.perf_counter() - started, resident() - before
    failures = Counter(verdict.failure.split(":")[0] for verdict in results if verdict.failure)
    return {
        "name": "hostile answers",
        "count": len(results),
        "accepted": sum(verdict.correct for verdict in results),
        "failed": dict(failures),
        "seconds": seconds,
        "median ms": statistics.median(times) * 1e3,
        "slowest s": max(times),
        "growth here MB": growth / 1e6,
        "largest worker MB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
    }


def resident() -> int:
    """Resident bytes of this process; its peak if the system reports nothing else."""
    status = Path("/proc/self/status")
    if not status.exists():
        return common.peak_memory()
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmRSS"))


def overhead(rounds: int = 30) -> Row:
    """One sandboxed run of a program that prints, next to plain Python doing the same."""
    sandbox = find_sandbox()

    def confined() -> None:
        with SandboxRun(sandbox) as run:
            process = run.start({"mode": "program", "code": "print(1)"}, ProcessLimits(5))
            assert run.read(process, time.monotonic() + 5) == b"1\n"

    ways = {
        "python": lambda: subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True),
        "python -I -S": lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "1"], check=True),
        "sandbox": confined,
        "asserts": lambda: code_reward(
            "```python\ndef f(): return 1\n```", {"type": "asserts", "code": "assert f() == 1"}
        ),
    }
    seconds = common.interleaved(ways, rounds)
    return {"name": "one sandboxed run, median ms", **{name: statistics.median(t) * 1e3 for name, t in seconds.items()}}


def humaneval(args: argparse.Namespace, cut: bool) -> Row:
    """The canonical solutions, or those without the last line of their body."""
    with gzip.open(args.humaneval, "rt") as file:
        tasks = [json.loads(line) for line in file]
    items, names = [], []
    for task in tasks:
        lines = task["canonical_solution"].rstrip().splitlines()
        body = "\n".join(lines[:-1] if cut else lines)
        tests = {"type": "asserts", "code": f"{task['test']}\ncheck({task['entry_point']})"}
        items.append((f"```python\n{task['prompt']}{body}\n```", tests))
        names.append(task["task_id"])
    with Grader(Reward(kind="code", workers=args.workers)) as grader:
        started = time.perf_counter()
        verdicts = grade(grader, items)
        seconds = time.perf_counter() - started
    return {
        "name": "HumanEval, " + ("last line of the body removed" if cut else "canonical solutions"),
        "count": len(items),
        "rewarded": sum(verdict.correct for verdict in verdicts),
        "exceptions": [name for name, verdict in zip(names, verdicts, strict=True) if verdict.correct == cut],
        "failed": sum(verdict.failure is not None for verdict in verdicts),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
