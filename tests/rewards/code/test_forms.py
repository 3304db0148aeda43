"""The forms of tests that public data sets use, and wrong programs that once passed them."""

from __future__ import annotations

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards import code_reward

from .programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("sandbox")

RIGHT, WRONG, EMPTY = "def add(a, b): return a + b", "def add(a, b): return a - b", ""


def reward(code: str, tests: str) -> float:
    return code_reward(f"```python\n{code}\n```", {"type": "asserts", "code": tests}, seconds=20)


FORMS = {
    "loop": """
for a,b,c in [(1,2,3),(4,5,9)]:
    assert add(a,b)==c
""",
    "pytest": """
def test_add():
    assert add(1,2)==3
def test_more():
    assert add(2,2)==4
""",
    "pytest import": """
from solution import add
def test_add():
    assert add(1,2)==3
""",
    "pytest import star": """
from solution import *
import pytest
@pytest.mark.parametrize('a,b,c',[(1,2,3),(2,5,7)])
def test_add(a,b,c):
    assert add(a,b)==pytest.approx(c)
""",
    "pytest class": """
class TestAdd:
    def test_a(self):
        assert add(1,2)==3
""",
    "unittest": """
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(add(1,2),3)
unittest.main()
""",
    "guard": """
import unittest
class T(unittest.TestCase):
    def setUp(self): self.x=1
    def test_a(self):
        self.assertEqual(add(self.x,2),3)
if __name__ == '__main__':
    unittest.main(argv=[''],exit=False)
""",
    "guard2": """
def check():
    assert add(1,2)==3
if __name__ == '__main__':
    check()
""",
    "while": """
i=0
while i<3:
    assert add(i,1)==i+1
    i+=1
""",
    "msg": """
assert add(1,2)==3, 'x'.nothing
""",
    "np": """
import numpy as np
np.testing.assert_allclose(add(1,2),3)
""",
    "try": """
try:
    assert add(1,2)==3
except ZeroDivisionError:
    pass
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    assert [reward(code, FORMS[form]) for code in (RIGHT, WRONG, EMPTY)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    code, tests, worth = PROGRAMS[name]
    assert reward(code, tests) == worth


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("x = 1", "nothing to count"),
        ("print(1)", "nothing to count"),
        ("def helper(): return 1", "nothing to count"),
        ("import unittest\nunittest.main()", "nothing to count"),
        ("'a text'", "nothing to count"),
        ("assert f(:", "not Python"),
        ("assert 1\0", "not Python"),
    ],
)
def test_tests_that_count_nothing_are_named(tests: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(RIGHT, tests)


def test_share_counts_tests_of_every_form() -> None:
    tests = "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(0, 0) == 0\nassert add(5, 0) == 5"
    got = code_reward(f"```python\n{WRONG}\n```", {"type": "asserts", "code": tests}, mode="share", seconds=20)
    assert got == 2 / 3
