"""Does the program in the last code block of a response pass its tests?"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from typing import Any, Literal

from delta_cli.errors import UserError
from delta_cli.rewards.code.checks import countable
from delta_cli.rewards.code.sandbox import ProcessLimits, Sandbox, SandboxRun, ended_well, find_sandbox

_PARSING = threading.Lock()  # in Python 3.11 two threads that build syntax trees disturb each other (gh-106905)
CodeTests = dict[str, Any]  # the tests of one problem, as docs/code_reward.md describes them
LANGUAGES = ("", "python", "python3", "py")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)")
RESULT = re.compile(rb"(\d{1,9}) (\d{1,9}) (\d{1,9})")  # checks that passed, all checks, failures
KEYS = {"asserts": ("code",), "stdio": ("cases",), "calls": ("entry_point", "cases")}
CASE_FORMS: dict[str, type] = {"input": str, "output": str, "args": list}
CASE_KEYS = {"stdio": ("input", "output"), "calls": ("args", "expected")}


def code_reward(
    response: str,
    tests: CodeTests,
    *,
    mode: Literal["all", "share"] = "all",
    seconds: float = 6.0,
    allow_unsandboxed: bool = False,
) -> float:
    """Run the last Python block of ``response`` against ``tests``.

    ``tests`` is ``{"type": "asserts", "code": …}``, ``{"type": "stdio", "cases": [{"input", "output"}]}``
    or ``{"type": "calls", "entry_point": …, "cases": [{"args", "expected"}]}``. The reward is 1.0 when
    all pass and 0.0 otherwise, or with ``mode="share"`` the share that passed. ``seconds`` bounds the
    wall-clock time of all tests together. Raises UserError if the tests are malformed or the machine
    has no sandbox.
    """
    check_tests(tests)
    sandbox = find_sandbox(allow_unsandboxed)
    blocks = code_blocks(response)
    if not blocks:
        return 0.0
    deadline = time.monotonic() + seconds
    limits = ProcessLimits(seconds=math.ceil(seconds))
    if tests["type"] == "asserts":
        passed, total = _asserts(blocks[-1], tests["code"], sandbox, limits, deadline)
    elif tests["type"] == "stdio":
        passed, total = _stdio(blocks[-1], tests["cases"], sandbox, limits, deadline, mode == "all")
    else:
        passed, total = _calls(blocks[-1], tests, sandbox, limits, deadline)
    return passed / total if mode == "share" else float(passed == total)


def code_blocks(response: str) -> list[str]:
    """The Python code blocks in order; none if the last block never closes."""
    blocks: list[str] = []
    lines: list[str] = []
    fence = language = ""
    for line in response.splitlines():
        match = FENCE.fullmatch(line)
        label = match[2].split() if match else []
        if fence and match and not label and match[1].startswith(fence):
            if language.lower() in LANGUAGES:
                blocks.append("\n".join(lines) + "\n")
            fence = ""
        elif fence:
            lines.append(line)
        elif match:
            fence, language, lines = match[1], label[0] if label else "", []
    return [] if fence else blocks


def check_tests(tests: CodeTests) -> None:
    """Raise UserError with one line unless the tests have one of the three forms."""
    kind = tests.get("type") if isinstance(tests, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise UserError(f"code tests need a 'type' of {', '.join(KEYS)}; got {str(kind)[:60]!r}")
    for key in KEYS[kind]:
        form: type = list if key == "cases" else str
        if not tests.get(key) or not isinstance(tests[key], form):
            raise UserError(f"code tests of type '{kind}' need a '{key}', a {'list' if form is list else 'text'}")
    if kind == "asserts":
        _check_code(tests["code"])
        return
    for case in tests["cases"]:
        for key in CASE_KEYS[kind]:
            if not isinstance(case, dict) or key not in case:
                raise UserError(f"a case of code tests of type '{kind}' has no '{key}'")
            form = CASE_FORMS.get(key, object)
            if not isinstance(case[key], form):
                raise UserError(f"a case of code tests of type '{kind}': '{key}' is no {form.__name__}")


def _check_code(code: Any) -> None:
    try:
        with _PARSING:
            checks = isinstance(code, str) and countable(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"code tests of type 'asserts' are not Python ({str(error).partition(chr(10))[0]})") from None
    if not checks:
        raise UserError(
            "code tests of type 'asserts' hold nothing to count; write asserts, test functions or a TestCase"
        )


def _asserts(code: str, tests: str, sandbox: Sandbox, limits: ProcessLimits, deadline: float) -> tuple[int, int]:
    """The program in one sandbox, the asserts in another."""
    ours, theirs = socket.socketpair()
    with SandboxRun(sandbox) as run:
        with ours, theirs:
            run.start({"mode": "serve", "code": code, "link": theirs.fileno()}, limits, fds=(theirs.fileno(),))
            judge = {"mode": "judge", "tests": tests, "link": ours.fileno()}
            process = run.start(judge, limits, fds=(ours.fileno(),))
        output = run.read(process, deadline)
    counts = RESULT.fullmatch(output or b"")
    if counts is None:
        return 0, 1
    passed, checks, failed = map(int, counts.groups())
    total = max(checks, 1)
    return min(passed, total - bool(failed)), total


def _stdio(
    code: str, cases: list[dict[str, str]], sandbox: Sandbox, limits: ProcessLimits, deadline: float, stop_early: bool
) -> tuple[int, int]:
    """Each case in a sandbox of its own; the outputs are compared out here."""
    passed = 0
    for case in cases:
        with SandboxRun(sandbox) as run:
            process = run.start({"mode": "program", "code": code}, limits, stdin=case["input"])
            output = run.read(process, deadline)
            completed = output is not None and ended_well(process, deadline)
        if completed and output is not None and _same_output(output.decode(errors="replace"), case["output"]):
            passed += 1
        elif stop_early or time.monotonic() >= deadline:
            break
    return passed, len(cases)


def _same_output(output: str, expected: str) -> bool:
    """Whether the lines hold the same words; blank lines at the ends do not count."""
    first, second = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    return first == second


def _calls(code: str, tests: CodeTests, sandbox: Sandbox, limits: ProcessLimits, deadline: float) -> tuple[int, int]:
    """All calls in one sandbox; the results come out as JSON and are compared out here."""
    job = {
        "mode": "calls",
        "code": code,
        "entry_point": tests["entry_point"],
        "arguments": [case["args"] for case in tests["cases"]],
    }
    with SandboxRun(sandbox) as run:
        output = run.read(run.start(job, limits), deadline) or b""
    passed = 0
    for line, case in zip(output.splitlines(), tests["cases"], strict=False):
        passed += _returned(line, case["expected"])
    return passed, len(tests["cases"])


def _returned(line: bytes, expected: Any) -> bool:
    """Whether a line of the program's process holds the value that is expected. Nothing but JSON is read."""
    try:
        result = json.loads(line)
        return isinstance(result, dict) and "value" in result and _same_value(result["value"], expected)
    except (ValueError, RecursionError):
        return False  # the program wrote into the results; it cannot know what is expected


def _same_value(value: Any, expected: Any) -> bool:
    """Equality of plain data as JSON shows it: tuples are lists, keys are text.

    If a float is expected, a number may differ from it by 1e-9 of its size; an integer has no tolerance.
    """
    if isinstance(expected, list | tuple):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(expected, dict):
        wanted = {str(key): item for key, item in expected.items()}
        same_keys = isinstance(value, dict) and value.keys() == wanted.keys()
        return same_keys and all(_same_value(value[key], wanted[key]) for key in wanted)
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if isinstance(value, bool) != isinstance(expected, bool):
            return False
        return value == expected or (isinstance(expected, float) and _is_close(value, expected))
    return type(value) is type(expected) and bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected)
    except OverflowError:  # an integer beyond every float
        return False
