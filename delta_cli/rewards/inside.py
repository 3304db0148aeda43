"""What runs inside the sandbox: one self-contained module, handed compiled to ``python -I -S``.

The program under test is hostile until shown otherwise, so its process only ever emits data that
somebody else judges:

- ``program``: it reads stdin and writes stdout; expected outputs never enter the sandbox.
- ``calls``: its function is called with each case's arguments; results leave as plain data and
  are compared outside.
- ``serve`` and ``judge``: two sandboxes joined by a socket. ``serve`` holds the program, ``judge``
  runs the asserts, with stand-ins for the program's functions that send arguments over and get
  plain data back. No object, frame or exit code of the program reaches the judge, so there is
  nothing in reach to patch.
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys
import types

TYPE_CHECKING = False  # typing, json and what they import would double the time Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any

    Json = Any
NAME = "solution"  # the module the program believes to be, where it is not the main program
PLAIN = (type(None), bool, str, float)
SMALL = 2**63  # integers beyond it travel in hexadecimal: decimal takes quadratic time
CHANGEABLE = (list, dict, set, bytearray)


def become(user: int) -> None:
    """Go on as another user, without capabilities."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def limit(seconds: int, memory: int, processes: int, file_bytes: int) -> None:
    """Bound what this process and its children may use; nobody can raise it again."""
    limits = [
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, memory),
    ]
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS does not bound the address space
                raise


# ------------------------------------------------------------------------------ values as plain data


def encode(value: Any, keep: Callable[[Any], Json]) -> Json:
    """Builtin data as JSON with tags; whatever else as ``keep`` says."""
    if isinstance(value, PLAIN):
        return value if type(value) in PLAIN else (str if isinstance(value, str) else float)(value)  # type: ignore[arg-type]
    if isinstance(value, int):
        number = int(value)
        return number if -SMALL < number < SMALL else {"int": hex(number)}
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, keep) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return keep(value)


def decode(data: Json, find: Callable[[Json], Any]) -> Any:
    """What ``encode`` wrote; tags it does not know are handed to ``find``."""
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    (tag, body), *_ = data.items()
    if tag == "dict":
        return {decode(key, find): decode(item, find) for key, item in body}
    if tag in ("tuple", "set", "frozenset"):
        return getattr(builtins, tag)(decode(item, find) for item in body)
    if tag in ("bytes", "bytearray"):
        return getattr(builtins, tag).fromhex(body)
    if tag == "int":
        return int(body, 16)
    if tag == "complex":
        return complex(*body)
    return find(data)


def refuse(value: Any) -> Json:
    raise TypeError(f"{type(value).__name__} is not plain data")


# --------------------------------------------------------------------------------- the program's side


def load(code: str, name: str) -> dict[str, Any]:
    """Run the program as a module of that name and return its globals."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def program(job: Json) -> None:
    """The program as the main program, on the stdin and stdout of this process."""
    load(job["code"], "__main__")


def calls(job: Json) -> None:
    """One line for each case: what the function returned, or that it failed."""
    import json

    out = take_stdout()
    function = find(load(job["code"], NAME), job["entry_point"])
    for arguments in job["arguments"]:
        try:
            line = {"value": encode(function(*arguments), refuse)}
        except Exception as error:
            line = {"error": type(error).__name__}
        out.write(json.dumps(line) + "\n")
        out.flush()


def find(program: dict[str, Any], name: str) -> Any:
    """A function of the program, or the method of an object of one of its classes: ``Solution.add``."""
    owner, dot, method = name.rpartition(".")
    return getattr(program[owner](), method) if dot else program[name]


class Server:
    """The program's functions and objects, for the judge to use from its own process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.objects: list[Any] = []

    def keep(self, value: Any) -> Json:
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def find(self, data: Json) -> Any:
        return self.objects[data["object"]]

    def run(self, code: str) -> None:
        namespace = load(code, NAME)
        names = {name: encode(value, self.keep) for name, value in namespace.items() if not name.startswith("__")}
        self.link.send({"names": names})
        for request in self.link:
            self.link.send(self.answer(request))

    def answer(self, request: Json) -> Json:
        try:
            target = self.objects[request["object"]]
            if "attribute" in request:
                return {"value": encode(getattr(target, request["attribute"]), self.keep)}
            arguments = decode(request["arguments"], self.find)
            value = target(*arguments, **decode(request["keywords"], self.find))
            return {"value": encode(value, self.keep), "arguments": encode(arguments, self.keep)}
        except Exception as error:
            return {"raise": type(error).__name__, "message": str(error)}


def serve(job: Json) -> None:
    """Run the program, then do what the judge asks for."""
    take_stdout()
    Server(Link(job["link"])).run(job["code"])


# ----------------------------------------------------------------------------------- the judge's side


class StandIn:
    """An object of the program, seen from the judge: it can be called and asked, never compared."""

    def __init__(self, judge: Judge, number: int) -> None:
        self.__dict__.update(_judge=judge, _number=number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._judge.call(self._number, arguments, keywords)

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
        return self.__getattr__("__next__")()

    def _no(self, *_: Any) -> Any:
        raise TypeError("an object of the program cannot stand for a truth value or be compared")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _no
    __hash__ = None  # type: ignore[assignment]


class Judge:
    """Runs the asserts statement by statement against a program in another process."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def find(self, data: Json) -> Any:
        return StandIn(self, int(data["object"]))

    def named(self, data: Json) -> Any:
        """A global of the program: a module of the standard library is ours, whatever the program did to its own."""
        if isinstance(data, dict) and "module" in data:
            name = str(data["module"])
            return __import__(name, fromlist=["_"]) if name in sys.stdlib_module_names else None
        return decode(data, self.find)

    def names(self) -> dict[str, Any]:
        """The program's globals that the tests may use; none of them replaces a builtin."""
        globals_ = self.link.receive()["names"].items()
        return {name: self.named(data) for name, data in globals_ if name[:2] != "__" and not hasattr(builtins, name)}

    def keep(self, value: Any) -> Json:
        return {"object": value._number} if type(value) is StandIn else refuse(value)

    def ask(self, request: Json) -> tuple[Any, Json]:
        """The value of an attribute or call, and the arguments as the call left them."""
        self.link.send(request)
        reply = self.link.receive()
        if "raise" in reply:
            kind = getattr(builtins, str(reply["raise"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(str(reply["message"]))
        return decode(reply["value"], self.find), reply.get("arguments")

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        request = {
            "object": number,
            "arguments": encode(list(arguments), self.keep),
            "keywords": encode(keywords, self.keep),
        }
        value, after = self.ask(request)
        for mine, theirs in zip(arguments, decode(after, self.find), strict=True):
            if type(mine) in CHANGEABLE and type(mine) is type(theirs) and mine != theirs:
                mine.clear()
                (mine.update if isinstance(mine, dict | set) else mine.extend)(theirs)
        return value

    def run(self, tests: str) -> tuple[int, int, int]:
        """Of the checks (asserts and calls at the top of the tests) passed and present, and statements failed."""
        import ast

        namespace = {**self.names(), "__name__": "tests"}
        passed = checks = failed = 0
        for statement in ast.parse(tests).body:
            is_check = isinstance(statement, ast.Assert | ast.Expr)
            checks += is_check
            try:
                exec(compile(ast.Module([statement], []), "<tests>", "exec"), namespace)
                passed += is_check
            except BaseException:  # whatever ends a test, SystemExit too, is a failure of that test
                failed += 1
        return passed, checks, failed


def judge(job: Json) -> None:
    """Run the asserts and write how many passed."""
    out = take_stdout()
    passed, checks, failed = Judge(Link(job["link"])).run(job["tests"])
    out.write(f"{passed} {checks} {failed}")
    out.flush()


# ------------------------------------------------------------------------------------------ start-up


def take_stdout() -> Any:
    """This process's stdout as a file; what is printed from now on goes nowhere."""
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return out


class Link:
    """The socket to the other side: one JSON value a line."""

    def __init__(self, number: int) -> None:
        import json

        self.json = json
        self.reader, self.writer = os.fdopen(number, "r"), os.fdopen(number, "w", closefd=False)

    def send(self, message: Json) -> None:
        self.writer.write(self.json.dumps(message) + "\n")
        self.writer.flush()

    def receive(self) -> Json:
        """The next message. Raises EOFError when the other side is gone."""
        line = self.reader.readline()
        if not line:
            raise EOFError("the program ended")
        return self.json.loads(line)

    def __iter__(self) -> Link:
        return self

    def __next__(self) -> Json:
        try:
            return self.receive()
        except EOFError:
            raise StopIteration from None


def main(file: IO[bytes]) -> None:
    """Do the job that follows the code of this module in the file."""
    with file:
        job = marshal.load(file)
    if job["user"] is not None:
        become(job["user"])
    limit(**job["limits"])
    sys.path.append(job["packages"])
    {"program": program, "calls": calls, "serve": serve, "judge": judge}[job["mode"]](job)
