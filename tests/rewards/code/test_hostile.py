"""Hostile programs are contained, earn nothing, and leave no process and no file behind."""

from __future__ import annotations

import importlib.util
import os
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards import code_reward
from delta_cli.rewards.code import sandbox
from delta_cli.rewards.code.sandbox import find_sandbox

pytestmark = pytest.mark.usefixtures("sandbox")

_SPEC = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
hostile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hostile)

SECONDS = 1.0
SECRET = 987654321012345  # the expected answer: only a program that found it out can give it
FORMS: dict[str, dict[str, Any]] = {
    "asserts": {"type": "asserts", "code": f"assert f(3) == {SECRET}\nassert f(4) == {SECRET + 1}"},
    "calls": {
        "type": "calls",
        "entry_point": "f",
        "cases": [{"args": [3], "expected": SECRET}, {"args": [4], "expected": SECRET + 1}],
    },
    "pytest": {
        "type": "asserts",
        "code": f"import math\ndef test_f():\n    assert f(3) == {SECRET}\n    assert math.isclose(f(4), {SECRET + 1})",
    },
    "unittest": {
        "type": "asserts",
        "code": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
        f"        self.assertEqual(f(3), {SECRET})",
    },
    "loop": {
        "type": "asserts",
        "code": f"for x, y in zip((3, 4), map(f, (3, 4))):\n    assert y == {SECRET} + x - 3\n"
        "assert all(map(f, [[1]]))",
    },
    "stdio": {
        "type": "stdio",
        "cases": [{"input": "3", "output": str(SECRET)}, {"input": "4", "output": str(SECRET + 1)}],
    },
}

# A program: what f does when it is called, or a whole one.
PROGRAMS = {
    **{
        name: f"def f(x):\n{textwrap.indent(body.strip(), '    ')}\n    return 7"
        for name, body in hostile.ATTACKS.items()
    },
    **hostile.CHEATS,
}


def run(code: str, form: str, seconds: float = SECONDS) -> float:
    main = "if __name__ == '__main__': print(f(int(input())))"
    return code_reward(f"```python\n{hostile.IMPORTS}{code}\n{main}\n```", FORMS[form], seconds=seconds)


def living() -> set[str]:
    """Command lines of the processes that run what the sandbox runs."""
    found = set()
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and sandbox.START in line:
            found.add(f"{entry.name} {line[:60]}")
    return found


def folders() -> set[str]:
    """What the sandbox keeps programs in."""
    return {name for name in os.listdir("/tmp") if name.startswith("delta-code-")}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """What is there after a test goes away by itself: with several workers it may be another's, soon at its end."""
    before = living() | folders()
    yield
    left = (living() | folders()) - before
    for _ in range(500):
        if not left:
            break
        time.sleep(0.02)
        left &= living() | folders()
    assert not left


def _attack(name: str, form: str) -> tuple[float, float]:
    """What the program earned, and how long it took."""
    started = time.monotonic()
    return run(PROGRAMS[name], form), time.monotonic() - started


@pytest.mark.parametrize("name", PROGRAMS)
def test_attack_is_contained_and_earns_nothing(name: str) -> None:
    form = sorted(FORMS)[sorted(PROGRAMS).index(name) % len(FORMS)]
    earned, seconds = _attack(name, form)
    assert earned == 0.0
    assert seconds < SECONDS + 3


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_every_attack_in_every_form(form: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = dict(zip(PROGRAMS, pool.map(lambda name: _attack(name, form), PROGRAMS), strict=True))
    assert len(results) >= 100
    assert {name: result for name, result in results.items() if result[0] or result[1] > SECONDS + 9} == {}


def test_the_answer_itself_earns_everything() -> None:
    for form in sorted(FORMS.keys() - {"loop"}):
        assert run(f"def f(x): return {SECRET - 3} + x", form, seconds=20) == 1.0
    assert run(f"def f(x): return x if x == [1] else {SECRET - 3} + x", "loop", seconds=20) == 1.0


def test_writes_nothing_outside(tmp_path: Path) -> None:
    targets = [
        str(tmp_path / "owned"),
        "/tmp/owned",
        "/etc/owned",
        "/owned",
        os.path.expanduser("~/owned"),
        "/dev/owned",
    ]
    code = f"""
done = []
for target in {targets}:
    try: open(target, "w").write("x"); done.append(target)
    except OSError: pass
print(done)
"""
    tests = {"type": "stdio", "cases": [{"input": "", "output": "[]"}]}
    assert code_reward(f"```python\n{code}```", tests) == 1.0
    assert not any(os.path.exists(target) for target in targets)


def test_reads_neither_home_nor_repository(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    paths = [
        str(secret),
        str(Path(__file__).resolve()),
        os.path.expanduser("~/.bashrc"),
        "/etc/passwd",
        "/proc/1/environ",
    ]
    code = f"""
import os
found = []
for path in {paths}:
    try: found.append(open(path).read())
    except OSError: pass
print(found, os.environ.get("PATH"), os.listdir("."))
"""
    tests = {"type": "stdio", "cases": [{"input": "", "output": "[] None []"}]}
    assert code_reward(f"```python\n{code}```", tests) == 1.0


def test_opens_no_connection() -> None:
    accepted: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        listener = threading.Thread(target=lambda: _accept(server, accepted))
        listener.start()
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 0.3)\nprint('out')"
        assert (
            code_reward(f"```python\n{code}\n```", {"type": "stdio", "cases": [{"input": "", "output": "out"}]}) == 0.0
        )
        listener.join()
    assert not accepted


def _accept(server: socket.socket, accepted: list[object]) -> None:
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return
    accepted.append(connection)
    connection.close()


def test_without_a_sandbox_it_refuses_and_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    find_sandbox.cache_clear()
    try:
        with pytest.raises(UserError, match=r"install bubblewrap|part of macOS"):
            find_sandbox()
        assert find_sandbox(allow_unsandboxed=True).kind == "none"
        tests = {"type": "asserts", "code": "assert f(1) == 2"}
        assert code_reward("```python\ndef f(x): return x + 1\n```", tests, allow_unsandboxed=True) == 1.0
        assert code_reward("```python\nwhile True: pass\n```", tests, allow_unsandboxed=True, seconds=0.5) == 0.0
    finally:
        find_sandbox.cache_clear()


@pytest.mark.skipif(not find_sandbox(allow_unsandboxed=True).filter, reason="no filter of system calls on this machine")
def test_what_no_limit_counts_is_refused() -> None:
    """Shared memory, message queues, files in memory, processes and namespaces of the program's own."""
    code = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
flags = {"new user": 0x10000000, "new network": 0x40000000, "a process": 0}
calls = {
    "shmget": lambda: libc.shmget(0, 4096, 0o1600),
    "msgget": lambda: libc.msgget(0, 0o1600),
    "semget": lambda: libc.semget(0, 1, 0o1600),
    "memfd": lambda: libc.memfd_create(b"x", 0),
    "fork": lambda: libc.fork(),
    "vfork": lambda: libc.syscall(58) if os.uname().machine == "x86_64" else -1,
    "unshare": lambda: libc.unshare(0x10000000),
    "setns": lambda: libc.setns(0, 0),
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "clone3": lambda: libc.syscall(435, 0, 0),
    "keyctl": lambda: libc.syscall(250 if os.uname().machine == "x86_64" else 219, 0, 0),
    "bpf": lambda: libc.syscall(321 if os.uname().machine == "x86_64" else 280, 0, 0, 0),
}
done = []
for name, call in calls.items():
    ctypes.set_errno(0)
    if call() != -1 or ctypes.get_errno() not in (1, 38): done.append((name, ctypes.get_errno()))
thread = threading.Thread(target=lambda: done.append("a thread"))
thread.start()
thread.join()
print(done)
"""
    tests = {"type": "stdio", "cases": [{"input": "", "output": "['a thread']"}]}
    assert code_reward(f"```python\n{code}\n```", tests, seconds=10) == 1.0
