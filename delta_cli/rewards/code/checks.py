"""What in the text of tests counts as a check, and the small changes that let the judge see asserts.

A check is an assert or a call at the top level; a loop or a block at the top level in which an assert
was reached; a function ``test…`` that is not called, as pytest finds it; a method ``test…`` of a
``unittest.TestCase`` or a class ``Test…``.
"""

from __future__ import annotations

import ast
import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MODULES = {"np": "numpy", "numpy": "numpy"}
# Names of libraries that tests may use without an import, because the program imports them. They are taken from here
# whatever the program means by them, unless the tests use no other name of the program's and so are about these.
LIBRARY = dict.fromkeys(("isclose", "isnan", "isinf", "isfinite", "inf", "nan", "pi"), "math")
LIBRARY |= dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections")
LIBRARY |= dict.fromkeys(("List", "Dict", "Tuple", "Set", "Optional", "Union", "Any", "Callable", "Iterable"), "typing")
LIBRARY |= {"deepcopy": "copy", "Fraction": "fractions", "Decimal": "decimal", "allclose": "numpy"}
LIBRARY |= {"array_equal": "numpy", "approx": "pytest", "raises": "pytest"}
NO_CHECKS = {"print", "unittest.main", "pytest.main", "main", "exit", "sys.exit", "len", "range", "list", "set", "dict"}
NO_CHECKS |= {"sys.setrecursionlimit", "random.seed", "np.random.seed", "numpy.random.seed", "time.sleep"}
PRINTS = ("print", "str", "repr", "type", "format", "print_exc", "format_exc", "error", "exception", "warning", "info")
CATCH_ALL = ("Exception", "BaseException")


def countable(tests: str) -> bool:
    """Whether anything in the tests can be counted as a check. Raises SyntaxError."""
    tree = ast.parse(tests)
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)) or any(name.startswith("assert") for name in names):
        return True
    return "raises" in names or counts_as_call(tree)


def counts_as_call(tree: ast.AST) -> bool:
    """Whether a call that is made when the module runs may check something."""
    return any(ast.unparse(call.func) not in NO_CHECKS for call in top_calls(tree))


def top_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that are made when the module runs: not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from top_calls(node)


class ParsedTests:
    """The names in the text of tests, and what its statements assert."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        nodes = list(ast.walk(self.tree))
        self.bound = {name for node in nodes for name in _bound(node)}
        self.asserting = self._asserting(nodes)
        self.called = {call.func.id for call in top_calls(self.tree) if isinstance(call.func, ast.Name)}
        self._imports([node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)])
        self._free_names(nodes)
        self.results = self._results(nodes)

    def _imports(self, nodes: list[ast.Import | ast.ImportFrom]) -> None:
        """``from_solution``: names imported from the program; ``imported``: all others; ``libraries``: from where."""
        ours = [node for node in nodes if not _is_of_solution(node)]
        self.from_solution = {alias.name for node in nodes if _is_of_solution(node) for alias in node.names}
        self.imported = {name for node in ours for name in _bound(node)}
        modules = [alias.name for node in ours if isinstance(node, ast.Import) for alias in node.names]
        modules += [str(node.module) for node in ours if isinstance(node, ast.ImportFrom)]
        self.libraries = {name.partition(".")[0] for name in modules}

    def _free_names(self, nodes: list[ast.AST]) -> None:
        """``free``: what the program should define; ``modules``, ``library`` and ``builtins``: what it does not."""
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        owners = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        self.modules = (owners - self.bound) & (set(sys.stdlib_module_names) | set(MODULES))
        unbound = loaded - self.bound - self.modules
        self.free = {name for name in unbound if not hasattr(builtins, name)}
        self.builtins = (unbound - self.free) & called
        others = self.free - LIBRARY.keys() or self.from_solution or "solution" in self.bound
        self.library = self.free & LIBRARY.keys() if others else set()
        self.libraries |= self.modules | {LIBRARY[name] for name in self.library}

    def _results(self, nodes: list[ast.AST]) -> set[str]:
        """Names of variables that are computed from what the program returned."""
        found: set[str] = set()
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        while new := {
            target.id
            for node in assigned
            for target in node.targets
            if isinstance(target, ast.Name) and target.id not in found and self._names(node.value, found)
        }:
            found |= new
        return found

    def _names(self, node: ast.AST, results: set[str]) -> bool:
        theirs = results | self.from_solution | (self.free - self.library)
        return any(isinstance(each, ast.Name) and each.id in theirs for each in ast.walk(node))

    def is_of_program(self, node: ast.AST) -> bool:
        """Whether an expression uses the program, or a variable computed from what it returned."""
        return self._names(node, self.results)

    def _asserting(self, nodes: list[ast.AST]) -> set[str]:
        """Names of the functions that hold an assert or call one of the others."""
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found: set[str] = set()
        while new := {each.name for each in functions if each.name not in found and self._asserts(each, found)}:
            found |= new
        return found

    def asserts(self, node: ast.AST) -> bool:
        """Whether an assert can be reached in a node."""
        return self._asserts(node, self.asserting)

    @staticmethod
    def _asserts(node: ast.AST, functions: set[str]) -> bool:
        return any(
            isinstance(each, ast.Assert)
            or (_is_call_of_name(each) and each.func.id in functions)  # type: ignore[attr-defined]
            or (isinstance(each, ast.Attribute) and each.attr.startswith("assert") and _of_self(each))
            for each in ast.walk(node)
        )


def _bound(node: ast.AST) -> list[str]:
    """Names that a node gives a value."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [node.name] if isinstance(node, ast.ExceptHandler) and node.name else []


def _is_of_solution(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _is_call_of_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


# ------------------------------------------------------------------------------------- changes to the text


class Instrument(ast.NodeTransformer):
    """Tells the judge of each assert that held, and of failures that an ``except`` would hide.

    The judge's functions ``_held``, ``_swallowed``, ``_all``, ``_zip``, ``_noted`` and ``_made`` are in the globals of
    the tests.
    """

    def __init__(self, tests: ParsedTests) -> None:
        self.tests = tests

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        held, message = _call("_held"), [node.msg] if node.msg else []
        failed = "AssertionError" if isinstance(node.test, ast.Constant) else "_FailedAssert"
        raised = ast.Raise(ast.Call(ast.Name(failed, ast.Load()), message, []))
        return ast.copy_location(ast.If(node.test, [ast.Expr(held)], [raised]), node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """A handler of everything hides the failure of an assert, or the exception that came instead of its value."""
        asserts = [each for each in _walk(node.body) if isinstance(each, ast.Assert)]
        must_fail = any(isinstance(each.test, ast.Constant) for each in asserts)
        for handler in node.handlers:
            if _hides(handler):
                handler.body.insert(0, ast.Expr(_call("_swallowed", ast.Constant(bool(asserts) and not must_fail))))
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "all" and "all" not in self.tests.bound:
            node.func = ast.copy_location(ast.Name("_all", ast.Load()), node.func)
        if isinstance(node.func, ast.Name) and node.func.id == "zip" and "zip" not in self.tests.bound:
            theirs = tuple(self.tests.is_of_program(each) for each in node.args)
            if len(set(theirs)) == 2 and not any(isinstance(each, ast.Starred) for each in node.args):
                node.func = ast.copy_location(ast.Name("_zip", ast.Load()), node.func)
                node.args.insert(0, ast.Tuple([ast.Constant(each) for each in theirs], ast.Load()))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "all":  # of an array, or numpy's
            if node.args:
                node.args[0] = _call("_noted", node.args[0])
            else:
                node.func.value = _call("_noted", node.func.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("assertEqual", "assertEquals"):
            sides = node.args[:2]
            self._made(sides)
            node.args[:2] = sides
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if all(isinstance(each, ast.Eq) for each in node.ops):
            self._made(sides)
            node.left, node.comparators = sides[0], sides[1:]
        return node

    def _made(self, sides: list[ast.expr]) -> None:
        """Of ``f(2) == P(2, 2)`` both sides are the program's: what P makes must be an object, or its arguments."""
        names = [each.func.id for each in sides if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
        if len(names) < len(sides) or len(set(names)) < 2 or not set(names) <= self.tests.free - self.tests.library:
            return
        for place, call in enumerate(sides):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id[0].isupper():
                made = ast.Call(ast.Name("_made", ast.Load()), [call.func, *call.args], call.keywords)
                sides[place] = ast.copy_location(made, call)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _walk(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def _hides(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches a failed assert and does nothing that could fail in its place."""
    if any(isinstance(each, ast.Assert | ast.Raise | ast.Call) and not _prints(each) for each in _walk(handler.body)):
        return False
    kinds = ast.walk(handler.type) if handler.type is not None else [ast.Name("Exception", ast.Load())]
    names = {each.id for each in kinds if isinstance(each, ast.Name)}
    return bool(names & {*CATCH_ALL, "AssertionError"})


def _prints(node: ast.AST) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return name in PRINTS
