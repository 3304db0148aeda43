"""What runs in the sandbox beside the program: shipped compiled to ``python -I -S``, without any package.

The program under test is hostile until shown otherwise, so its process only ever emits data that
somebody else judges:

- ``program``: it reads stdin and writes stdout; expected outputs never enter the sandbox.
- ``calls``: its function is called with each case's arguments; results leave as JSON and are
  compared outside.
- ``serve``: it waits for the judge (judge.py), in a sandbox of its own, to call its functions. No
  object, frame or exit code of the program reaches the judge, so there is nothing in reach to patch.
"""

from __future__ import annotations

import builtins
import sys
import types

from delta_cli.rewards.code.startup import begin, take_stdout
from delta_cli.rewards.code.wire import PLAIN, MessageLink, bases, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

    from delta_cli.rewards.code.startup import Job
    from delta_cli.rewards.code.wire import Message

MODULE = "solution"  # the name of the program's module if it is not the main program


def main(file: IO[bytes]) -> None:
    """Do the job in the file."""
    job = begin(file)
    {"program": run_program, "calls": run_calls, "serve": run_server}[job["mode"]](job)


def load(code: str, name: str) -> dict[str, Any]:
    """Run the program as a module of that name and return its globals."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def run_program(job: Job) -> None:
    """The program as the main program, on the stdin and stdout of this process."""
    load(job["code"], "__main__")


def run_calls(job: Job) -> None:
    """One line of JSON for each case: what the function returned, or that it failed."""
    import json

    out = take_stdout()
    function = entry_point(load(job["code"], MODULE), job["entry_point"])
    for arguments in job["arguments"]:
        try:
            line = json.dumps({"value": as_json(function(*arguments))})
        except Exception as error:
            line = json.dumps({"error": type(error).__name__})
        out.write(line + "\n")
        out.flush()


def entry_point(program: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of a new object of one of its classes: ``Solution.add``."""
    owner, dot, method = name.rpartition(".")
    return getattr(program[owner](), method) if dot else program[name]


def as_json(value: Any) -> Any:
    """Plain data as JSON shows it: tuples are lists, keys are text. Raises TypeError for anything else."""
    if isinstance(value, PLAIN):
        return value if type(value) in PLAIN else (str if isinstance(value, str) else float)(value)  # type: ignore[arg-type]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return as_json(value.tolist())
    raise TypeError(f"{type(value).__name__} is not plain data")


def run_server(job: Job) -> None:
    """Run the program, then do what the judge asks for."""
    take_stdout()
    ProgramServer(MessageLink(job["link"])).run(job["code"])


class ProgramServer:
    """Offers the program's functions and objects to the judge, by number."""

    def __init__(self, link: MessageLink) -> None:
        self.link = link
        self.objects: list[Any] = []
        self.exceptions: dict[str, type[BaseException]] = {}  # the tests' own, by name

    def run(self, code: str) -> None:
        namespace = load(code, MODULE)
        self.link.send({"names": {name: self.described(value) for name, value in namespace.items()}})
        while True:
            try:
                request = self.link.receive()
            except EOFError:
                return
            self.link.send(self.answer(request))

    def described(self, value: Any) -> Any:
        """A global of the program; an object if it cannot be sent by value."""
        try:
            return encode(value, self.keep)
        except Exception:
            return self.keep(value)

    def keep(self, value: Any) -> Any:
        """The number of a value that is not plain data. A data class goes with its name and fields."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "bases": bases(value)}
        self.objects.append(value)
        described: Message = {"object": len(self.objects) - 1}
        fields = getattr(value, "__dataclass_fields__", None)
        if isinstance(fields, dict):
            if isinstance(value, type):
                described |= {"class": value.__name__, "fields": list(fields)}
            else:
                values = [[name, encode(getattr(value, name, None), self.keep)] for name in fields]
                described |= {"record": type(value).__name__, "fields": values}
        return described

    def answer(self, request: Message) -> Message:
        """Do what the judge asks for. After a call that returned None come its arguments, which it may have changed."""
        try:
            arguments = decode(request["arguments"], self.resolve)
            value = self.do(request["do"], self.objects[request["object"]], arguments, request)
            reply = {"value": encode(value, self.keep)}
            if request["do"] == "call" and reply["value"] is None:
                reply["arguments"] = encode(arguments, self.keep)
            return reply
        except Exception as error:
            try:
                values = encode(list(error.args), self.keep)
            except Exception:
                values = []
            name, message = type(error).__name__, str(error)
            number = getattr(error, "_raised_by_tests", None)
            return {"raise": name, "bases": bases(type(error)), "values": values, "message": message, "number": number}

    def do(self, verb: str, target: Any, arguments: list[Any], request: Message) -> Any:
        if verb == "call":
            return target(*arguments, **decode(request["keywords"], self.resolve))
        if verb == "getitem":
            return target[arguments[0]]
        if verb == "setitem":
            target[arguments[0]] = arguments[1]
            return None
        if verb == "getattr":
            return getattr(target, arguments[0])
        if verb == "setattr":
            return setattr(target, *arguments)
        special: dict[str, Any] = {"len": len, "iter": iter, "next": next, "bool": bool, "str": str, "repr": repr}
        return special[verb](target)

    def resolve(self, data: Message) -> Any:
        """What the judge means by a tag: a function of the tests, an exception, a builtin type, or an object."""
        if "callback" in data:
            return lambda *arguments, **keywords: self.call_back(data["callback"], arguments, keywords)
        if "exception" in data:
            return self.exception(data)
        if "builtin" in data:
            return getattr(builtins, data["builtin"])
        return self.objects[data["object"]]

    def exception(self, data: Message) -> type[BaseException]:
        """The class of an exception of the tests: a builtin one, or a new one of that name and base."""
        name = data["exception"]
        if name not in self.exceptions:
            base = next(getattr(builtins, each) for each in data["bases"] if hasattr(builtins, each))
            self.exceptions[name] = base if base.__name__ == name else type(name, (base,), {})
        return self.exceptions[name]

    def call_back(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of the tests that the program was given. It may call the program in turn."""
        given = encode(list(arguments), self.keep), encode(keywords, self.keep)
        self.link.send({"callback": number, "arguments": given[0], "keywords": given[1]})
        reply = self.link.receive()
        while "do" in reply:
            self.link.send(self.answer(reply))
            reply = self.link.receive()
        if "raise" not in reply:
            return decode(reply["value"], self.resolve)
        error = self.exception({"exception": reply["raise"], "bases": reply["bases"]})(reply["message"])
        error._raised_by_tests = reply["number"]  # type: ignore[attr-defined]
        raise error
