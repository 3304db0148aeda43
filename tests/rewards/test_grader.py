"""Grading in workers: verdicts, shaping, limits that really kill, and failures that never raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader, Verdict, overlong_penalty

ENDLESS = (
    "import itertools\ndef reward(response, problem):\n    return len(response) and sum(1 for _ in itertools.count())"
)
TEST_CODE = {"type": "asserts", "code": "assert f(1) == 2"}


def custom(file: Path, timeout: float) -> Reward:
    """The function ``reward`` of a file, in one worker."""
    return Reward(kind="custom", custom_file=str(file), workers=1, timeout=timeout)


def problem(answer: object) -> Problem:
    return Problem(id="p", question="q", answer=answer)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(Reward(workers=1, timeout=2.0)) as made:
        yield made


def test_verdicts_of_mathematics(grader: Grader) -> None:
    cases = [
        (r"\boxed{85}", "85", True),
        (r"\boxed{86}", "85", False),
        (r"\boxed{1+x}", "x+1", True),
        ("x", "x", False),
    ]
    futures = [grader.submit(response, problem(gold), 10, truncated=False) for response, gold, _ in cases]
    for future, (_, _, correct) in zip(futures, cases, strict=True):
        assert future.result(30) == Verdict(float(correct), correct, None)


def test_plain_numbers_need_no_worker() -> None:
    with Grader(Reward(workers=1, timeout=1.0)) as made:
        futures = [made.submit(rf"7+8=15 \boxed{{{i}}}", problem("85"), 10, truncated=False) for i in range(512)]
        assert all(future.done() for future in futures)
        assert sum(future.result().correct for future in futures) == 1


def endless(folder: Path, timeout: float) -> Grader:
    """A grader whose reward never comes back, but for an empty response."""
    (folder / "endless.py").write_text(ENDLESS)
    return Grader(custom(folder / "endless.py", timeout))


class Unreadable:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("response", [r"\boxed{5}", r"\boxed{5}" + " " * 30_000])
def test_what_raises_is_a_verdict_here_and_in_a_worker(grader: Grader, response: str) -> None:
    verdict = grader.submit(response, problem(Unreadable()), 10, truncated=False).result(30)
    assert verdict == Verdict(0.0, False, "error: ValueError: no text")


def test_what_cannot_be_sent_to_a_worker_is_a_verdict(grader: Grader) -> None:
    verdict = grader.submit(" " * 30_000, problem(lambda: 5), 10, truncated=False).result(30)
    assert verdict.reward == 0.0
    assert (verdict.failure or "").startswith("error: ")


def test_a_closed_grader_gives_verdicts() -> None:
    with Grader(Reward()) as made:
        pass
    assert made.submit(r"\boxed{x}", problem("y"), 1, truncated=False).result(1).failure is not None


def test_what_takes_forever_is_killed_and_grading_goes_on(tmp_path: Path) -> None:
    started = time.monotonic()
    with endless(tmp_path, 1.0) as grader:
        hung = grader.submit("x", problem("5"), 10, truncated=False)
        after = grader.submit("", problem("5"), 10, truncated=False)
        assert hung.result(30) == Verdict(0.0, False, "timeout")
        assert after.result(30) == Verdict(0.0, False, None)
    assert time.monotonic() - started < 20


def test_a_clock_that_jumps_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef reward(response, problem):\n"
        f"    Path({str(begun)!r}).touch()\n    time.sleep(0.4)\n    return 1.0"
    )
    today = time.time
    with Grader(custom(tmp_path / "slow.py", 60.0)) as made:
        future = made.submit("", problem("5"), 1, truncated=False)
        while not begun.exists():
            time.sleep(0.01)
        monkeypatch.setattr(time, "time", lambda: today() + 10**6)
        assert future.result(60) == Verdict(1.0, True, None)


def test_workers_are_gone_after_close(tmp_path: Path) -> None:
    made = endless(tmp_path, 60.0)
    hung = made.submit("x", problem("5"), 10, truncated=False)
    time.sleep(0.2)
    made.close()
    assert hung.result(0) == Verdict(0.0, False, "error: the grader was closed")


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0)],  # buffer 4096 of a 20480 limit, by hand
)
def test_overlong_shaping_of_the_paper(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 20480, 4096, 1.0) == pytest.approx(penalty, abs=1e-12)


def test_shaping_adds_to_the_verdict() -> None:
    shaped = Reward(format_bonus=0.25, length_penalty=0.125, overlong_buffer=50, overlong_factor=2.0)
    with Grader(shaped, max_tokens=100) as made:
        cases = [
            (r"\boxed{5}", 40, False, 1 + 0.25 - 0.005, True),
            (r"\boxed{5}", 75, False, 1 + 0.25 - 0.009375 - 1, True),
            (r"\boxed{4} \boxed{6}", 40, False, -0.005, False),
            (r"\boxed{5}", 40, True, 1 - 0.005, True),
            ("", 0, False, 0.0, False),
        ]
        for response, length, truncated, reward, correct in cases:
            verdict = made.submit(response, problem("5"), length, truncated).result(30)
            assert verdict.reward == pytest.approx(reward, abs=1e-12)
            assert (verdict.correct, verdict.failure) == (correct, None)


@pytest.mark.usefixtures("sandbox")
def test_verdicts_of_code() -> None:
    with Grader(Reward(kind="code", format_bonus=0.5, workers=1, timeout=5.0)) as made:
        made.check(problem(TEST_CODE))
        right = made.submit("```python\ndef f(x): return x + 1\n```", problem(TEST_CODE), 9, truncated=False)
        wrong = made.submit("```python\ndef f(x): return x\n```", problem(TEST_CODE), 9, truncated=False)
        assert right.result(30) == Verdict(1.5, True, None)
        assert wrong.result(30) == Verdict(0.5, False, None)
        with pytest.raises(UserError, match=r"cannot grade problem 'p': code tests need a 'type'"):
            made.check(problem("5"))


CUSTOM = """
import os, time
def reward(response, problem):
    if response == "hang": time.sleep(99)
    if response == "die": os._exit(3)
    return len(response) / problem.answer
def text(response, problem): return "good"
def broken(response, problem): return problem.no_such_field
"""


def test_a_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    with Grader(custom(tmp_path / "mine.py", 1.0)) as made:
        made.check(problem(4))
        submit = {
            name: made.submit(name, problem(4), 1, truncated=False) for name in ("ab", "good", "hang", "die", "abc")
        }
        verdicts = {name: future.result(30) for name, future in submit.items()}
    assert verdicts["ab"] == Verdict(0.5, False, None)
    assert verdicts["good"] == Verdict(1.0, True, None)
    assert verdicts["hang"] == Verdict(0.0, False, "timeout")
    assert verdicts["die"] == Verdict(0.0, False, "worker died")
    assert verdicts["abc"] == Verdict(0.75, False, None)


def test_grading_goes_on_when_an_idle_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef reward(response, problem): return os.getpid()")
    with Grader(custom(tmp_path / "mine.py", 10.0)) as made:
        first = made.submit("", problem(4), 1, truncated=False).result(30)
        os.kill(int(first.reward), signal.SIGKILL)
        os.waitid(os.P_PID, int(first.reward), os.WEXITED | os.WNOWAIT)  # all its threads are gone
        second = made.submit("", problem(4), 1, truncated=False).result(30)
        assert second.failure is None
        assert second.reward != first.reward


@pytest.mark.parametrize(
    ("file", "function", "message"),
    [
        ("missing.py", "reward", "does not exist"),
        ("mine.py", "nothing", "has no function 'nothing'"),
        ("mine.py", "text", "returned 'good'; it must return a finite number"),
        ("mine.py", "broken", "no_such_field"),
        ("bad.py", "reward", "does not run: ZeroDivisionError"),
    ],
)
def test_a_users_mistake_is_named_at_start_up(tmp_path: Path, file: str, function: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    (tmp_path / "bad.py").write_text("1 / 0")
    reward = Reward(kind="custom", custom_file=str(tmp_path / file), custom_function=function, workers=1)
    with Grader(reward) as made, pytest.raises(UserError, match=message) as caught:
        made.check(problem(4))
    assert "\n" not in str(caught.value)


def test_a_function_of_the_users_sees_columns_and_earlier_turns(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(response, problem):\n    return problem.columns['points'] * len(problem.turns[0]['content'])\n"
    )
    asked = Problem("p", "q", "", columns={"points": 3}, turns=({"role": "user", "content": "Hi"},))
    with Grader(custom(tmp_path / "mine.py", 5.0)) as made:
        assert made.submit("", asked, 1, False).result().reward == 3 * len("Hi")


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    """A worker imports what grading needs, not the module that started it."""
    (tmp_path / "script.py").write_text(
        "from delta_cli.data.problem import Problem\n"
        "from delta_cli.recipe.reward import Reward\n"
        "from delta_cli.rewards.grader import Grader\n"
        "print('run', flush=True)\n"
        "grader = Grader(Reward(workers=2))\n"
        "print(grader.submit(r'\\boxed{1+x}', Problem('p', '?', 'x+1'), 9, False).result().reward)\n"
        "grader.close()\n"
    )
    script = [sys.executable, "script.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "run\n1.0\n"


@pytest.mark.long
def test_a_worker_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, re\nfrom pathlib import Path\ndef reward(response, problem):\n"
        f"    Path({str(tmp_path / 'worker')!r}).write_text(str(os.getpid()))\n"
        "    re.match('(a+)+$', 'a' * 60 + 'b')\n"  # holds the interpreter's lock: no thread of the worker's own runs
    )
    (tmp_path / "script.py").write_text(
        "import os, time\n"
        "from delta_cli.data.problem import Problem\n"
        "from delta_cli.recipe.reward import Reward\n"
        "from delta_cli.rewards import worker_pool\n"
        "from delta_cli.rewards.grader import Grader\n"
        f"reward = Reward(kind='custom', custom_file={str(tmp_path / 'mine.py')!r}, timeout=0.3)\n"
        "Grader(reward).submit('', Problem('p', '?', ''), 1, False)\n"
        f"while not os.path.exists({str(tmp_path / 'worker')!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, timeout=60, check=False)
    worker = int((tmp_path / "worker").read_text())
    for _ in range(200):
        if not alive(worker):
            break
        time.sleep(0.05)
    assert not alive(worker)


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
