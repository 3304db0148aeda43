"""Hostile programs are contained, earn nothing, and leave no process and no file behind."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards import code_reward
from delta_cli.rewards.code import sandbox
from delta_cli.rewards.code.sandbox import find_sandbox
from tests.rewards.code import cheats, forged, hostile
from tests.rewards.code.forged import BATTERIES, RIGHT, RIGHT_RECORD, SECRET
from tests.rewards.code.hostile_programs import PROGRAMS
from tests.rewards.code.hostile_values import LAST, VALUES

pytestmark = pytest.mark.usefixtures("sandbox")

SECONDS = 0.5  # for an attack, which has done its worst by then or goes on for ever
LONG_SECONDS = 1.0
AT_ONCE = 4
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

ATTACKS = {
    name: f"def f(x):\n{textwrap.indent(body.strip(), '    ')}\n    return 7" for name, body in hostile.ATTACKS.items()
}
# A program whose f returns one of VALUES, by its number from 1000 on.
OF_VALUES = f"""
MAKERS = []
for source in {list(VALUES.values())!r}:
    scope = {{}}
    exec(source, scope)
    MAKERS.append(scope["A"])
def f(x):
    number = x[0] if isinstance(x, list) else x
    return {SECRET} if number == 3 else MAKERS[number - 1000]()
"""


def run(code: str, form: str, seconds: float) -> float:
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


def survivors(programs: Mapping[str, tuple[str, str]], seconds: float) -> dict[str, tuple[float, float]]:
    """Of programs with their forms: those that earned anything or took too long, with the reward and the time."""

    def attack(program: tuple[str, str]) -> tuple[float, float]:
        started = time.monotonic()
        return run(*program, seconds), time.monotonic() - started

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = zip(programs, pool.map(attack, programs.values()), strict=True)
        return {name: (reward, took) for name, (reward, took) in results if reward or took > seconds + 9}


def in_one_form(programs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Each with another form than the next."""
    return {name: (code, sorted(FORMS)[place % len(FORMS)]) for place, (name, code) in enumerate(programs.items())}


def test_attacks_are_contained_and_earn_nothing() -> None:
    assert len(ATTACKS) + len(cheats.CHEATS) >= 100
    assert survivors(in_one_form(ATTACKS), SECONDS) == {}


def test_cheats_earn_nothing() -> None:
    assert survivors(in_one_form(cheats.CHEATS), 4.0) == {}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_every_attack_in_every_form(form: str) -> None:
    programs = {**ATTACKS, **cheats.CHEATS}
    assert survivors({name: (code, form) for name, code in programs.items()}, LONG_SECONDS) == {}


def share(code: str, tests: str, seconds: float = 20) -> float:
    """The share of the checks that a program passes."""
    return code_reward(f"```python\n{code}\n```", {"type": "asserts", "code": tests}, mode="share", seconds=seconds)


def test_batteries_pass_for_the_right_program() -> None:
    for name, tests in BATTERIES.items():
        assert share(RIGHT_RECORD if name == "record" else RIGHT, tests) == 1.0, name


def test_no_hostile_value_passes_a_check_of_another() -> None:
    """Every value meets a dozen checks, all in one run, whose last check shows that it got to the end."""
    rng = random.Random(0)
    checks = [text for text in forged.single_tests(["number", "list", "unittest"]) if "f(x)" not in text]
    texts: list[str] = []
    for number in (1000 + place for place, name in enumerate(VALUES) if name not in LAST):
        for text in rng.sample(checks, 12):
            place, called = len(texts), text.replace("f([3, 4])", f"f([{number}])").replace("f(3)", f"f({number})")
            texts.append(re.sub(r"def test_|class Test|class T\b", rf"\g<0>{place}", called))
    tests = "\n".join([*texts, "assert f(3) == S"])
    assert share(OF_VALUES, tests, 60) == 1 / (len(texts) + 1)


def test_values_that_end_the_run_pass_nothing() -> None:
    assert {name: reward for name, reward in of_values(LAST, "number", 1.5).items() if reward} == {}


def of_values(names: Iterable[str], battery: str, seconds: float) -> dict[str, float]:
    """What each value earns in a battery, as whatever is called there."""
    codes = [f"{VALUES[name]}\ndef f(x): return A()\nP = apply = sorted = lambda *a, **k: A()" for name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda code: share(code, BATTERIES[battery], seconds), codes), strict=True))


@pytest.mark.parametrize("battery", PROGRAMS)
def test_hostile_programs_pass_nothing_of_their_battery(battery: str) -> None:
    def earned(name: str) -> float:
        return share(PROGRAMS[battery][name], BATTERIES[battery], 1.5)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rewards = dict(zip(PROGRAMS[battery], pool.map(earned, PROGRAMS[battery]), strict=True))
    assert {name: reward for name, reward in rewards.items() if reward} == {}


def forge(seed: int, count: int, stride: int) -> list[str]:
    """What ``forged.py`` finds: how often the right answer earned the reward, and all others that did."""
    command = [sys.executable, "-m", "tests.rewards.code.forged", str(seed), str(count), str(stride)]
    path = os.pathsep.join(["", *sys.path])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_forged_answers_earn_nothing_and_true_ones_do() -> None:
    assert forge(0, 300, 8) == ["the right answer: 42 of 42"]


@pytest.mark.long
def test_many_forged_answers_earn_nothing() -> None:
    assert len(forge(10**6, 3_000, 2)) == 1


@pytest.mark.long
@pytest.mark.parametrize("battery", BATTERIES)
def test_every_program_and_value_with_every_battery(battery: str) -> None:
    """Nothing of a battery is so weak that a wrong program could pass it by right."""
    programs = {name: code for each in PROGRAMS.values() for name, code in each.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rewards = pool.map(lambda code: share(code, BATTERIES[battery], 3), programs.values())
    earned = dict(zip(programs, rewards, strict=True)) | of_values(VALUES, battery, 3)
    assert {name: reward for name, reward in earned.items() if reward} == {}


def test_the_answer_itself_earns_everything() -> None:
    for form in sorted(FORMS.keys() - {"loop"}):
        assert run(f"def f(x): return {SECRET - 3} + x", form, 20) == 1.0
    assert run(f"def f(x): return x if x == [1] else {SECRET - 3} + x", "loop", 20) == 1.0


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


@pytest.fixture
def no_sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without bubblewrap or sandbox-exec, after the module's fixture has looked for them."""
    request.getfixturevalue("sandbox")
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    find_sandbox.cache_clear()
    yield
    find_sandbox.cache_clear()


@pytest.mark.usefixtures("no_sandbox")
def test_without_a_sandbox_it_refuses_and_says_how_to_install_one() -> None:
    with pytest.raises(UserError, match=r"install bubblewrap|part of macOS"):
        find_sandbox()
    assert find_sandbox(allow_unsandboxed=True).kind == "none"
    tests = {"type": "asserts", "code": "assert f(1) == 2"}
    assert code_reward("```python\ndef f(x): return x + 1\n```", tests, allow_unsandboxed=True) == 1.0
    assert code_reward("```python\nwhile True: pass\n```", tests, allow_unsandboxed=True, seconds=0.5) == 0.0


NO_FILTER = pytest.mark.skipif(
    not find_sandbox(allow_unsandboxed=True).filter, reason="no filter of system calls on this machine"
)
# What would outlive a run, or end somebody else's process. The last line is reached only by what was refused.
ESCAPES = {
    "a double fork": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(99)",
    "a process of another program": "import subprocess\nsubprocess.Popen(['sleep', '99'])",
    "a process by hand": "libc.syscall(56 if x86 else 220, 17, 0, 0, 0, 0) == -1 or print('out')\nraise OSError",
    "the death of its parent": "os.kill(os.getppid(), 9)",
    "the death of all": "os.kill(-1, 9)",
    "a signal to a thread": "libc.syscall(234 if x86 else 131, os.getppid(), os.getppid(), 9)\nraise OSError",
    "a life of its own": "libc.prctl(1, 0, 0, 0, 0) == -1 or print('out')\nraise OSError",
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', 1), 0.1)",
}


@NO_FILTER
@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("name", ESCAPES)
def test_without_a_sandbox_no_process_outlives_the_run_or_ends_another(name: str) -> None:
    start = "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nx86 = os.uname().machine == 'x86_64'\n"
    code = f"{start}try:\n{textwrap.indent(ESCAPES[name], '    ')}\nexcept OSError: print('held')"
    tests = {"type": "stdio", "cases": [{"input": "", "output": "held"}]}
    assert code_reward(f"```python\n{code}\n```", tests, allow_unsandboxed=True) == 1.0


@NO_FILTER
def test_without_a_sandbox_a_program_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """Killed, that process has no time to end its program."""
    begun = tmp_path / "begun"
    response = f"```python\nimport time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(99)\n```"
    script = f"""
import os, threading, time
from delta_cli.rewards.code import sandbox
from delta_cli.rewards.code.verdict import code_reward
sandbox.shutil.which = lambda name: None
tests = {{"type": "stdio", "cases": [{{"input": "", "output": ""}}]}}
run = lambda: code_reward({response!r}, tests, seconds=90, allow_unsandboxed=True)
threading.Thread(target=run, daemon=True).start()
while not os.path.exists({str(begun)!r}):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False)
    assert begun.exists()
    for folder in folders():  # which nobody was left to remove
        shutil.rmtree(Path(tempfile.gettempdir()) / folder, ignore_errors=True)


@NO_FILTER
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
