"""What runs inside the sandbox beside the program: handed compiled to ``python -I -S``, without any package.

The program under test is hostile until shown otherwise, so its process only ever emits data that
somebody else judges:

- ``program``: it reads stdin and writes stdout; expected outputs never enter the sandbox.
- ``calls``: its function is called with each case's arguments; results leave as plain data and
  are compared outside.
- ``serve`` and ``judge``: two sandboxes joined by a socket. ``serve`` holds the program, ``judge``
  (judge.py) runs the tests, with stand-ins for the program's functions that send arguments over
  and get plain data back. No object, frame or exit code of the program reaches the judge, so there
  is nothing in reach to patch.
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
NUMBERS = {"Fraction": "fractions", "Decimal": "decimal"}
EXACT = tuple((module, name) for name, module in NUMBERS.items())


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
    kind_name = type(value).__module__, type(value).__name__
    if kind_name in EXACT:
        return {kind_name[1]: str(value)}
    if kind_name == ("collections", "deque"):
        return {"deque": [encode(item, keep) for item in value]}
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
    if (module := NUMBERS.get(tag)) is not None:
        return getattr(__import__(module), tag)(body)
    if tag == "deque":
        return __import__("collections").deque(decode(item, find) for item in body)
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
        self.exceptions: dict[str, type[BaseException]] = {}  # the tests' own, by name

    def keep(self, value: Any) -> Json:
        """What stands for a value that is not plain data; of a data class, with its fields."""
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "bases": bases(value)}
        self.objects.append(value)
        described: Json = {"object": len(self.objects) - 1}
        fields = getattr(value, "__dataclass_fields__", None)
        if isinstance(fields, dict):
            if isinstance(value, type):
                described |= {"class": value.__name__, "fields": list(fields)}
            else:
                values = [[name, encode(getattr(value, name, None), self.keep)] for name in fields]
                described |= {"record": type(value).__name__, "fields": values}
        return described

    def named(self, value: Any) -> Json:
        """A global of the program; what it imported is named by where it is from."""
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if isinstance(module, str) and isinstance(name, str) and module.partition(".")[0] in sys.stdlib_module_names:
            return {"from": module, "name": name}
        return encode(value, self.keep)

    def find(self, data: Json) -> Any:
        if "callback" in data:
            return lambda *arguments, **keywords: self.call_back(data["callback"], arguments, keywords)
        if "exception" in data:
            return self.exception(data)
        return self.objects[data["object"]]

    def exception(self, data: Json) -> type[BaseException]:
        """The class of an exception of the tests: a builtin one, or one of its name and kind."""
        name = data["exception"]
        if name not in self.exceptions:
            base = next(getattr(builtins, each) for each in data["bases"] if hasattr(builtins, each))
            self.exceptions[name] = base if base.__name__ == name else type(name, (base,), {})
        return self.exceptions[name]

    def call_back(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of the tests, which the program was given."""
        encoded = [encode(value, self.keep) for value in (list(arguments), keywords)]
        self.link.send({"callback": number, "arguments": encoded[0], "keywords": encoded[1]})
        reply = self.link.receive()
        if "raise" not in reply:
            return decode(reply["value"], self.find)
        error = self.exception({"exception": reply["raise"], "bases": reply["bases"]})(reply["message"])
        error._raised_by_tests = reply["number"]  # type: ignore[attr-defined]
        raise error

    def run(self, code: str) -> None:
        namespace = load(code, NAME)
        names = {name: self.named(value) for name, value in namespace.items() if not name.startswith("__")}
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
            number = getattr(error, "_raised_by_tests", None)
            return {"raise": type(error).__name__, "bases": bases(type(error)), "message": str(error), "number": number}


def bases(kind: type[BaseException]) -> list[str]:
    """Names of an exception's classes, the nearest first."""
    return [each.__name__ for each in kind.__mro__ if each is not object]


def serve(job: Json) -> None:
    """Run the program, then do what the judge asks for."""
    take_stdout()
    Server(Link(job["link"])).run(job["code"])


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
    if job["mode"] == "judge":
        from delta_cli.rewards.code.judge import judge

        judge(job)
    else:
        {"program": program, "calls": calls, "serve": serve}[job["mode"]](job)
