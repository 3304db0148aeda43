"""Runs tests in a sandbox of their own, against a program in another, and counts the checks that passed.

Shipped compiled to the judge's process, together with the modules it imports.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from functools import partial, wraps

from delta_cli.rewards.code.checks import LIBRARY, MODULES, Instrument, ParsedTests, counts_as_call, top_calls
from delta_cli.rewards.code.pytest_stub import pytest_stub
from delta_cli.rewards.code.remote import Program, ProgramEndedError, RemoteObject
from delta_cli.rewards.code.startup import begin, take_stdout
from delta_cli.rewards.code.wire import MessageLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

    Check = tuple[Callable[[], bool], bool, bool]  # runs it; whether it counts if it asserts nothing; must assert

MODULE = "solution"  # the name that tests import the program by
LOOPS = (ast.For, ast.While, ast.With)
# Comparisons of numpy's that are true of an array without elements, whatever it is compared with.
BROADCASTING = ("allclose", "isclose", "array_equiv")
BROADCASTING_TESTS = ("assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "assert_array_equal")


def main(file: IO[bytes]) -> None:
    """Run the tests of the job in the file and write how many passed."""
    job = begin(file)
    out = take_stdout()
    passed, checks, failed = Judge(Program(MessageLink(job["link"])), ParsedTests(job["tests"])).run()
    out.write(f"{passed} {checks} {failed}")
    out.flush()


class FailedAssert(AssertionError):
    """An assert of the tests that did not hold."""


class Judge:
    """Runs tests statement by statement and counts."""

    def __init__(self, program: Program, tests: ParsedTests) -> None:
        self.program = program
        self.tests = tests
        self.reached = 0  # asserts that held
        self.used = False  # whether they use a global of the program, called or not
        self.hidden = False  # an except clause of the tests hid a failure
        self.alls = {True: 0, False: 0}  # how often ``all`` was asked about something, and about nothing at all

    def run(self) -> tuple[int, int, int]:
        """How many checks passed, how many there are, and how many checks and other statements failed."""
        passed = checks = failed = vacuous = 0
        try:
            for attempt, counts, must_assert in self.checks(self.namespace()):
                before, alls = self.reached, self.alls[False]
                self.hidden = self.program.broken = False
                good = attempt() and not self.hidden and not self.program.broken
                asserted = self.reached > before
                good = good and (asserted or not must_assert)
                is_check = asserted or not good or counts
                checks += is_check
                passed += is_check and good
                failed += not good
                vacuous += is_check and good and self.alls[False] > alls
        except ProgramEndedError:
            pass
        if self.program.gone or not (self.program.asked or self.used):
            return 0, checks + 1, 1
        return (passed, checks, failed) if self.alls[True] else (passed - vacuous, checks, failed + vacuous)

    # ------------------------------------------------------------------------------------ what the tests see

    def namespace(self) -> dict[str, Any]:
        """The program's globals, none of which replaces a module, a builtin, or a name that judges."""
        tests = self.tests
        sys.modules["pytest"] = pytest_stub(self.held)
        if tests.libraries & MODULES.keys():
            guard_numpy()
        if "unittest" in tests.libraries:
            self.prepare_unittest()
        ours = {name: __import__(MODULES.get(name, name)) for name in tests.modules}
        ours |= {name: getattr(__import__(LIBRARY[name]), name) for name in tests.library}
        about = tests.builtins if not tests.free and len(tests.builtins) == 1 else set()
        given = {
            name: value
            for name, value in self.program.names().items()
            if name[:2] != "__" and name not in ours and (name in about or not hasattr(builtins, name))
        }
        self.used = bool((tests.free | tests.from_solution) & given.keys())
        hidden = tests.imported if "*" in tests.from_solution else set()
        solution = types.ModuleType(MODULE)
        solution.__dict__.update({name: value for name, value in given.items() if name not in hidden})
        sys.modules[MODULE] = solution
        own = {"_held": self.held, "_swallowed": self.swallowed, "_all": self.all, "_noted": self.noted}
        own |= {"_made": made, "_zip": same_length_zip}
        return {**given, **ours, **own, "_FailedAssert": FailedAssert, "__name__": "__main__"}

    def held(self) -> None:
        """An assert held."""
        self.reached += 1

    def swallowed(self, expects_success: bool) -> None:
        """An except clause that hides whatever failed was entered."""
        self.hidden |= expects_success or isinstance(sys.exc_info()[1], FailedAssert)

    def all(self, values: Any) -> bool:
        """The builtin, which is true of nothing: a program that returns nothing would pass."""
        some, holds = False, True
        for value in values:
            some = True
            if not value:
                holds = False
                break
        self.alls[some] += 1
        return holds

    def noted(self, values: Any) -> Any:
        """What a method or function ``all`` of numpy's is asked about."""
        if isinstance(values, list | tuple) or type(values).__module__ == "numpy":
            self.alls[bool(getattr(values, "size", values))] += 1
        return values

    # --------------------------------------------------------------------------------------- finding checks

    def checks(self, namespace: dict[str, Any]) -> Iterator[Check]:
        """The statements of the tests, then their test functions and classes."""
        for statement in self.tests.tree.body:
            yield partial(self.execute, statement, namespace), *self.kind_of(statement)
        for name, value in list(namespace.items()):
            if isinstance(value, types.FunctionType) and name.startswith("test") and name not in self.tests.called:
                for test in _parametrized(value):
                    yield partial(_passes, test), True, name in self.tests.asserting
            elif isinstance(value, type) and value.__module__ == "__main__":
                for method, run in _methods(name, value):
                    yield run, True, method in self.tests.asserting

    def kind_of(self, statement: ast.stmt) -> tuple[bool, bool]:
        """Whether a statement counts as a check if it asserts nothing, and whether it must assert something."""
        asserts = self.tests.asserts(statement)
        if isinstance(statement, ast.Assert):
            return True, False
        if isinstance(statement, ast.Expr):
            return self.counts(statement), asserts
        if isinstance(statement, ast.Try):  # a failure that is expected may be caught
            return asserts or any(isinstance(node, ast.Raise) for node in ast.walk(statement)), False
        return False, asserts and isinstance(statement, LOOPS)

    def counts(self, statement: ast.Expr) -> bool:
        """Whether a call may check something. A call of the program does only if the tests assert nothing at all."""
        tests = self.tests
        functions = [call.func for call in top_calls(statement)]
        checkers = [function.id for function in functions if isinstance(function, ast.Name)]
        modules = {_owner(function) for function in functions} & (tests.imported | tests.modules)
        own = modules or tests.bound.intersection(checkers) or not tests.asserts(tests.tree)
        return counts_as_call(statement) and bool(own)

    def execute(self, statement: ast.stmt, namespace: dict[str, Any]) -> bool:
        module = ast.fix_missing_locations(ast.Module([Instrument(self.tests).visit(statement)], []))
        return _passes(lambda: exec(compile(module, "<tests>", "exec"), namespace))

    def prepare_unittest(self) -> None:
        """Asserts of a TestCase are seen, and ``unittest.main()`` does not run what is run here."""
        import unittest

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]
        for name in dir(unittest.TestCase):
            if name.startswith("assert"):
                setattr(unittest.TestCase, name, self.seen(getattr(unittest.TestCase, name)))

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def asserts(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            self.held()
            return result

        return asserts


def made(kind: Any, *arguments: Any, **keywords: Any) -> Any:
    """What the program makes of arguments: an object, or for a class under a builtin type the arguments themselves."""
    value, given = kind(*arguments, **keywords), (*arguments, *keywords.values())
    if type(value) is not RemoteObject and value != given and value not in given[:1]:
        raise TypeError("the program made something else of these arguments")
    return value


def same_length_zip(theirs: tuple[bool, ...], *values: Any, **keywords: Any) -> Iterator[Any]:
    """The builtin, which ends with the shortest: a program that returns too little would pass.

    ``theirs`` says which values are the program's.
    """
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for is_theirs, value in zip(theirs, values, strict=True):
        if isinstance(value, list | tuple | str | dict | set):
            sizes[is_theirs].append(len(value))
    if sizes[True] and sizes[False] and min(sizes[True]) < min(sizes[False]):
        raise AssertionError("the program returned fewer elements than the tests expect")
    return zip(*values, **keywords)  # noqa: B905 - as strict as the tests are


def guard_numpy() -> None:
    """Comparisons with an array without elements fail unless both have none."""
    import numpy
    import numpy.testing

    def guarded(compare: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compare)
        def checked(first: Any, second: Any, *arguments: Any, **keywords: Any) -> Any:
            first, second = numpy.asarray(first), numpy.asarray(second)  # once: the program's objects may change
            if (first.size == 0) != (second.size == 0):
                raise AssertionError("only one of two arrays is empty")
            return compare(first, second, *arguments, **keywords)

        return checked

    for module, names in ((numpy, BROADCASTING), (numpy.testing, BROADCASTING_TESTS)):
        for name in names:
            setattr(module, name, guarded(getattr(module, name)))


def _owner(function: ast.expr) -> str:
    """The name that an attribute is of, as np in np.testing.assert_allclose."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _passes(test: Callable[[], object]) -> bool:
    try:
        test()
    except ProgramEndedError:
        raise
    except BaseException:  # whatever ends a test, SystemExit too, is a failure of that test
        return False
    return True


def _methods(name: str, kind: type) -> Iterator[tuple[str, Callable[[], bool]]]:
    """The tests of a TestCase, or of a class that pytest would collect."""
    unittest = sys.modules.get("unittest")
    tests = [each for each in dir(kind) if each.startswith("test")]
    if unittest is not None and issubclass(kind, unittest.TestCase):
        for each in tests:
            yield each, partial(_succeeds, unittest.TestSuite([kind(each)]), unittest.TestResult())
    elif name.startswith("Test"):
        for each in tests:
            for test in _parametrized(getattr(kind(), each)):
                yield each, partial(_passes, test)


def _succeeds(suite: Any, result: Any) -> bool:
    suite.run(result)
    return bool(result.wasSuccessful() and not result.skipped)


def _parametrized(function: Any) -> list[Callable[[], object]]:
    """The calls that ``pytest.mark.parametrize`` asks for; one without arguments if it asks for none."""
    return [partial(function, **row) for row in getattr(function, "_rows", [{}])]
