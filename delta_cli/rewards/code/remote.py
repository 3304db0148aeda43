"""The program as the judge sees it: objects in another process that can be called and asked, never compared.

The program decides what it answers, so an answer is plain data, the number of an object of its own, or
an exception. Nothing that it says is looked up in this process, but for numbers that this side gave
out and the names of Python's own exceptions.
"""

from __future__ import annotations

import builtins

from delta_cli.rewards.code.wire import MessageLink, WireError, bases, decode, encode, of, refuse, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from delta_cli.rewards.code.wire import Message

CHANGEABLE = (list, dict, set, bytearray)
ITERATION = ("StopIteration", "StopAsyncIteration", "GeneratorExit")  # they end a loop instead of failing it
EXCEPTIONS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and name not in ITERATION
}
BUILTIN_TYPES = {kind for kind in vars(builtins).values() if isinstance(kind, type)}
# What libraries may read of an object besides its ordinary attributes. Others, like numpy's __array_interface__,
# would let the program choose what a comparison sees.
DUNDERS = ("__name__", "__qualname__", "__doc__", "__annotations__")
# Methods with which a text, a set or a number says whether a result is right. An object would say yes to anything.
PREDICATES = {"issubset", "issuperset", "isdisjoint", "is_integer", "isupper", "islower", "istitle", "isalpha"}
PREDICATES |= {"isalnum", "isdigit", "isdecimal", "isnumeric", "isspace", "isascii", "endswith"}


class ProgramEndedError(BaseException):
    """The program's process has ended or breaks the protocol. No test can catch that."""


class RemoteObject:
    """An object of the program. It is compared only if it is of a data class, with one that a test made.

    Then their fields are compared. Those of the object that the test made are what the test gave.
    """

    def __init__(self, program: Program, number: int, record: Any = None, fields: Any = None) -> None:
        self.__dict__.update(_program=program, _number=number, _record=record, _fields=fields, _by_test=False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        made = self._program.call(self._number, arguments, keywords)
        if self._fields is not None and type(made) is RemoteObject:
            made.__dict__["_record"] = _filled(self._fields, made._record, arguments, keywords)
            made._trust()
        return made

    def _trust(self) -> None:
        """The object was made by a test, with the objects in its fields."""
        self.__dict__["_by_test"] = True
        for value in self._record[1].values() if self._record is not None else ():
            if type(value) is RemoteObject:
                value._trust()

    def _ask(self, verb: str, *arguments: Any, kind: type = object) -> Any:
        return self._program.ask(verb, self._number, arguments, kind)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES or (name[:2] == name[-2:] == "__" and name not in DUNDERS):
            raise AttributeError(f"an object of the program has no {name} that could be trusted")
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __len__(self) -> Any:
        return self._ask("len", kind=int)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __bool__(self) -> Any:
        return self._ask("bool", kind=bool)

    def __str__(self) -> Any:
        return self._ask("str", kind=str)

    def __repr__(self) -> Any:
        return self._ask("repr", kind=str)

    def __eq__(self, other: Any) -> Any:
        if type(other) is not RemoteObject or self._record is None or other._record is None:
            self._not_compared()
        if not (self._by_test or other._by_test):
            self._not_compared()
        return self._record == other._record

    def __ne__(self, other: Any) -> Any:
        return not self == other

    def _not_compared(self, *_: Any) -> Any:
        raise TypeError("an object of the program cannot be compared or copied")

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __copy__ = __deepcopy__ = __reduce_ex__ = _not_compared
    __hash__ = None  # type: ignore[assignment]


def _filled(fields: list[str], record: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The record of a data class that a test made: the fields it gave, and the program's defaults for the others.

    None if the constructor is not that of a data class, so it is unknown what it does with the arguments.
    """
    positional = fields[: len(arguments)]
    known = len(positional) == len(arguments) and len(set(fields)) == len(fields)
    if record is None or not known or not keywords.keys() <= set(fields) - set(positional):
        return None
    return record[0], {**record[1], **dict(zip(positional, arguments, strict=True)), **keywords}


def _text(error: BaseException, base: type[BaseException]) -> str:
    """What an exception of the program says of itself; what its base says if a test made it."""
    text: str = error.__dict__["_text"] if "_text" in error.__dict__ else base.__str__(error)
    return text


class Program:
    """The program in the other sandbox. Raises ProgramEndedError if it ends or says what no honest one would."""

    def __init__(self, link: MessageLink) -> None:
        self.link = link
        self.callbacks: list[Callable[..., Any]] = []
        self.raised: list[BaseException] = []  # by the tests' own callbacks
        self.kinds: dict[str, type[Exception]] = {}  # the program's exceptions, by name
        self.asked = 0  # requests
        self.gone = False
        self.broken = False  # an assert of the tests failed in a callback, where the program could hide it

    def names(self) -> dict[str, Any]:
        """The program's globals."""
        try:
            given = of(dict, self._receive().get("names"))
            return {name: decode(data, self._resolve) for name, data in given.items()}
        except WireError as error:
            raise self._end(error) from None

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call an object of the program. What it does to its arguments is seen only if it returns None.

        A function that works in place returns nothing; of another, a changed argument may be the
        expected value of the test.
        """
        value, after = self._exchange("call", number, arguments, keywords)
        if value is None:
            for mine, theirs in zip(arguments, after, strict=True):
                if type(mine) in CHANGEABLE and type(mine) is type(theirs) and mine != theirs:
                    mine.clear()
                    (mine.update if isinstance(mine, dict | set) else mine.extend)(theirs)
        return value

    def ask(self, verb: str, number: int, arguments: tuple[Any, ...], kind: type) -> Any:
        """Do to an object of the program what the verb says. The value is of exactly that kind, or of any if object."""
        value = self._exchange(verb, number, arguments, {})[0]
        if kind is not object and type(value) is not kind:
            raise self._end(WireError(f"no {kind.__name__}"))
        return value

    def _exchange(
        self, verb: str, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The value, and after a call that returned None the arguments as it left them."""
        given = encode(list(arguments), self._keep), encode(keywords, self._keep)
        self._send({"do": verb, "object": number, "arguments": given[0], "keywords": given[1]})
        self.asked += 1
        try:
            reply = self._receive()
            while "callback" in reply:
                self._send(self._called_back(reply))
                reply = self._receive()
            if "raise" not in reply:
                value = decode(reply["value"], self._resolve)
                after = of(list, decode(reply.get("arguments", []), self._resolve))
                if verb == "call" and value is None and len(after) != len(arguments):
                    raise WireError("other arguments")
                return value, after
            error = self._error(reply, verb == "next")
        except (WireError, LookupError) as nonsense:
            raise self._end(nonsense) from None
        raise error

    def _send(self, message: Message) -> None:
        try:
            self.link.send(message)
        except OSError as error:
            raise self._end(error) from None

    def _receive(self) -> Message:
        if self.gone:
            raise ProgramEndedError
        try:
            return self.link.receive()
        except (EOFError, OSError, UnicodeDecodeError) as error:
            raise self._end(error) from None

    def _end(self, error: Exception) -> ProgramEndedError:
        self.gone = True
        return ProgramEndedError(str(error))

    def _keep(self, value: Any) -> Any:
        """What the program is given for a value that is not plain data."""
        if type(value) is RemoteObject:
            return {"object": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": value.__name__, "bases": bases(value)}
        if isinstance(value, type) and value in BUILTIN_TYPES:
            return {"builtin": value.__name__}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        return refuse(value)

    def _resolve(self, data: Message) -> Any:
        """An object or an exception class of the program's own."""
        if "exception" in data:
            return self._kind(of(str, data["exception"]), texts(data.get("bases")))
        number, record, fields = of(int, data.get("object")), None, None
        if "record" in data:
            pairs = [(of(str, name), decode(value, self._resolve)) for name, value in of(list, data["fields"])]
            record = of(str, data["record"]), dict(pairs)
        elif "class" in data:
            fields = texts(data["fields"])
        return RemoteObject(self, number, record, fields)

    def _kind(self, name: str, names: list[str]) -> type[Exception]:
        """The class for an exception of the program: Python's own of that name, or a new one under the nearest."""
        if name in EXCEPTIONS:
            return EXCEPTIONS[name]
        base = next((EXCEPTIONS[each] for each in names if each in EXCEPTIONS), RuntimeError)
        if name in ITERATION or not name.isidentifier():
            return base
        if name not in self.kinds:
            self.kinds[name] = type(name, (base,), {"__str__": lambda error: _text(error, base)})
        return self.kinds[name]

    def _error(self, reply: Message, ends: bool) -> BaseException:
        """The exception that a reply says was raised. ``ends``: whether StopIteration ends an iteration."""
        number = reply.get("number")
        if type(number) is int and 0 <= number < len(self.raised):
            return self.raised[number]
        name, message, names = of(str, reply["raise"]), of(str, reply["message"]), texts(reply["bases"])
        if name in ITERATION:
            return StopIteration() if ends and name == "StopIteration" else RuntimeError(f"the program raised {name}")
        kind = self._kind(name, names)
        values = of(list, decode(reply["values"], self._resolve)) if name in EXCEPTIONS else []
        try:
            error = kind(*values or [message])
        except (TypeError, ValueError):  # one that takes other arguments
            return RuntimeError(f"the program raised {name}: {message}")
        if name not in EXCEPTIONS:
            error.__dict__["_text"] = message
        return error

    def _called_back(self, request: Message) -> Message:
        """Call a function of the tests for the program."""
        number, arguments = of(int, request["callback"]), of(list, decode(request["arguments"], self._resolve))
        keywords = of(dict, decode(request["keywords"], self._resolve))
        if number < 0 or not all(type(name) is str for name in keywords):
            raise WireError("no such callback")
        function = self.callbacks[number]
        try:
            return {"value": encode(function(*arguments, **keywords), self._keep)}
        except Exception as error:
            self.broken |= isinstance(error, AssertionError)
            self.raised.append(error)
            names = {"raise": type(error).__name__, "bases": bases(type(error))}
            return {**names, "message": str(error), "number": len(self.raised) - 1}
