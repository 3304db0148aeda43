"""Hostile programs are contained, earn nothing, and leave no process and no file behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards import code_reward, sandbox
from delta_cli.rewards.sandbox import find_sandbox

pytestmark = pytest.mark.usefixtures("sandbox")

SECONDS = 1.0
SECRET = 987654321012345  # the expected answer: only a program that found it out can give it
FORMS: dict[str, dict[str, Any]] = {
    "asserts": {"type": "asserts", "code": f"assert f(3) == {SECRET}\nassert f(4) == {SECRET + 1}"},
    "calls": {
        "type": "calls",
        "entry_point": "f",
        "cases": [{"args": [3], "expected": SECRET}, {"args": [4], "expected": SECRET + 1}],
    },
    "stdio": {
        "type": "stdio",
        "cases": [{"input": "3", "output": str(SECRET)}, {"input": "4", "output": str(SECRET + 1)}],
    },
}

# What f does when it is called.
ATTACKS = {
    "fork bomb": "while True: os.fork()",
    "thread bomb": "import threading\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory bomb": "held = []\nwhile True: held.append(bytearray(2**26))",
    "one big allocation": "bytearray(2**36)",
    "endless output": "while True: os.write(1, b'9' * 65536)",
    "endless output on stderr": "while True: os.write(2, b'9' * 65536)",
    "endless loop": "while True: pass",
    "endless sleep": "time.sleep(999)",
    "closes its output and sleeps": "os.close(1); time.sleep(999)",
    "ignores signals": "import signal\n[signal.signal(s, signal.SIG_IGN) for s in (2, 15, 24)]\nwhile True: pass",
    "child that outlives it": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)",
    "fills the disk": "i = 0\nwhile True:\n    i += 1\n    open(f'file{i}', 'wb').write(b'0' * 2**24)",
    "kills everyone": "import signal\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.kill(-1, 9)",
    "exits early": "sys.exit(0)",
    "exits hard": "os._exit(0)",
    "exits at exit": "import atexit\natexit.register(os._exit, 0)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "recurses": "sys.setrecursionlimit(10**9)\ndef r(): return r()\nr()",
    "execs": "os.execv('/bin/true', ['true'])",
}

IMPORTS = "import os, sys, time\n"

# Ways to look right without knowing the answer. The last two show that they found it by giving it.
CHEATS = {
    "equal to everything": """
class A(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
def f(x): return A()
""",
    "an object equal to everything": """
class A:
    __eq__ = lambda *_: True
    __bool__ = lambda *_: True
def f(x): return A()
""",
    "patched builtins": """
import builtins
builtins.AssertionError = type('Never', (Exception,), {})
builtins.__build_class__ = None
builtins.int = builtins.float = builtins.str = lambda *_: 0
def f(x): return 7
""",
    "patched json": """
import json
json.dumps = json.loads = lambda *_, **__: '{"value": true}'
def f(x): return 7
""",
    "frames": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in (*frame.f_code.co_consts, *frame.f_locals.values()) if isinstance(v, int) and v > 10**10]
        frame = frame.f_back
    return found[0] + x - 3 if found else 7
""",
    "garbage collector": """
import gc
def f(x):
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            values = thing.values() if isinstance(thing, dict) else thing
            for value in list(values):
                if type(value) is int and 10**14 < value < 10**16: return value + x - 3
    return 7
""",
    "trace": """
import sys
def tracer(frame, event, argument): return tracer
sys.settrace(tracer)
def f(x): return 7
""",
    "forged messages": """
import os, json
lines = [{"passed": 2, "checks": 2, "failed": 0}, {"value": True}, {"names": {"__builtins__": {"dict": []}}}]
for number in range(1, 64):
    for line in (*map(json.dumps, lines), "2 2 0"):
        try: os.write(number, (line + "\\n").encode())
        except OSError: pass
def f(x): return 7
""",
    "replaced names": """
abs = len = print = isinstance = lambda *_: True
class AssertionError(BaseException): pass
def f(x): return 7
""",
    "the answer on disk": """
import os
secret = 987654321012 * 1000 + 345
def f(x):
    for folder, _, names in os.walk("/"):
        for name in names:
            try:
                if str(secret) in open(os.path.join(folder, name), errors="ignore").read(10**6): return secret + x - 3
            except OSError: pass
    return 7
""",
    "the answer in open files and other processes": """
import os
secret = 987654321012 * 1000 + 345
def f(x):
    for place in [*range(3, 64), *(f"/proc/{p}/{name}" for p in range(400) for name in ("cmdline", "environ"))]:
        try:
            text = os.pread(place, 10**6, 0).decode(errors="ignore") if isinstance(place, int) else open(place).read()
            if str(secret) in text: return secret + x - 3
        except OSError: pass
    return 7
""",
}


def run(code: str, form: str, seconds: float = SECONDS) -> float:
    main = "if __name__ == '__main__': print(f(int(input())))"
    return code_reward(f"```python\n{IMPORTS}{code}\n{main}\n```", FORMS[form], seconds=seconds)


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


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_contained(name: str) -> None:
    body = ATTACKS[name]
    indented = "\n".join("    " + line for line in body.splitlines())
    form = ("asserts", "calls", "stdio")[sorted(ATTACKS).index(name) % 3]
    started = time.monotonic()
    assert run(f"def f(x):\n{indented}\n    return 7", form) == 0.0
    assert time.monotonic() - started < SECONDS + 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHEATS)
def test_cheat_earns_nothing(name: str, form: str) -> None:
    assert run(CHEATS[name], form) == 0.0


def test_the_answer_itself_earns_everything() -> None:
    for form in FORMS:
        assert run(f"def f(x): return {SECRET - 3} + x", form, seconds=20) == 1.0


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
