"""Ways to pass tests without being checked by them, which earn nothing, and unusual tests, which still work."""

from __future__ import annotations

import pytest

from delta_cli.rewards import code_reward

pytestmark = pytest.mark.usefixtures("sandbox")


def reward(code: str, tests: str) -> float:
    return code_reward(f"```python\n{code}\n```", {"type": "asserts", "code": tests}, seconds=20)


NOTHING, ZERO = "def f(*_): return []", "def f(*_): raise ZeroDivisionError"
EXPECTED = "EXPECTED = [(1, 2), (3, 4)]\n"
# Name: tests that a program could pass without being right, a right program, and one that returns or raises too little.
EVASIONS: dict[str, tuple[str, str, str]] = {
    "a loop over nothing": (
        f"{EXPECTED}for a, b in zip(f(), EXPECTED):\n    assert a == b",
        "def f(): return [(1, 2), (3, 4)]",
        NOTHING,
    ),
    "a test function over nothing": (
        f"{EXPECTED}def test():\n    for a, b in zip(f(), EXPECTED):\n        assert a == b",
        "def f(): return [(1, 2), (3, 4)]",
        NOTHING,
    ),
    "a helper over nothing": (
        "def same(a, b):\n    for x, y in zip(a, b):\n        assert x == y\nsame(f(), [1, 2])",
        "def f(): return [1, 2]",
        NOTHING,
    ),
    "a loop over too little": (
        f"{EXPECTED}for a, b in zip(f(), EXPECTED):\n    assert a == b",
        "def f(): return [(1, 2), (3, 4)]",
        "def f(): return [(1, 2)]",
    ),
    "a variable that holds too little": (
        "found = sorted(f(3))\nassert all(a == b for a, b in zip(found, [1, 2, 3]))",
        "def f(n): return list(range(1, n + 1))",
        "def f(n): return [1]",
    ),
    "all of nothing": ("assert all(a == b for a, b in zip(f(), [1, 2]))", "def f(): return [1, 2]", NOTHING),
    "an array of nothing": (
        "import numpy as np\nassert np.allclose(f(2), 0.5)\nnp.testing.assert_allclose(f(4), 0.25)",
        "def f(x): return 1 / x",
        NOTHING,
    ),
    "an infinite tolerance": (
        "import pytest\nassert 0.5 == pytest.approx(f(2))",
        "def f(x): return 1 / x",
        "def f(x): return float('inf')",
    ),
    "an except that hides": ("try:\n    assert f(1) == 2\nexcept Exception:\n    pass", "def f(x): return 2", ZERO),
    "an except that prints": ("try:\n    assert f(1) == 2\nexcept:\n    print('no')", "def f(x): return 2", NOTHING),
    "a module before a star": (
        "import math\nfrom solution import *\nassert math.isclose(f(1), 2.5)",
        "def f(x): return 2.5",
        "class math: isclose = staticmethod(lambda *_: True)\ndef f(x): return 7",
    ),
    "a difference of its own": (
        "assert abs(f(1) - 2) < 1e-6",
        "def f(x): return 2",
        "class A: __sub__ = lambda *_: 0\nf = lambda x: A()",
    ),
    "no program at all": ("assert sorted([3, 1]) == [1, 3]", "def sorted(x): return [*min(x, x)[::-1]]", "pass"),
    "a class that is none": (
        "assert f(2) == P(2, 2)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\ndef f(x): return P(x, x)",
        "P = f = lambda *_: 0",
    ),
    "records of one's own": (
        "assert f(2) == P(2, 2)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\ndef f(x): return P(x, x)",
        "from dataclasses import dataclass\n@dataclass\nclass R: pass\nP = f = lambda *_: R()",
    ),
}


@pytest.mark.parametrize("name", EVASIONS)
def test_what_checks_nothing_is_not_passed(name: str) -> None:
    tests, right, wrong = EVASIONS[name]
    assert [reward(right, tests), reward(wrong, tests)] == [1.0, 0.0]


# Name: tests that are passed although they catch, change or hand over more than most.
ALLOWED: dict[str, tuple[str, str]] = {
    "an alternative in an except": (
        "def f(): return [2, 1]",
        "try:\n    assert f() == [1, 2]\nexcept AssertionError:\n    assert f() == [2, 1]",
    ),
    "an expected exception": (
        "def f(x): raise ValueError",
        "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",
    ),
    "the first of many": ("def f(): return [1, 2, 3]", "for a, b in zip(f(), [1, 2]):\n    assert a == b"),
    "neighbours": ("def f(): return [1, 2, 3]", "x = f()\nassert all(a < b for a, b in zip(x, x[1:]))"),
    "an endless generator": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "for a, b in zip(f(), [0, 1, 2]):\n    assert a == b",
    ),
    "a builtin type": (
        "def f(xs, kind): return [x for x in xs if isinstance(x, kind)]",
        "assert f([1, 'a'], int) == [1]",
    ),
    "an attribute that the test sets": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
        "def values(n): return [n.v, *(values(n.next) if n.next else [])]",
        "a, b = Node(1), Node(2)\na.next = b\nassert values(a) == [1, 2]",
    ),
    "the text of an object": ("class A:\n    def __str__(self): return 'a'", "assert str(A()) == 'a'"),
    "the message of a KeyError": (
        "def f(): raise KeyError('x')",
        "import pytest\nwith pytest.raises(KeyError, match=\"^'x'$\"):\n    f()",
    ),
    "a callback that calls the program": (
        "def twice(x): return 2 * x\ndef apply(g, x): return g(x)",
        "assert apply(lambda x: twice(x) + 1, 3) == 7",
    ),
    "the fixture of a class": (
        "def f(x): return x",
        "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.x = 3\n"
        "    def test(self): self.assertEqual(f(self.x), 3)",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_unusual_is_passed(name: str) -> None:
    assert reward(*ALLOWED[name]) == 1.0


def test_all_of_nothing_counts_beside_an_all_of_something() -> None:
    """The first test is right for a program that returns nothing for 0; alone it would check nothing."""
    tests = "assert all(x > 0 for x in f(0))\nassert all(x > 0 for x in f(3))\nassert f(2) == [1, 2]"
    programs = "def f(n): return list(range(1, n + 1))", "def f(n): return [5] if n == 3 else []"
    shares = [
        code_reward(f"```python\n{each}\n```", {"type": "asserts", "code": tests}, mode="share", seconds=20)
        for each in (*programs, NOTHING)
    ]
    assert shares == [1.0, 2 / 3, 0.0]
