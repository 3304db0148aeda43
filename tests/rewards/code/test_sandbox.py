"""Programs are rewarded for passing their tests, in each of the three forms."""

from __future__ import annotations

import time
from typing import Any

import pytest

from delta_cli.errors import UserError
from delta_cli.rewards import code_reward
from delta_cli.rewards.code.verdict import code_blocks

pytestmark = pytest.mark.usefixtures("sandbox")


def asserts(code: str) -> dict[str, Any]:
    return {"type": "asserts", "code": code}


def calls(name: str, *cases: tuple[list[Any], Any]) -> dict[str, Any]:
    return {"type": "calls", "entry_point": name, "cases": [{"args": a, "expected": e} for a, e in cases]}


def stdio(*cases: tuple[str, str]) -> dict[str, Any]:
    return {"type": "stdio", "cases": [{"input": i, "output": o} for i, o in cases]}


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


STACK = """
import math
from typing import List
LIMIT = 3
class Stack:
    def __init__(self, items: List[int] = ()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def counter():
    n = 0
    def add(by=1):
        nonlocal n
        n += by
        return n
    return add
def evens(n):
    yield from range(0, n, 2)
def sort_in_place(items): items.sort()
def invert(mapping): return {v: k for k, v in mapping.items()}
def root(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
"""

STACK_TESTS = """
s = Stack([1, 2])
s.push(3)
assert s.pop() == 3 and len(s) == 2 and list(s) == [1, 2]
assert LIMIT == 3 and math.isclose(root(2), 1.41421356, rel_tol=1e-6)
add = counter()
add()
assert add(by=2) == 3
assert list(evens(5)) == [0, 2, 4]
items = [3, 1, 2]
sort_in_place(items)
assert items == [1, 2, 3]
assert invert({"a": (1, 2), "b": frozenset({3})}) == {(1, 2): "a", frozenset({3}): "b"}
def raises():
    try:
        root(-1)
    except ValueError as error:
        return str(error)
assert raises() == "negative"
"""


@pytest.mark.parametrize(
    ("code", "tests", "reward"),
    [
        ("def f(x): return x + 1", asserts("assert f(1) == 2\nassert f(-1) == 0"), 1.0),
        ("def f(x): return x + 1", asserts("assert f(1) == 2\nassert f(-1) == 1"), 0.0),
        ("def f(x): return x + 1", asserts("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"), 1.0),
        ("def f(x): return x", asserts("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"), 0.0),
        ("def g(x): return x", asserts("assert f(1) == 1"), 0.0),
        ("def f(x: return x", asserts("assert f(1) == 1"), 0.0),
        (STACK, asserts(STACK_TESTS), 1.0),
        ("def f(n): return 7 ** n", asserts("assert f(9000) == 7 ** 9000"), 1.0),
        ("print(int(input()) + int(input()))", stdio(("1\n2\n", "3\n"), ("5\n6", "11")), 1.0),
        ("print(int(input()) + 1)", stdio(("1", "2"), ("5", "5")), 0.0),
        ("if __name__ == '__main__':\n    print('yes ')\n    print()", stdio(("", "yes")), 1.0),
        ("print('yes')\nraise SystemExit(1)", stdio(("", "yes")), 0.0),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1).x)", stdio(("", "1")), 1.0),
        ("import threading\nthreading.Thread(target=lambda: print('in')).start()", stdio(("", "in")), 1.0),
        ("open('a.txt', 'w').write('hi')\nprint(open('a.txt').read())", stdio(("", "hi")), 1.0),
        ("import numpy as np\ndef f(x): return np.ones(x).sum()", calls("f", ([3], 3.0)), 1.0),
        (
            "import numpy as np\ndef f(x): return np.arange(x)",
            asserts("assert f(3) == [0, 1, 2] and f(3)[1] == 1"),
            1.0,
        ),
        ("def f(x): return x / 3", asserts("import numpy as np\nassert np.allclose(f(1), 1 / 3)"), 1.0),
        ("def f(a, b): return (a, {b: 0.1 + 0.2})", calls("f", ([1, "k"], [1, {"k": 0.3}])), 1.0),
        ("def f(a): return not a", calls("f", ([0], True), ([1], False)), 1.0),
        ("def f(a): return a", calls("f", ([1], True)), 0.0),
        ("def f(a): return [a]", calls("f", ([1], [1]), ([2], [3])), 0.0),
        ("def f(a): return iter([a])", calls("f", ([1], [1])), 0.0),
        ("def f(a): return float(a)", calls("f", ([1000000006], 1000000006)), 1.0),
        ("def f(a): return a + 1.0", calls("f", ([1000000006], 1000000006)), 0.0),
        ("def f(a): return a + 0.9", calls("f", ([1000000006], 1000000006)), 0.0),
        ("def f(a): return a + 1", calls("f", ([1000000006], 1000000006.0)), 1.0),
        ("def f(a): return 10 ** a", calls("f", ([4000], 10**4000)), 1.0),
        ("def f(a): return float('nan')", calls("f", ([1], 1.0)), 0.0),
        ("def f(a): return float('inf')", calls("f", ([1], 1)), 0.0),
        ("def f(a): return None", calls("f", ([1], None)), 1.0),
        ("def f(a): return {1: (2,)}", calls("f", ([1], {"1": [2]})), 1.0),
        ("def f(a): return '1'", calls("f", ([1], 1)), 0.0),
        ("def f(a): return {1, 2}", calls("f", ([1], [1, 2])), 0.0),
    ],
)
def test_reward(code: str, tests: dict[str, Any], reward: float) -> None:
    assert code_reward(fenced(code), tests) == reward


def test_share_of_tests_passed() -> None:
    double = fenced("def f(x): return 2 * x\nif __name__ == '__main__': print(f(int(input())))")
    assert code_reward(double, asserts("assert f(1) == 2\nassert f(2) == 4\nassert f(3) == 5"), mode="share") == 2 / 3
    assert code_reward(double, calls("f", ([1], 2), ([2], 5)), mode="share") == 1 / 2
    assert code_reward(double, stdio(("1", "3"), ("2", "4"), ("3", "6"), ("4", "8")), mode="share") == 3 / 4
    assert code_reward("no code", calls("f", ([1], 2)), mode="share") == 0.0


@pytest.mark.parametrize(
    ("response", "blocks"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```", ["a\n", "b\n"]),
        ("```\na\n```\n```text\nb\n```", ["a\n"]),
        ("````python\n```\na\n```\n````", ["```\na\n```\n"]),
        ("```python\na\n```\n```python\nb", []),
        ("no code", []),
    ],
)
def test_code_blocks(response: str, blocks: list[str]) -> None:
    assert code_blocks(response) == blocks


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({}, "need a 'type'"),
        ({"type": "asserts"}, "need a 'code'"),
        ({"type": "stdio", "cases": []}, "need a 'cases'"),
        ({"type": "calls", "entry_point": "f", "cases": [{"args": [1]}]}, "has no 'expected'"),
    ],
)
def test_malformed_tests_are_named(tests: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        code_reward("```python\npass\n```", tests)


def test_the_method_of_a_class_is_called_on_a_new_object() -> None:
    """LiveCodeBench's starter code expects that."""
    tests = calls("Solution.add", ([1, [2, 3]], 6), ([4, []], 4))
    right = "class Solution:\n    def add(self, a, b):\n        return a + sum(b)"
    assert code_reward(fenced(right), tests) == 1.0
    assert code_reward(fenced(right.replace("sum(b)", "1")), tests) == 0.0
    assert code_reward(fenced("def add(a, b):\n    return a + sum(b)"), tests) == 0.0


@pytest.mark.parametrize("text", ["1e30000000", "9" * 10**6, "1" + "0" * 4300])
@pytest.mark.parametrize("name", ["fractions.Fraction", "decimal.Decimal", "builtins.int"])
def test_a_text_of_the_program_is_not_read_as_a_number(name: str, text: str) -> None:
    """A class may call itself what it likes: reading these would take minutes, outside the sandbox."""
    module, _, kind = name.partition(".")
    code = f"""
class Pretender:
    __module__ = {module!r}
    __str__ = __repr__ = lambda self: {text[:10]!r} + {len(text)} * "0"
    numerator = denominator = property(__str__)
Pretender.__name__ = {kind!r}
def f(x): return Pretender()
"""
    started = time.monotonic()
    assert code_reward(fenced(code), calls("f", ([1], 1.5), ([2], 10**4300))) == 0.0
    assert code_reward(fenced(code), asserts("assert f(1) == 1.5")) == 0.0
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "line",
    [
        '{"value": ' + "[" * 10**5,
        '{"value": ' + "9" * 10**5 + "}",
        '{"value": 1e999999999}',
        '{"value": {"Fraction": "1e30000000"}}',
        '{"value": {"int": "0x55"}}',
        "[]",
        "\xff",
        '{"value": true}',
    ],
)
def test_forged_results_of_calls_are_wrong_and_read_quickly(line: str) -> None:
    code = f"import os\nos.write(1, ({line!r} + chr(10)).encode('latin-1') * 9)\ndef f(x): return 7"
    taken = "import os\nfor n in range(1, 9):\n    try: os.write(n, ({line!r} + chr(10)).encode('latin-1'))\n"
    taken += "    except OSError: pass\ndef f(x): return 7"
    started = time.monotonic()
    for each in (code, taken.replace("{line!r}", repr(line))):
        assert code_reward(fenced(each), calls("f", ([1], 85), ([2], 86)), mode="share") == 0.0
    assert time.monotonic() - started < 5
