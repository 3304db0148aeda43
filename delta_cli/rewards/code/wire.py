"""How two sandboxes talk: one JSON value a line, values as plain data with a tag for each type.

One of the two runs a hostile program, so whatever comes from there is checked field by field: exact
types, known tags, bounded sizes. A message that is not what it should be raises WireError.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing, json and what they import would double the time Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Message = dict[str, Any]
    Field = TypeVar("Field")

MAX_MESSAGE = 2**24  # characters of a line
MAX_DEPTH = 300  # of nested values
PLAIN = (type(None), bool, str, float)
SMALL = 2**63  # integers beyond it travel in hexadecimal: decimal takes quadratic time
SEQUENCES = ("tuple", "set", "frozenset", "deque")  # {tag: [items]}; a list is a JSON list
SPECIAL = ("F", "n", "N")  # exponents of a Decimal that is infinite or not a number


class WireError(Exception):
    """A message of a form that the other side would not send by itself."""


def encode(value: Any, keep: Callable[[Any], Any], depth: int = 0) -> Any:
    """Builtin data as JSON with tags, and anything else as ``keep`` says. Subclasses become their builtin base."""
    if depth > MAX_DEPTH:
        raise RecursionError("a value is nested too deeply")
    if isinstance(value, PLAIN):
        return value if type(value) in PLAIN else (str if isinstance(value, str) else float)(value)  # type: ignore[arg-type]
    if isinstance(value, int):
        number = int(value)
        return number if -SMALL < number < SMALL else {"int": hex(number)}
    if isinstance(value, list | tuple):
        items = [encode(item, keep, depth + 1) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):  # keys and members of sets are values that can be hashed, so never objects
        pairs = value.items()
        return {"dict": [[encode(key, refuse, depth + 1), encode(item, keep, depth + 1)] for key, item in pairs]}
    if isinstance(value, set | frozenset):
        tag = "set" if isinstance(value, set) else "frozenset"
        return {tag: [encode(item, refuse, depth + 1) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return _encode_library(value, keep, depth)


def _encode_library(value: Any, keep: Callable[[Any], Any], depth: int) -> Any:
    """Fractions, decimals, deques and numpy's arrays and numbers."""
    kind = type(value).__module__, type(value).__name__
    if kind == ("fractions", "Fraction"):
        return {"Fraction": [encode(value.numerator, keep), encode(value.denominator, keep)]}
    if kind == ("decimal", "Decimal"):
        sign, digits, exponent = value.as_tuple()
        return {"Decimal": [sign, "".join(map(str, digits)), exponent]}
    if kind == ("collections", "deque"):
        return {"deque": [encode(item, keep, depth + 1) for item in value]}
    if kind[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, depth + 1)
    return keep(value)


def decode(data: Any, resolve: Callable[[Message], Any], depth: int = 0) -> Any:
    """What ``encode`` wrote; an unknown tag is handed to ``resolve``. Raises WireError."""
    if depth > MAX_DEPTH:
        raise WireError("a value is nested too deeply")
    if type(data) is list:
        return [decode(item, resolve, depth + 1) for item in data]
    if type(data) is not dict:
        return data
    tag = next(iter(data), "")
    body: Any = data.get(tag)
    try:
        if tag == "dict":
            return {decode(key, refuse, depth + 1): decode(item, resolve, depth + 1) for key, item in body}
        if tag in SEQUENCES:
            inner = resolve if tag in ("tuple", "deque") else refuse
            return _sequence(tag)([decode(item, inner, depth + 1) for item in body])
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray).fromhex(body)
        if tag == "int":
            return int(body, 16)
        if tag == "complex":
            return complex(of(float, body[0]), of(float, body[1]))
        if tag in ("Fraction", "Decimal"):
            return _decode_number(tag, body)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        raise WireError(f"no {tag}") from None
    return resolve(data)


def _sequence(tag: str) -> Any:
    if tag == "deque":
        from collections import deque

        return deque
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]


def _decode_number(tag: str, body: Any) -> Any:
    """A Fraction of two integers; a Decimal of a sign, digits and an exponent. No text is read as a number."""
    if tag == "Fraction":
        from fractions import Fraction

        return Fraction(*[of(int, decode(each, refuse)) for each in body])
    from decimal import Decimal

    sign, digits, exponent = body
    if exponent not in SPECIAL:
        of(int, exponent)
    return Decimal((sign, tuple("0123456789".index(digit) for digit in digits), exponent))


def of(kind: type[Field], value: Any) -> Field:
    """The value if that is exactly its type. Raises WireError."""
    if type(value) is not kind:
        raise WireError(f"{type(value).__name__} is not {kind.__name__}")
    return value


def texts(value: Any) -> list[str]:
    """The value if it is a list of texts. Raises WireError."""
    return [of(str, each) for each in of(list, value)]


def refuse(value: Any) -> Any:
    """For values that must be plain data."""
    raise TypeError(f"{type(value).__name__} is not plain data")


def bases(kind: type[BaseException]) -> list[str]:
    """Names of an exception's classes, the nearest first."""
    return [each.__name__ for each in kind.__mro__ if each is not object]


class MessageLink:
    """The socket to the other side."""

    def __init__(self, number: int) -> None:
        import json

        self.json = json
        self.reader, self.writer = os.fdopen(number, "r"), os.fdopen(number, "w", closefd=False)

    def send(self, message: Message) -> None:
        self.writer.write(self.json.dumps(message) + "\n")
        self.writer.flush()

    def receive(self) -> Message:
        """The next message. Raises EOFError if the other side is gone and WireError for nonsense."""
        line = self.reader.readline(MAX_MESSAGE)
        if not line:
            raise EOFError("the other side ended")
        try:
            return of(dict, self.json.loads(line))
        except (ValueError, RecursionError):
            raise WireError("not a line of JSON") from None
