"""Answers that a program could forge, and the tests that none of them may pass.

``python -m tests.rewards.code.forged SEED COUNT STRIDE`` runs the judge in this process against a
program that answers anything: each of ``REPLIES`` in every STRIDE-th test, and COUNT random ones. It
prints what passed, with the number that makes the same answers again. It is a process of its own
because the judge changes unittest and pytest.
"""

from __future__ import annotations

import ast
import itertools
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from delta_cli.rewards.code.checks import ParsedTests
from delta_cli.rewards.code.judge import Judge
from delta_cli.rewards.code.remote import Program
from delta_cli.rewards.code.wire import MessageLink

SECRET = 987654321012345  # the expected answer, which no forged one is
MAX_MESSAGES = 200
RUN_SECONDS = 10.0  # of processor time for one test, after which the kernel ends this process

# Every check a test could make of one number. None of them passes unless f(3) is SECRET.
NUMBER = f"""
import collections, json, math, operator
import numpy as np
import pytest
S = {SECRET}
assert f(3) == S
assert S == f(3)
assert not f(3) != S
assert S <= f(3) <= S
assert abs(f(3) - S) < 1e-6
assert f(3) - S == 0
assert not (f(3) - S)
assert f(3) in (S, S + 1)
assert S in [f(3)]
assert {{f(3)}} == {{S}}
assert [f(3)] == [S]
assert (f(3),) == (S,)
assert {{"a": f(3)}} == {{"a": S}}
assert [f(3)].count(S) == 1
assert [f(3)].index(S) == 0
assert {{S: 1}}[f(3)] == 1
assert str(f(3)) == str(S)
assert repr(f(3)) == repr(S)
assert f"{{f(3)}}" == str(S)
assert "%d" % f(3) == str(S)
assert json.dumps(f(3)) == str(S)
assert hash(f(3)) == hash(S)
assert int(f(3)) == S
assert float(f(3)) == float(S)
assert round(f(3)) == S
assert f(3).__eq__(S) is True
assert S.__eq__(f(3)) is True
assert operator.eq(f(3), S)
assert [*map(max, [f(3)] * 2, (S, 0))] == [S, S]
assert sorted([f(3)]) == [S]
assert sum([f(3)]) == S
assert collections.Counter([f(3)]) == collections.Counter([S])
assert math.isclose(f(3), S)
assert f(3) == pytest.approx(S)
assert S == pytest.approx(f(3))
assert [S] == pytest.approx([f(3)])
assert np.allclose(f(3), S)
assert np.isclose(f(3), S)
assert np.array_equal([f(3)], [S])
assert np.array(f(3)) == S
np.testing.assert_allclose(f(3), S)
np.testing.assert_array_equal(f(3), S)
np.testing.assert_almost_equal(f(3), S)
np.testing.assert_equal(f(3), S)
assert all(x == S for x in [f(3)])
assert any(x == S for x in [f(3)])
for x in [f(3)]:
    assert x == S
try:
    assert f(3) == S
except Exception:
    repr("wrong")
try:
    assert f(3) == S
except:
    pass
def check(candidate):
    for x, y in zip((3, 4), (S, S + 1)):
        assert candidate(x) == y
check(f)
def test_f():
    assert f(3) == S
@pytest.mark.parametrize("x,y", [(3, S), (4, S + 1)])
def test_rows(x, y):
    assert f(x) == y
class TestF:
    def test_f(self):
        assert f(3) == S
"""
UNITTEST = f"""
import unittest
S = {SECRET}
class T(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(f(3), S)
    def test_almost(self):
        self.assertAlmostEqual(f(3), S)
    def test_delta(self):
        self.assertAlmostEqual(f(3), S, delta=0.1)
    def test_in(self):
        self.assertIn(S, [f(3)])
    def test_count(self):
        self.assertCountEqual([f(3)], [S])
    def test_true(self):
        self.assertTrue(f(3) == S)
    def test_list(self):
        self.assertListEqual([f(3)], [S])
    def test_between(self):
        y = f(3)  # once: a program may answer differently each time
        self.assertLessEqual(y, S)
        self.assertGreaterEqual(y, S)
"""
LIST = f"""
import numpy as np
S = {SECRET}
assert f([3, 4]) == [S, S + 1]
assert list(f([3, 4])) == [S, S + 1]
assert sorted(f([3, 4])) == [S, S + 1]
assert set(f([3, 4])) == {{S, S + 1}}
assert tuple(f([3, 4])) == (S, S + 1)
assert np.allclose(f([3, 4]), [S, S + 1])
assert np.array_equal(f([3, 4]), [S, S + 1])
np.testing.assert_allclose(f([3, 4]), [S, S + 1])
for a, b in zip(f([3, 4]), [S, S + 1]):
    assert a == b
for a in f([3, 4]):
    assert a in (S, S + 1)
def test_loop():
    for a, b in zip(f([3, 4]), [S, S + 1]):
        assert a == b
def compare(a, b):
    for x, y in zip(a, b):
        assert x == y
compare(f([3, 4]), [S, S + 1])
assert len(f([3, 4])) == 2 and f([3, 4])[0] == S
assert dict(enumerate(f([3, 4]))) == {{0: S, 1: S + 1}}
assert f([3, 4]).index(S) == 0 and f([3, 4]) == [S, S + 1]
"""
ALL = f"""
S = {SECRET}
assert all(a == b for a, b in zip(f([3, 4]), [S, S + 1]))
assert all(x in (S, S + 1) for x in f([3, 4]))
"""
ARRAY = f"""
import numpy as np
S = {SECRET}
assert (np.array([f(3)]) == np.array([S])).all()
assert np.all(np.array(f([3, 4])) == np.array([S, S + 1]))
"""
RECORD = f"""
S = {SECRET}
assert f(3) == P(S, 3)
assert f(4) == P(x=S + 1, y=4)
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(f(3), P(S, 3))
"""
STAR = f"""
import math
import pytest
from solution import *
assert math.isclose(f(3), {SECRET})
assert f(4) == pytest.approx({SECRET + 1})
"""
FREE = f"""
assert isclose(f(3), {SECRET})
assert allclose([f(3)], [{SECRET}])
assert math.isclose(f(3), {SECRET})
assert np.allclose(f(3), {SECRET})
assert deepcopy([f(3)]) == [{SECRET}]
assert Counter([f(3)]) == Counter([{SECRET}])
"""
CALLBACK = f"""
seen = []
apply(seen.append, {SECRET})
assert seen == [{SECRET} * 7]
assert apply(lambda v: v * {SECRET}, 3) == {SECRET} * 21
"""
BATTERIES = {"number": NUMBER, "unittest": UNITTEST, "list": LIST, "all": ALL, "array": ARRAY, "record": RECORD}
BATTERIES |= {"star": STAR, "free": FREE, "callback": CALLBACK, "builtin": "assert sorted([3, 1, 2]) == [1, 2, 3]"}
# A program that passes all of them.
RIGHT = f"""
import math
import numpy as np
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from math import isclose
allclose = np.allclose
@dataclass
class P:
    x: int
    y: int
class Number(int): pass
def f(x): return [{SECRET} - 3 + y for y in x] if isinstance(x, list) else {SECRET} - 3 + x
def apply(g, x): return g(x * 7)
def sorted(items): return [*map(int, "123")]
"""
RIGHT_RECORD = f"{RIGHT}\ndef f(x): return P({SECRET} - 3 + x, x)\n"

NAMES = ["P", "ANY", "ValueError", "AssertionError", "SkipTest", "StopIteration", "SystemExit", "GoneError", "object"]
NAMES += ["FailedAssert", "ZeroDivisionError", "TypeError", "BaseException", "X", "", "int", "mock", "__class__"]


def raised(name: str, *bases: str, number: Any = None) -> dict[str, Any]:
    return {"raise": name, "bases": list(bases), "values": [], "message": "", "number": number}


REPLIES: dict[str, Any] = {
    "an object of a module": {"value": {"from": "unittest.mock", "name": "ANY"}},
    "a module": {"value": {"module": "unittest.mock"}},
    "an exception that is none": {"value": {"exception": "ANY", "bases": ["object"]}},
    "an exception class": {"value": {"exception": "ValueError", "bases": []}},
    "a record without fields": {"value": {"object": 0, "record": "P", "fields": []}},
    "a record for a field": {"value": {"object": 0, "record": "P", "fields": [["x", {"object": 0, "record": "int"}]]}},
    "a class": {"value": {"object": 0, "class": "P", "fields": ["x"]}},
    "a callback": {"value": {"callback": 0}},
    "a fraction of text": {"value": {"Fraction": "1e30000000"}},
    "a fraction by zero": {"value": {"Fraction": [0, 0]}},
    "a decimal of text": {"value": {"Decimal": "1e99999999"}},
    "a decimal without end": {"value": {"Decimal": [0, "1", 10**18 - 1]}},
    "a decimal that is no number": {"value": {"Decimal": [0, "", "n"]}},
    "a decimal that signals": {"value": {"Decimal": [0, "", "N"]}},
    "an infinite decimal": {"value": {"Decimal": [0, "", "F"]}},
    "a complex number of text": {"value": {"complex": ["1", "2"]}},
    "a complex number that is none": {"value": {"complex": [float("nan"), float("nan")]}},
    "a set of lists": {"value": {"set": [[1]]}},
    "a dictionary of dictionaries": {"value": {"dict": [[{"dict": []}, 1]]}},
    "a skipped test": raised("SkipTest", "SkipTest", "Exception"),
    "the end of an iteration": raised("StopIteration"),
    "the end of the judge": raised("SystemExit", "BaseException"),
    "the judge's own exception": raised("FailedAssert", "AssertionError"),
    "an exception of the tests": raised("X", number=0),
    "an exception with other arguments": raised("UnicodeDecodeError"),
    "nothing": {},
    "callbacks without end": {"callback": 0, "arguments": [], "keywords": {"dict": []}},
    "the last callback": {"callback": -1, "arguments": [], "keywords": {"dict": []}},
    "infinity": {"value": float("inf")},
    "not a number": {"value": float("nan")},
    "true": {"value": True},
    "changed arguments": {"value": None, "arguments": [3]},
    "no arguments": {"value": None, "arguments": []},
    "a negative object": {"value": {"object": -1}},
    "an object of true": {"value": {"object": True}},
    "an object beyond all": {"value": {"object": 10**400}},
    "a tuple of nothing": {"value": {"tuple": 3}},
    "an empty deque": {"value": {"deque": []}},
    "bytes that are none": {"value": {"bytes": "zz"}},
    "a large integer": {"value": {"int": "0x" + "f" * 10**5}},
    "an empty tag": {"value": {}},
    "half a character": {"value": "\ud800"},
}


def random_value(rng: random.Random, depth: int = 0) -> Any:
    def inner() -> Any:
        return random_value(rng, depth + 1)

    def several(count: int) -> list[Any]:
        return [inner() for _ in range(rng.randrange(count))]

    def record() -> Any:
        names = rng.choice([["x", "y"], ["x"], [], ["x", "x"], ["y", "x", "z"]])
        return {"object": 0, "record": rng.choice("PQ"), "fields": [[name, inner()] for name in names]}

    def number_of_parts() -> Any:
        sign, digits = rng.choice([0, 1, 2, "0", True]), rng.choice(["", "9", "0", "x", "12"])
        return {"Decimal": [sign, digits, rng.choice([0, 5, -3, "F", "n", "N", "Z", 10**18, True])]}

    leaves: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice([0, 1, -1, 7, 2**62, 10**30, -(10**5)]),
        lambda: rng.choice([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e308, 1e-9]),
        lambda: rng.choice(["", "x", "7", "True", "\ud800", "1e999"]),
        lambda: {"object": rng.choice([0, 1, -1, True, 10**30, "0"])},
        lambda: {rng.choice(["from", "module", "name", "int", "bytes", "callback", "builtin", ""]): rng.choice(NAMES)},
        lambda: {"exception": rng.choice(NAMES), "bases": [rng.choice(NAMES)]},
        lambda: {"int": rng.choice(["0x10", "zz", "-0xffffffffffffffffffff"])},
        lambda: {"object": 0, "class": "P", "fields": rng.choice([["x", "y"], ["x"], [], ["x", "x", "y"], ["y", "x"]])},
    ]
    nested: list[Callable[[], Any]] = [
        lambda: several(4),
        lambda: {"dict": [[inner(), inner()] for _ in range(rng.randrange(3))]},
        lambda: {rng.choice(["tuple", "set", "frozenset", "deque", "list"]): several(3)},
        record,
        record,
        lambda: {"Fraction": [inner(), inner()]},
        number_of_parts,
        lambda: {"complex": [inner(), inner()]},
    ]
    return rng.choice(leaves + (nested if depth < 3 else []))()


def random_reply(rng: random.Random) -> Any:
    kind = rng.randrange(12)
    if kind < 8:
        value = random_value(rng)
        after = [random_value(rng) for _ in range(rng.randrange(3))] if value is None else random_value(rng)
        return {"value": value} | ({"arguments": after} if value is None or kind < 2 else {})
    if kind < 10:
        numbers = [None, 0, 1, -1, True]
        names = [rng.choice(NAMES) for _ in range(rng.randrange(3))]
        return raised(rng.choice(NAMES), *names, number=rng.choice(numbers)) | {"message": rng.choice(NAMES)}
    if kind == 10:
        arguments = [random_value(rng) for _ in range(rng.randrange(3))]
        return {"callback": rng.choice([0, 1, -1, True]), "arguments": arguments, "keywords": {"dict": []}}
    return rng.choice([{}, {"value": None}, {"raise": 3}, {"names": {}}])


class ForgedLink(MessageLink):
    """A program that defines every name that the batteries use and answers as it is told."""

    def __init__(self, rng: random.Random, answer: Callable[[], Any]) -> None:
        self.rng, self.answer, self.count = rng, answer, 0

    def send(self, message: Any) -> None:
        pass

    def receive(self) -> Any:
        self.count += 1
        if self.count > MAX_MESSAGES:
            raise EOFError
        if self.count > 1:
            return self.answer()
        kinds = [{"object": 0}, {"object": 0, "class": "P", "fields": ["x", "y"]}, 7, True, "x"]
        names = ("P", "apply", "isclose", "allclose", "sorted", "Counter", "deepcopy", "_held", "_all", "math")
        return {"names": {"f": self.rng.choice(kinds[:2])} | {name: self.rng.choice(kinds) for name in names}}


def single_tests(names: Iterable[str] = BATTERIES) -> list[str]:
    """Batteries, taken apart into tests of one check each."""
    found = []
    for name in names:
        body = ast.parse(BATTERIES[name]).body
        setup = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef)]
        helpers = [node for node in setup if not getattr(node, "name", "").startswith("test")]
        for node in body:
            if node in helpers or (isinstance(node, ast.Expr) and ast.unparse(node).startswith("apply(")):
                continue
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            for part in parts:
                check = ast.ClassDef(node.name, node.bases, [], [part], []) if isinstance(node, ast.ClassDef) else part
                found.append(ast.unparse(ast.fix_missing_locations(ast.Module([*helpers, check], []))))
    return found


def earned(test: str, seed: int, answer: Callable[[random.Random], Any]) -> bool:
    """Whether a program with these answers has full reward."""
    rng = random.Random(seed)
    signal.setitimer(signal.ITIMER_PROF, RUN_SECONDS)
    passed, checks, failed = Judge(Program(ForgedLink(rng, lambda: answer(rng))), ParsedTests(test)).run()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return passed - bool(failed) >= max(checks, 1)


def main(seed: int, count: int, stride: int) -> Iterator[str]:
    """How often the right answer earns the reward, and then whatever else does."""
    tests = single_tests()
    simple = [test for test in single_tests(["number"]) if test.splitlines()[-1].startswith("assert ")]
    right = sum(earned(test, 0, lambda _: {"value": SECRET}) for test in simple)
    yield f"the right answer: {right} of {len(simple)}"
    for (name, reply), test in itertools.islice(itertools.product(REPLIES.items(), tests), seed % stride, None, stride):
        if earned(test, 0, lambda _, reply=reply: reply):  # type: ignore[misc]
            yield f"{name}: {test.splitlines()[-1]}"
    for number in range(seed, seed + count):
        if earned(random.Random(number).choice(tests), number, random_reply):
            yield f"random answer {number}: {random.Random(number).choice(tests).splitlines()[-1]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(*main(*map(int, sys.argv[1:])), sep="\n")
