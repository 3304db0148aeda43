"""The user's environments in processes: classes in TRL's shape, and code that hangs, raises, floods, forks and lies."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_cli.environments.processes import EnvironmentProcesses
from delta_cli.environments.turn import EpisodeFailure, ToolError
from delta_cli.errors import UserError

CODE = '''
import asyncio, os, sys, time
from delta_cli.environments import Turn

print("\\x1b[2J printed while it loads")

class Hostile:
    """A text environment that does what the text says."""

    def reset(self, question, **row):
        self.steps = 0
        return f" ({question})"

    def step(self, text):
        self.steps += 1
        if text == "hang":
            time.sleep(60)
        if text == "raise":
            raise RuntimeError("over\\nand out")
        if text == "exit":
            sys.exit(3)
        if text == "die":
            os._exit(3)
        if text == "flood":
            return Turn("x" * 10_000_000)
        if text == "fork":
            for _ in range(5):
                if os.fork() == 0:
                    time.sleep(60)
            return Turn(str(os.getpid()))
        if text == "control":
            print("\\x1b[2J")
            return Turn("\\x1b[2J\\x00\\r")
        if text == "nan":
            return Turn("", False, float("nan"))
        if text == "nonsense":
            return 7
        if text == "lie":
            return {"text": "on", "done": "certainly", "reward": 1}
        return Turn(f"{self.steps}: {text}", text == "end", 0.5)

class Echo:
    """The shape of TRL's environments."""

    def reset(self, **row):
        self.said = []
        return None

    def echo(self, message: str) -> str:
        """Say it again.

        Args:
            message: what to say
        """
        self.said.append(message)
        return message

    async def later(self, number: int) -> dict:
        """Answer later.

        Args:
            number: any
        """
        await asyncio.sleep(0.01)
        return {"next": number + 1}

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return float(len(self.said))

def twice(text: str) -> str:
    """Say it twice."""
    return text * 2
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(CODE)
    return file


@pytest.fixture
def hostile(code: Path) -> Iterator[EnvironmentProcesses]:
    opened = EnvironmentProcesses("text", f"{code}:Hostile", (), 1.0, tells_errors=False)
    yield opened
    opened.close()


def test_state_stays_with_the_episode(hostile: EnvironmentProcesses) -> None:
    first, second = hostile.session(), hostile.session()
    assert first.reset({"question": "6*7", "answer": "42"}) == " (6*7)"
    second.reset({"question": "1+1"})
    assert [first.step("a").text, first.step("b").text, second.step("c").text] == ["1: a", "2: b", "1: c"]
    end = second.step("end")
    assert (end.done, end.reward) == (True, 0.5)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hang", "timeout: step took longer than 1 s"),
        ("raise", "step raised RuntimeError: over"),
        ("exit", "step raised SystemExit: 3"),
        ("die", "process ended in step"),
        ("nan", "the reward is nan"),
        ("nonsense", "step returned int"),
    ],
)
def test_failures_say_what_happened(hostile: EnvironmentProcesses, text: str, said: str) -> None:
    session, other = hostile.session(), hostile.session()
    session.reset({"question": ""})
    other.reset({"question": ""})
    with pytest.raises(EpisodeFailure, match=said):
        session.step(text)
    assert other.step("still here").text == "1: still here"
    session.close()
    other.close()


def test_floods_control_characters_and_lies_are_only_text(hostile: EnvironmentProcesses) -> None:
    session = hostile.session()
    session.reset({"question": ""})
    assert 1000 < len(session.step("flood").text) <= 200_000
    assert session.step("control").text == "\x1b[2J\x00\r"
    assert session.step("lie").done
    session.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_that_it_forked_end_with_the_episode(hostile: EnvironmentProcesses) -> None:
    session = hostile.session()
    session.reset({"question": ""})
    group = int(session.step("fork").text)
    assert len(running(group)) == 6
    session.close()
    deadline = time.monotonic() + 5
    while running(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(group) == []


def running(group: int) -> list[int]:
    """The processes of a group that have not ended, from /proc; a killed one may wait there to be collected."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, leader = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(leader) == group and state != "Z":
                found.append(int(folder.name))
    return found


def test_tools_of_a_class_and_functions(code: Path) -> None:
    opened = EnvironmentProcesses("tools", f"{code}:Echo", (f"{code}:twice",), 5.0, tells_errors=True)
    assert [tool["function"]["name"] for tool in opened.tools] == ["twice", "echo", "later"]
    session = opened.session()
    assert session.reset({"question": "?"}) is None
    assert session.call("echo", {"message": "hello"}) == "hello"
    assert session.call("later", {"number": 4}) == '{"next": 5}'
    assert session.call("twice", {"text": "ab"}) == "abab"
    for name, arguments, said in (
        ("echo", {"words": 1}, "unexpected|missing"),
        ("_hidden", {}, "no tool"),
        ("reset", {}, "no tool"),
        ("twice", {"text": None}, "TypeError"),
    ):
        with pytest.raises(ToolError, match=said):
            session.call(name, arguments)
    assert session.reward() == 1.0
    session.close()
    opened.close()


def test_the_game_of_the_document(tmp_path: Path) -> None:
    """The class in docs/environments.md, as it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "game.py").write_text(code)
    opened = EnvironmentProcesses("text", f"{tmp_path / 'game.py'}:HigherOrLower", (), 5.0, tells_errors=False)
    session = opened.session()
    assert session.reset({"id": "1", "question": "Guess:", "answer": "31"}) is None
    answers = [session.step(guess) for guess in (" 20?", " 40?", " no?", " 31?")]
    assert [turn.text for turn in answers] == [" higher,", " lower,", " lower,", ""]
    assert [(turn.done, turn.reward) for turn in answers] == [(False, 0.0)] * 3 + [(True, 1.0)]
    session.close()
    opened.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.py:Echo", "does not exist"),
        ("own.py:Nobody", "has no class or function Nobody"),
        ("own.py:Echo", r"has no method step\(text\)"),
        ("broken.py:Echo", "does not run: SyntaxError"),
        ("exits.py:Echo", "SystemExit|process ended"),
    ],
)
def test_code_that_does_not_load(code: Path, name: str, said: str) -> None:
    (code.parent / "broken.py").write_text("def (")
    (code.parent / "exits.py").write_text("import sys; sys.exit()")
    with pytest.raises(UserError, match=said):
        EnvironmentProcesses("text", str(code.parent / name), (), 1.0, tells_errors=False)
