r"""Units of numbers: lengths, currencies, degrees, bases, and what a question counts."""

from __future__ import annotations

import re

# The units that are known, each spelling with the form it is compared in. What is not here is no unit, except
# words of the question: see ``counted``.
UNITS = {
    "m": "m metre meter", "cm": "centimetre centimeter", "mm": "millimetre millimeter", "km": "kilometre kilometer",
    "dm": "decimetre decimeter", "nm": "nanometre nanometer", "in": "inch inche inches", "ft": "foot feet",
    "yd": "yard", "mi": "mile", "g": "gram gramme", "kg": "kilogram kilo", "mg": "milligram", "lb": "pound lbs",
    "oz": "ounce", "t": "ton tonne", "s": "sec second", "ms": "millisecond", "min": "minute", "h": "hr hour",
    "day": "", "week": "wk", "month": "", "year": "yr", "l": "L litre liter", "ml": "mL millilitre milliliter",
    "cl": "centilitre centiliter", "gal": "gallon", "qt": "quart", "pt": "pint", "cup": "", "tsp": "teaspoon",
    "tbsp": "tablespoon", "$": "dollar USD buck", "¢": "cent", "€": "euro EUR", "£": "GBP", "rupee": "Rs INR",
    "peso": "", "yen": "JPY", "mi/h": "mph", "km/h": "kmh kph kmph", "N": "newton", "J": "joule", "W": "watt",
    "kW": "kilowatt", "V": "volt", "A": "ampere amp", "K": "kelvin", "Hz": "hertz", "Pa": "pascal", "mol": "mole",
    "eV": "", "rad": "radian", "°": "degree deg", "°C": "Celsius", "°F": "Fahrenheit", "bit": "", "byte": "",
    "ha": "hectare", "acre": "", "sq": "square", "cu": "cubic", "per": "", "": "unit",
}  # fmt: skip
SPELLINGS = {word: unit for unit, words in UNITS.items() for word in (unit, *words.split()) if word.isalpha()}
UPRIGHT_ONLY = frozenset("m g s h l L t N J W V A K".split())  # noqa: SIM905 (in italics these are variables)
# Words of a question that are no thing one counts: they change the number before them.
NOT_COUNTED = frozenset(
    """
    hundred thousand million billion trillion quadrillion quintillion lakh lac crore myriad gross dozen score half
    halves third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth quarter twentieth hundredth thousandth
    millionth percent percentage pct permille pi infinity negative minus plus times over squared cubed base mod modulo
    factorial root square cube not no none to or and is are if for from than least most about approximately
    nearly almost wrong false more less fewer between up down double twice triple thrice ago before after mixed
    power exponent sum difference product quotient ratio reciprocal inverse remainder sin cos tan ln exp sqrt
    one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty zero
    """.split()  # noqa: SIM905 (a list of a hundred strings reads worse)
)

EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
UPRIGHT = rf"\\text\{{[#A-Za-z€£/. ^\d][#A-Za-z€£/. ^\d-]*\}}{EXPONENT}"
BARE = rf"(?<![A-Za-z\\])[A-Za-z]{{2,}}(?![A-Za-z]){EXPONENT}"
COUNTED = re.compile(
    r"(?<=[\d)}\]])\s*(?:\\text\{([A-Za-z ]+)\}|((?<![A-Za-z])[A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*))(?![A-Za-z])"
)
UNIT = re.compile(rf"(?:{UPRIGHT}|{BARE})(?:\s*(?:(?:/|\\cdot)\s*)?(?:{UPRIGHT}|{BARE}))*$")
DEGREES = re.compile(r"\^\{\\circ\}\s*(?:\\text\{([CF])\}|([CF]))?$")
BASE = re.compile(r"(?<=[\dA-F])_\s*(?:\{?(\d+)\}?|\{?\\text\{([a-z]+)\}\}?)$")
MODULUS = re.compile(r"\(?\s*(?:\\[pb]?mod|\\text\{mod\})(?![A-Za-z])\s*\{?\s*(\d+|[a-z])\s*\}?\s*\)?$")
FUNCTION = re.compile(r"\\(?:a?rc)?(?:sin|cos|tan|cot|sec|csc)|(?<![A-Za-z])(?:sin|cos|tan)(?![A-Za-z])")  # of an angle
CURRENCY = re.compile(r"^(-?)\s*(\\\$|\\text\{[€£]\})\s*")


def split_unit(text: str) -> tuple[str, str]:
    """The number and its unit in one spelling; the unit is empty where there is none."""
    money = CURRENCY.match(text)
    if money:
        return money.group(1) + text[money.end() :], "$" if "$" in money.group(2) else money.group(2)[6]
    for name, pattern in (("°", DEGREES), ("base", BASE), ("mod", MODULUS)):
        match = pattern.search(text)
        if match and not FUNCTION.search(text) and not text[: match.start()].endswith(r"\%"):
            return text[: match.start()].strip(), name + "".join(filter(None, match.groups()))
    match = UNIT.search(text)
    before = text[: match.start()].rstrip() if match else ""
    if match and re.search(r"(?<!\\%)[\d)}\]]$", before) and all(map(_is_unit, _words(match.group()))):
        return before, _canonical(match.group())
    return text, ""


def same_unit(gold: str, given: str, plain: bool) -> bool:
    """Whether the units agree. One that is left out agrees with any.

    But a base is never left out, and degrees only of a ``plain`` number: π/4 is no π/4 degrees.
    """
    if gold == given or (gold and given):
        return gold == given
    unit = gold or given
    return not unit.startswith("base") and (plain or not unit.startswith("°"))


def counted(text: str, question: str) -> str:
    """The answer with the things it counts marked as units: words after a number that the question has."""
    known = {_singular(word) for word in re.findall("[A-Za-z]+", question.lower())}

    def mark(match: re.Match[str]) -> str:
        words = (match[1] or match[2]).split()
        names = [_singular(word.lower()) for word in words]
        if not known | SPELLINGS.keys() >= set(names) or NOT_COUNTED & {*names, *map(str.lower, words)}:
            return match.group()
        return r"\text{" + " ".join(name if name in SPELLINGS else f"#{name}" for name in names) + "}"

    return COUNTED.sub(mark, text)


def _words(unit: str) -> list[tuple[str, bool]]:
    """The words of a unit, and whether each is set upright."""
    upright = " ".join(re.findall(r"\\text\{([^}]*)\}", unit))
    bare = re.sub(r"\\text\{[^}]*\}|\\cdot", " ", unit)
    return [(word, True) for word in re.findall("#?[A-Za-z]+", upright)] + [
        (word, False) for word in re.findall("[A-Za-z]+", bare)
    ]


def _is_unit(word: tuple[str, bool]) -> bool:
    name, upright = word
    if name in UPRIGHT_ONLY:
        return upright
    spellings = {name, name.lower(), _singular(name), _singular(name.lower())}
    return name.startswith("#") or bool(spellings & SPELLINGS.keys())


def _canonical(unit: str) -> str:
    unit = re.sub(r"\\text\{([^}]*)\}", r"\1", unit).replace(r"\cdot", " ")
    unit = re.sub(r"\bper\b", "/", re.sub(r"[\s{}.]+", " ", unit))
    names = [_spelling(word) for word in re.findall(r"#?[A-Za-z€£]+|/|\^ ?-?\d|-?\d", unit)]
    text = "".join(names)
    return re.sub(r"^sq(.+)", r"\1^2", re.sub(r"^cu(.+)", r"\1^3", text)).replace("^ ", "^")


def _spelling(word: str) -> str:
    for name in (word, word.lower(), _singular(word), _singular(word.lower())):
        if name in SPELLINGS:
            return SPELLINGS[name]
    return word


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word
