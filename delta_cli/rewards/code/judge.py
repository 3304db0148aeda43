"""The judge's side of a test run: the tests, in a sandbox of their own, against a program in another.

Handed compiled to the judge's process, together with ``guest``. What counts as a check: an assert or
a call at the top level; a loop, a branch or a block at the top level in which an assert was reached;
a function ``test…`` that is not called, as pytest finds it; a method ``test…`` of a
``unittest.TestCase`` or a class ``Test…``.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from functools import partial

from delta_cli.rewards.code.guest import NAME, Link, bases, decode, encode, refuse, take_stdout
from delta_cli.rewards.code.pytest_stub import pytest_stub

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Json = Any
CHANGEABLE = (list, dict, set, bytearray)
ITERATION = ("StopIteration", "StopAsyncIteration", "GeneratorExit")  # what ends a loop instead of failing it
MODULES = {"np": "numpy", "numpy": "numpy"}
# Names that judge, which a program may not define for the tests: taken from here where the tests do not import them.
JUDGES = {"isclose": "math", "isnan": "math", "deepcopy": "copy", "Counter": "collections", "allclose": "numpy"}
JUDGES |= {"array_equal": "numpy", "approx": "pytest", "raises": "pytest"}
NO_CHECKS = ("print", "unittest.main", "pytest.main", "main", "exit", "sys.exit", "len", "range", "list", "set", "dict")
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)


class GoneError(BaseException):
    """The program's process has ended: no test can catch that."""


class StandIn:
    """An object of the program, seen from the judge: it can be called and asked.

    It is never compared, but for data classes: those are equal when their fields are, and the fields
    of one that a test makes are what the test gave.
    """

    def __init__(self, judge: Judge, number: int, record: Any = None, fields: Any = None) -> None:
        self.__dict__.update(_judge=judge, _number=number, _record=record, _fields=fields)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        made = self._judge.call(self._number, arguments, keywords)
        if self._fields is not None and type(made) is StandIn:
            made.__dict__["_record"] = _filled(self._fields, made._record, arguments, keywords)
        return made

    def __getattr__(self, name: str) -> Any:
        return self._judge.ask({"object": self._number, "attribute": name})[0]

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError as error:  # which list() takes for a failure, not for an object without a length
            raise TypeError(str(error)) from None

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __iter__(self) -> Any:
        return self.__getattr__("__iter__")()

    def __next__(self) -> Any:
        method = self.__getattr__("__next__")
        return self._judge.call(method._number, (), {}, ends=True)

    def __eq__(self, other: Any) -> Any:
        if type(other) is not StandIn or self._record is None or other._record is None:
            return self._no()
        return self._record == other._record

    def __ne__(self, other: Any) -> Any:
        return not self == other

    def _no(self, *_: Any) -> Any:
        raise TypeError("an object of the program cannot stand for a truth value or be compared")

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _no
    __hash__ = None  # type: ignore[assignment]


def _filled(fields: list[str], record: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The record of a data class that a test made: the fields it gave, and the program's defaults for the others."""
    given = dict(zip(fields, arguments, strict=False)) | keywords
    if record is None or len(arguments) > len(fields) or not given.keys() <= set(fields):
        return None  # a constructor of its own: what it does with the arguments is not known
    return record[0], {**record[1], **given}


class Judge:
    """Runs tests statement by statement against a program in another process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.callbacks: list[Callable[..., Any]] = []
        self.raised: list[BaseException] = []  # by the tests' own callbacks
        self.kinds: dict[str, type[Exception]] = {}  # the program's exceptions, by name
        self.reached = 0  # asserts that held
        self.broken = False  # an assert failed where the program could hide it

    # ------------------------------------------------------------------------------ talking to the program

    def receive(self) -> Json:
        try:
            return self.link.receive()
        except (EOFError, OSError, ValueError) as error:
            raise GoneError(str(error)) from None

    def find(self, data: Json) -> Any:
        if "exception" in data:
            return self.kind(str(data["exception"]), data["bases"])
        if "module" in data or "from" in data:
            return _imported(data)
        record = None
        if "record" in data:
            fields = {str(name): decode(value, self.find) for name, value in data["fields"]}
            record = (str(data["record"]), fields)
        return StandIn(self, int(data["object"]), record, data["fields"] if "class" in data else None)

    def kind(self, name: str, names: list[str]) -> type[Exception]:
        """A class for an exception of the program, under the nearest builtin one."""
        builtin = [getattr(builtins, each, None) for each in map(str, names)]
        base = next((each for each in builtin if isinstance(each, type) and issubclass(each, Exception)), RuntimeError)
        if base.__name__ == name or not name.isidentifier():
            return base
        return self.kinds.setdefault(name, type(name, (base,), {}))

    def keep(self, value: Any) -> Json:
        if type(value) is StandIn:
            return {"object": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "bases": bases(value)}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        return refuse(value)

    def ask(self, request: Json, ends: bool = False) -> tuple[Any, Json]:
        """The value of an attribute or call, and the arguments as the call left them."""
        self.link.send(request)
        reply = self.receive()
        while "callback" in reply:
            self.link.send(self.called_back(reply))
            reply = self.receive()
        if "raise" not in reply:
            return decode(reply["value"], self.find), reply.get("arguments")
        number = reply.get("number")
        if isinstance(number, int) and 0 <= number < len(self.raised):
            raise self.raised[number]
        name, message = str(reply["raise"]), str(reply["message"])
        if name in ITERATION or name not in (*dir(builtins), *reply["bases"]):
            if ends and name == "StopIteration":
                raise StopIteration
            raise RuntimeError(f"the program raised {name}: {message}")
        raise self.kind(name, reply["bases"])(message)

    def called_back(self, request: Json) -> Json:
        """Call a function of the tests for the program."""
        try:
            function = self.callbacks[int(request["callback"])]
            value = function(*decode(request["arguments"], self.find), **decode(request["keywords"], self.find))
            return {"value": encode(value, self.keep)}
        except Exception as error:
            self.broken |= isinstance(error, AssertionError)
            self.raised.append(error)
            names = {"raise": type(error).__name__, "bases": bases(type(error))}
            return {**names, "message": str(error), "number": len(self.raised) - 1}

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any], ends: bool = False) -> Any:
        """Call an object of the program. What it does to its arguments is seen only where it returns None.

        A function that works in place returns nothing; of another, a changed argument may be the
        expected value of the test.
        """
        request = {
            "object": number,
            "arguments": encode(list(arguments), self.keep),
            "keywords": encode(keywords, self.keep),
        }
        value, after = self.ask(request, ends)
        if value is None:
            for mine, theirs in zip(arguments, decode(after, self.find), strict=True):
                if type(mine) in CHANGEABLE and type(mine) is type(theirs) and mine != theirs:
                    mine.clear()
                    (mine.update if isinstance(mine, dict | set) else mine.extend)(theirs)
        return value

    # --------------------------------------------------------------------------------------- running tests

    def namespace(self, tree: ast.Module) -> dict[str, Any]:
        """What the tests see: the program's globals, none of which replaces a builtin, a module or a judge."""
        given = self.receive()["names"].items()
        values = {
            name: decode(data, self.find) for name, data in given if name[:2] != "__" and not hasattr(builtins, name)
        }
        solution = types.ModuleType(NAME)
        solution.__dict__.update(values)
        sys.modules["pytest"] = pytest_stub(self.held)
        sys.modules[NAME] = solution
        used = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for name in used & (set(sys.stdlib_module_names) | set(MODULES)):
            values[name] = __import__(MODULES.get(name, name))
        for name, module in JUDGES.items():
            if name in values and type(values[name]) is StandIn:
                values[name] = getattr(__import__(module), name)
        return {**values, "__name__": "__main__", "_held": self.held}

    def held(self) -> None:
        """An assert held."""
        self.reached += 1

    def run(self, tests: str) -> tuple[int, int, int]:
        """Of the checks passed and present, and statements that failed."""
        tree = ast.parse(tests)
        called = {node.func.id for node in _calls(tree) if isinstance(node.func, ast.Name)}
        namespace = self.namespace(tree)
        passed = checks = failed = 0
        try:
            for check in self.checks(tree, namespace, called):
                before, self.broken = self.reached, False
                counts = check()
                good = not self.broken and counts is not False
                is_check = counts is not None or self.reached > before
                checks += is_check
                passed += is_check and good
                failed += not good
        except GoneError:
            return 0, checks + 1, 1
        return passed, checks, failed

    def checks(
        self, tree: ast.Module, namespace: dict[str, Any], called: set[str]
    ) -> Iterator[Callable[[], bool | None]]:
        """One function for each statement and test: True and False for a check, None where it is not one."""
        if any("unittest" in ast.dump(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)):
            import unittest

            unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # they are run below
        for statement in tree.body:
            yield partial(self.execute, statement, namespace)
        for name, value in list(namespace.items()):
            if isinstance(value, types.FunctionType) and name.startswith("test") and name not in called:
                yield from (partial(_passes, test) for test in _parametrized(value))
            elif isinstance(value, type) and value.__module__ == "__main__":
                yield from _methods(name, value)

    def execute(self, statement: ast.stmt, namespace: dict[str, Any]) -> bool | None:
        is_check = isinstance(statement, ast.Assert) or (
            isinstance(statement, ast.Expr) and bool(list(_calls(statement)))
        )
        if isinstance(statement, ast.Try):  # where a failure that is expected is caught
            is_check = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(statement))
        module = ast.fix_missing_locations(ast.Module([_Held().visit(statement)], []))
        good = _passes(lambda: exec(compile(module, "<tests>", "exec"), namespace))
        return good if is_check or (not good and isinstance(statement, BLOCKS)) else None if good else False


class _Held(ast.NodeTransformer):
    """Asserts that hold are counted."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        held = ast.Expr(ast.Call(ast.Name("_held", ast.Load()), [], []))
        error = ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg else [], [])
        return ast.copy_location(ast.If(node.test, [held], [ast.Raise(error)]), node)


def _passes(test: Callable[[], object]) -> bool:
    try:
        test()
    except GoneError:
        raise
    except BaseException:  # whatever ends a test, SystemExit too, is a failure of that test
        return False
    return True


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that are made when the module runs: not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _calls(node)


def countable(tests: str) -> bool:
    """Whether anything in the tests can be counted as a check. Raises SyntaxError."""
    tree = ast.parse(tests)
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if hasattr(node, "ctx") and isinstance(node, ast.Attribute | ast.Name)
    }
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)) or any(name.startswith("assert") for name in names):
        return True
    called = [ast.unparse(call.func) for call in _calls(tree)]
    return "raises" in names or any(name not in NO_CHECKS for name in called)


def _methods(name: str, kind: type) -> Iterator[Callable[[], bool]]:
    """The tests of a TestCase, or of a class that pytest would collect."""
    unittest = sys.modules.get("unittest")
    tests = [each for each in dir(kind) if each.startswith("test")]
    if unittest is not None and issubclass(kind, unittest.TestCase):
        for each in tests:
            yield partial(_succeeds, kind(each), unittest.TestResult())
    elif name.startswith("Test"):
        for each in tests:
            yield from (partial(_passes, test) for test in _parametrized(getattr(kind(), each)))


def _succeeds(case: Any, result: Any) -> bool:
    case.run(result)
    return bool(result.wasSuccessful())


def _parametrized(function: Any) -> list[Callable[[], object]]:
    """The calls that ``pytest.mark.parametrize`` asks for; one without arguments where it does not."""
    return [partial(function, **row) for row in getattr(function, "_rows", [{}])]


def _imported(data: Json) -> Any:
    """A module of the standard library or what is in it: ours, whatever the program did to its own."""
    module = str(data.get("module") or data["from"])
    if module.partition(".")[0] not in (*sys.stdlib_module_names, "numpy"):
        return None
    found = __import__(module, fromlist=["_"])
    return found if "module" in data else getattr(found, str(data["name"]), None)


def judge(job: Json) -> None:
    """Run the tests and write how many passed."""
    out = take_stdout()
    passed, checks, failed = Judge(Link(job["link"])).run(job["tests"])
    out.write(f"{passed} {checks} {failed}")
    out.flush()
