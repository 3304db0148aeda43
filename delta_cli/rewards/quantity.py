r"""A number and what it is of: units, currencies, degrees, bases; and numbers read without sympy."""

from __future__ import annotations

import re
from fractions import Fraction

# Words after a number that change it; whatever they are, they are not a unit.
SCALES = frozenset(
    """
    hundred thousand million billion trillion dozen score half halves third thirds quarter quarters tenth tenths
    hundredth hundredths percent percentage pi e i infinity negative minus plus times over squared cubed base mod
    modulo factorial root point not no none to or and is if for from than least most about approximately
    """.split()  # noqa: SIM905 (a list of sixty strings reads worse)
)
FUNCTIONS = re.compile("sin|cos|tan|cot|sec|csc|arc|log|ln|exp|sqrt|frac|lim|max|min$|det|gcd|lcm|infty")
LETTERS = frozenset("msghLlJNVWAT")  # letters that are a unit when set upright
SHORT = frozenset(  # units of two or three letters, which need no upright type
    """
    cm mm km kg mg ml mL ft lb lbs in yd mi hr hrs min mins sec secs mph kmh kph Hz kW oz sq cu per
    """.split()  # noqa: SIM905
)

SPELLINGS = {
    "degree": "°", "deg": "°", "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "millimeter": "mm",
    "kilometer": "km", "kilometre": "km", "kilogram": "kg", "gram": "g", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "feet": "ft", "foot": "ft", "inche": "in", "inch": "in", "mile": "mi", "pound": "lb",
    "yard": "yd", "liter": "l", "litre": "l", "dollar": "$", "usd": "$", "cent": "¢", "euro": "€", "square": "sq",
    "sq": "sq", "cubic": "cu", "cu": "cu", "mph": "mi/h", "kmh": "km/h", "kph": "km/h", "unit": "", "units": "",
}  # fmt: skip

EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
UPRIGHT = rf"\\text\{{[A-Za-z€£/. ^\d-]+\}}{EXPONENT}"
BARE = rf"(?<![A-Za-z\\])[A-Za-z]{{2,}}(?![A-Za-z]){EXPONENT}"
UNIT = re.compile(rf"(?:{UPRIGHT}|{BARE})(?:\s*(?:(?:/|\\cdot)\s*)?(?:{UPRIGHT}|{BARE}))*$")
DEGREES = re.compile(r"\^\{\\circ\}\s*(?:\\text\{([CF])\}|([CF]))?$")
BASE = re.compile(r"(?<=[\dA-F])_\s*(?:\{?(\d+)\}?|\{?\\text\{([a-z]+)\}\}?)$")
MODULUS = re.compile(r"\(?\s*(?:\\[pb]?mod|\\text\{mod\})(?![A-Za-z])\s*\{?\s*(\d+|[a-z])\s*\}?\s*\)?$")
CURRENCY = re.compile(r"^(-?)\s*(\\\$|\\text\{[€£]\})\s*")

INTEGER = r"[+-]?\s?\d+"
LITERAL = re.compile(
    rf"(?:(?P<sign>[+-]?)\s?(?P<decimal>\d+\.?\d*|\.\d+)|(?P<outer>-?)\s?\\frac\{{(?P<over>{INTEGER})\}}\{{(?P<under>{INTEGER})\}}"
    rf"|(?P<above>{INTEGER})\s?/\s?(?P<below>\d+))\s*(?P<percent>\\%)?"
)  # fmt: skip
DECIMALS = 6  # digits a rounded number must show, at least, to stand for one that has no end


def split_unit(text: str) -> tuple[str, str]:
    """The number and its unit in one spelling; the unit is empty where there is none."""
    money = CURRENCY.match(text)
    if money:
        return money.group(1) + text[money.end() :], "$" if "$" in money.group(2) else money.group(2)[6]
    for name, pattern in (("°", DEGREES), ("base", BASE), ("mod", MODULUS)):
        match = pattern.search(text)
        if match:
            return text[: match.start()].strip(), name + "".join(filter(None, match.groups()))
    match = UNIT.search(text)
    before = text[: match.start()].rstrip() if match else ""
    if match and re.search(r"[\d)}\]]$", before) and all(map(_is_unit, _words(match.group()))):
        return before, _canonical(match.group())
    return text, ""


def same_unit(gold: str, given: str) -> bool:
    """Whether the units agree; one that is left out agrees with any."""
    return not gold or not given or gold == given


def _words(unit: str) -> list[tuple[str, bool]]:
    """The words of a unit, and whether each is set upright."""
    upright = " ".join(re.findall(r"\\text\{([^}]*)\}", unit))
    bare = re.sub(r"\\text\{[^}]*\}|\\cdot", " ", unit)
    return [(word, True) for word in re.findall("[A-Za-z]+", upright)] + [
        (word, False) for word in re.findall("[A-Za-z]+", bare)
    ]


def _is_unit(word: tuple[str, bool]) -> bool:
    name, upright = word
    if name.lower() in SCALES or FUNCTIONS.match(name):
        return name in SHORT
    if len(name) == 1:
        return upright and name in LETTERS
    return name in SHORT or upright or len(name) >= 4


def _canonical(unit: str) -> str:
    unit = re.sub(r"\\text\{([^}]*)\}", r"\1", unit).replace(r"\cdot", " ")
    unit = re.sub(r"\bper\b", "/", re.sub(r"[\s{}.]+", " ", unit))
    names = [_singular(word) for word in re.findall(r"[A-Za-z€£]+|/|\^ ?-?\d|-?\d", unit)]
    text = "".join(names)
    return re.sub(r"^sq(.+)", r"\1^2", re.sub(r"^cu(.+)", r"\1^3", text)).replace("^ ", "^")


def _singular(word: str) -> str:
    lowered = word.lower() if len(word) > 1 else word
    for name in (lowered, lowered.removesuffix("s")):
        if name in SPELLINGS:
            return SPELLINGS[name]
    return lowered.removesuffix("s") if len(lowered) > 3 else lowered


def same_literal(gold: str, given: str) -> bool | None:
    """Whether two plainly written numbers are equal; None where one of them is not a plain number.

    Integers, decimals, fractions and percentages are compared exactly. A decimal also stands for
    a number without end that it is the correct rounding of, to at least six decimals of which
    six are significant.
    """
    first, second = LITERAL.fullmatch(gold), LITERAL.fullmatch(given)
    if first is None or second is None:
        return None
    try:
        a, b = _value(first), _value(second)
    except ZeroDivisionError:
        return False
    return a == b or rounds_to(a, given, b) or rounds_to(b, gold, a)


def decimal_value(text: str) -> Fraction | None:
    """The exact value of a plainly written decimal with a point, else None."""
    match = LITERAL.fullmatch(text)
    return _value(match) if match and "." in (match["decimal"] or "") and not match["percent"] else None


def rounds_to(exact: Fraction, text: str, rounded: Fraction) -> bool:
    """Whether the decimal ``text`` of value ``rounded`` is what ``exact``, which has no end, rounds to."""
    digits = re.fullmatch(r"[+-]?\s?\d*\.(\d+)", text)
    if digits is None or _terminates(exact):
        return False
    places, significant = len(digits[1]), len(re.sub(r"\D", "", text).lstrip("0"))
    return min(places, significant) >= DECIMALS and abs(exact - rounded) * 10**places * 2 <= 1


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _value(match: re.Match[str]) -> Fraction:
    """The value of a literal. Raises ZeroDivisionError."""
    part = {name: (text or "").replace(" ", "") for name, text in match.groupdict().items()}
    if part["decimal"]:
        value = Fraction(part["sign"] + part["decimal"].rstrip("."))
    elif part["over"]:
        value = Fraction(int(part["outer"] + "1") * int(part["over"]), int(part["under"]))
    else:
        value = Fraction(int(part["above"]), int(part["below"]))
    return value / 100 if part["percent"] else value
