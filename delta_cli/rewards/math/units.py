r"""Units of numbers: lengths, currencies, degrees, number bases, and the things that a question counts.

A unit is read only if every word of it is in a list and every exponent belongs to one of its words.
Anything else after a number, such as ``12\text{ ft 5 in}`` or ``12\text{^2}``, is not a unit.
"""

from __future__ import annotations

import re
from collections import Counter

# Known units: the form in which a unit is compared, and its other spellings.
UNITS = {
    "m": "metre meter", "cm": "centimetre centimeter", "mm": "millimetre millimeter", "km": "kilometre kilometer",
    "dm": "decimetre decimeter", "nm": "nanometre nanometer", "in": "inch inche inches", "ft": "foot feet",
    "yd": "yard", "mi": "mile", "g": "gram gramme", "kg": "kilogram kilo", "mg": "milligram", "lb": "pound lbs",
    "oz": "ounce", "t": "ton tonne", "s": "sec second", "ms": "millisecond", "min": "minute mins", "h": "hr hour hrs",
    "day": "", "week": "wk", "month": "mo", "year": "yr", "l": "L litre liter", "ml": "mL millilitre milliliter",
    "cl": "centilitre centiliter", "gal": "gallon", "qt": "quart", "pt": "pint", "cup": "", "tsp": "teaspoon",
    "tbsp": "tablespoon", "$": "dollar USD buck", "¢": "cent", "€": "euro EUR", "£": "GBP", "₹": "rupee Rs INR",
    "peso": "", "¥": "yen JPY", "mi/h": "mph", "km/h": "kmh kph kmph", "N": "newton", "J": "joule", "kJ": "kilojoule",
    "W": "watt", "kW": "kilowatt", "V": "volt", "A": "ampere amp", "K": "kelvin", "Hz": "hertz", "Pa": "pascal",
    "kPa": "kilopascal", "mol": "mole", "eV": "", "Ω": "ohm", "rad": "radian", "°": "degree deg", "°C": "Celsius",
    "°F": "Fahrenheit", "bit": "", "byte": "", "ha": "hectare", "acre": "", "kW·h": "kWh", "C": "coulomb",
    "T": "tesla", "F": "farad", "": "unit u", "rpm": "", "cal": "calorie", "kcal": "",
}  # fmt: skip
# Things that answers count. Left out: what changes a number, as a pair or a dozen does.
COUNTED_NOUNS = frozenset(
    """
    way people person student child children solution integer number triangle point value side edge vertex vertices
    element possibility arrangement permutation combination outcome subset function path root factor divisor member
    """.split()  # noqa: SIM905 (one string per word reads worse)
)
SPELLINGS = {word: unit for unit, words in UNITS.items() for word in (unit, *words.split()) if word.isalpha()}
SPELLINGS |= {noun: f"#{noun}" for noun in COUNTED_NOUNS}
MAX_UNIT = 120  # characters of a unit
AMBIGUOUS = frozenset({"K", "T", "C", "F", "A"})  # on one side only, these may be a factor or a name instead
# Words of a question that are no thing one counts: they change the number before them.
NOT_COUNTED = frozenset(
    """
    hundred thousand million billion trillion quadrillion quintillion lakh lac crore myriad gross dozen score half
    halves third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth quarter twentieth hundredth thousandth
    millionth percent percentage pct permille pi infinity negative minus plus times over squared cubed base mod modulo
    factorial root square cube not no none to or and is are if for from than least most about approximately
    nearly almost wrong false more less fewer between up down double twice triple thrice ago before after mixed
    power exponent sum difference product quotient ratio reciprocal inverse remainder sin cos tan ln exp sqrt pair
    couple one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy
    eighty ninety zero
    """.split()  # noqa: SIM905
)

_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_TEXT = r"\\text\{[^{}\d\\][^{}\\]*\}"
_WORD = r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])"
_FRACTION = rf"\\frac\s*\{{\s*{_TEXT}{_POWER}\s*\}}\s*\{{\s*{_TEXT}{_POWER}\s*\}}"
_PIECE = rf"(?:{_FRACTION}|(?:{_TEXT}|{_WORD}|\\Omega(?![A-Za-z])|\\mu\s*(?=\\text)){_POWER})"
_TAIL = re.compile(rf"{_PIECE}(?:\s*(?:(?:/|\\cdot|\\times)\s*)?{_PIECE})*$")
_ITALIC = re.compile(r"(?:\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|[A-Za-z/]+(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?)$")
_DEGREES = re.compile(r"\s*\^\{\\circ\}\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?$")
_BASE = re.compile(
    r"(?:_\s*(?:\{\s*\(?\s*(?:\\text\{\s*)?(?:base\s*\}?\s*)?(?P<index>\w+)\s*\}?\s*\)?\s*\}|(?P<digit>\d)|\\text\{(?P<word>\w+)\})"
    r"|\s*\(?\s*(?:\\text\{\s*\(?\s*)?base\s*\}?\s*(?P<plain>\w+)\s*\)?\s*\}?\s*\)?)$"
)
_BASE_DIGITS = re.compile(r"\s*(?:\(\s*([\dA-Fa-f.\s]+)\)|\\text\{([\dA-Fa-f.\s]+)\}|\{?([\dA-Fa-f.\s]+)\}?)\s*")
_NUMBER_WORDS = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_MODULUS = re.compile(
    r"\s*[({]?\s*(?:\\[pb]?mod(?![A-Za-z])|(?<![A-Za-z\\])mod(?![A-Za-z])|\\text\{\s*mod\s*\}|\\text\{\s*\(?mod(?=\s*\w+\s*\)?\}))\s*"
    r"\{?\s*(\d+|[a-z])\s*\}?\s*\)?\s*\}?$"
)
_ANGLE = r"sin|cos|tan|cot|sec|csc"
_OF_ANGLE = re.compile(rf"\\(?:arc)?(?:{_ANGLE})|(?<![A-Za-z])(?:{_ANGLE})(?![A-Za-z])")
_SIGNS = r"\\\$|\\mathdollar(?![A-Za-z])|\\text\{\s*(?:[€£¥₹¢]|USD|EUR|Rs\.?)\s*\}|USD|Rs"
_CURRENCY = re.compile(rf"^(-?)\s*(?:\{{\s*)?({_SIGNS})(?:\s*\}})?\s*")
_CURRENCY_AFTER = re.compile(r"(?<=\d)\s*\\\$$")
_NUMBER_END = re.compile(r"(?<!\\%)[\d)}\]]$|\\pi$")
_COUNTED = re.compile(
    r"(?<=[\d)}\]])\s*(?:\\text\{([A-Za-z ]+)\}|((?<![A-Za-z])[A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*))(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"[#°]?[A-Za-z€£¥₹¢Ωµ]+\.?|\^\s*\{?\s*(-?\d)\s*\}?|[/·*]|\s+|(?P<hyphen>(?<=[A-Za-z])-(?=[A-Za-z]))|.", re.DOTALL
)
_MODIFIERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER = {"squared": 2, "cubed": 3}


def split_unit(text: str) -> tuple[str, str]:
    """The number and its unit in the form in which units are compared; the unit is empty if there is none."""
    money = _CURRENCY.match(text)
    if money:
        sign = re.sub(r"\\text|[{}\s.]", "", money[2])
        return money[1] + text[money.end() :], "$" if "$" in sign or "dollar" in sign else SPELLINGS.get(sign, sign)
    text = _CURRENCY_AFTER.sub(r"\\text{USD}", text)
    end = max(0, len(text) - MAX_UNIT)
    degrees = _DEGREES.search(text, end)
    if degrees and not _OF_ANGLE.search(text) and not text[: degrees.start()].endswith(r"\%"):
        return text[: degrees.start()].strip(), "°" + (degrees[1] or degrees[2] or "")
    base = _BASE.search(text, end)
    if base:
        digits = _BASE_DIGITS.fullmatch(text[: base.start()])
        number = base["index"] or base["digit"] or base["word"] or base["plain"]
        number = _NUMBER_WORDS.get(number.lower(), number)
        if digits and re.fullmatch("[1-9][0-9]?", number, re.ASCII):
            bare = re.sub(r"\s", "", next(filter(None, digits.groups()))).upper()
            if _is_in_base(bare, int(number)):
                return bare.lstrip("0") or "0", f"base {number}"
    modulus = _MODULUS.search(text, end)
    if modulus:
        return text[: modulus.start()].strip(), f"mod {modulus[1]}"
    tail = _TAIL.search(text, end)
    if tail:
        before = text[: tail.start()].rstrip()
        unit = parse_unit(tail.group())
        if unit is not None and _NUMBER_END.search(before):
            return before, unit
    return text, ""


def _is_in_base(digits: str, base: int) -> bool:
    """Whether the digits belong to a number in that base, and are not a letter with an index, as in A_2."""
    is_number = any(digit.isdecimal() for digit in digits) or (len(digits) > 1 and base in (12, 16))
    return is_number and digits.count(".") <= 1 and all(digit == "." or int(digit, 16) < base for digit in digits)


def italic_unit(text: str) -> tuple[str, str]:
    """Like ``split_unit``, but single letters in italics are units, too, as in ``5 m`` or ``9.8\\frac{m}{s^2}``."""
    tail = _ITALIC.search(text, max(0, len(text) - MAX_UNIT))
    if tail is None:
        return text, ""
    unit = parse_unit(re.sub(r"[A-Za-z]+", r"\\text{\g<0>}", re.sub(r"\\frac", "", _as_quotient(tail.group()))))
    before = text[: tail.start()].rstrip()
    return (before, unit) if unit is not None and _NUMBER_END.search(before) else (text, "")


def same_unit(gold: str, given: str, plain: bool) -> bool:
    """Whether two units agree. A unit that is left out agrees with any other.

    But a base is never left out, degrees only after a ``plain`` number (π/4 is not π/4 degrees), and an
    ambiguous letter not at all (``12\\text{K}`` may be twelve thousand).
    """
    if gold == given or (gold and given):
        return gold == given
    unit = gold or given
    if unit == "base 10":
        return True
    return not unit.startswith("base") and (plain or not unit.startswith("°")) and given not in AMBIGUOUS


def counted(text: str, question: str) -> str:
    """``text`` with the things it counts marked as units: words after a number that also occur in ``question``."""
    known = {_singular(word) for word in re.findall("[A-Za-z]+", question.lower())}

    def mark(match: re.Match[str]) -> str:
        words = (match[1] or match[2]).split()
        names = [_singular(word.lower()) for word in words]
        if not known | SPELLINGS.keys() >= set(names) or NOT_COUNTED & {*names, *map(str.lower, words)}:
            return match.group()
        return r"\text{" + " ".join(name if name in SPELLINGS else f"#{name}" for name in names) + "}"

    return _COUNTED.sub(mark, text)


def parse_unit(text: str) -> str | None:
    """A unit in the form in which units are compared, as in ``m·s^-2``; None if any part of it is not a unit."""
    text = re.sub(r"\\Omega(?![A-Za-z])", "Ω", re.sub(r"\\mu\s*\\text\{", r"\\text{µ", _as_quotient(text)))
    text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "·", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text))
    text = re.sub(r"\byears?\s+old\b", "year", text)
    text = re.sub(r"\b[Dd]egrees?\s+(?=[CF](?:elsius|ahrenheit)?\b)", "°", text)
    powers: Counter[str] = Counter()
    last: list[str] = []  # the units of the word before, which an exponent raises
    sign, factor, pending = 1, 1, False
    for token in _TOKEN.finditer(text):
        word = token.group().strip()
        if not word or word in "·*" or token["hyphen"]:
            continue
        if word == "/" or word.lower() == "per":
            sign, pending = -1, True
        elif token[1] or word.lower() in _AFTER:
            if not last:
                return None
            exponent = int(token[1]) if token[1] else _AFTER[word.lower()]
            if exponent == 0:
                return None
            for unit in last:
                powers[unit.lstrip("/")] += (exponent - 1) * (-1 if unit.startswith("/") else 1)
            last = []
        elif word.lower().rstrip(".") in _MODIFIERS:
            factor = _MODIFIERS[word.lower().rstrip(".")]
        else:
            unit_name = _spelling(word)
            if unit_name is None:
                return None
            last = []
            for part in re.findall(r"[/·]?[^/·]+", unit_name) or [""]:
                down = sign * (-1 if part.startswith("/") else 1)
                powers[part.lstrip("/·")] += down * factor
                last.append(("/" if down < 0 else "") + part.lstrip("/·"))
            sign, factor, pending = 1, 1, False
    if pending or factor != 1 or not powers:
        return None
    powers.pop("", None)
    if powers.get("ms") == -1:  # m s^-1
        powers = Counter({**powers, "m": powers["m"] + 1, "s": powers["s"] - 1, "ms": 0})
    return "·".join(f"{unit}^{power}" if power != 1 else unit for unit, power in sorted(powers.items()) if power)


def _as_quotient(text: str) -> str:
    return re.sub(r"\\frac\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", r"\1/\2", text)


def _spelling(word: str) -> str | None:
    """The unit that a word names; None if it names none."""
    if word.startswith("#"):
        return word
    word = word.rstrip(".")
    if word.startswith("°"):
        return word[:2]
    if word in ("€", "£", "¥", "₹", "¢", "Ω"):
        return word
    if word.startswith("µ"):
        return word if word[1:] in ("m", "s", "g", "l", "L", "A", "V", "F", "C") else None
    if word == "ms" or len(word) == 1:
        return SPELLINGS.get(word)
    for name in (word, word.lower(), _singular(word), _singular(word.lower())):
        if name in SPELLINGS and not (len(name) == 1 and name != word):
            return SPELLINGS[name]
    return None


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word
