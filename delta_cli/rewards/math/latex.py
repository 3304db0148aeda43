r"""One spelling for answers that look alike: what LaTeX typesets the same, and what people type instead."""

from __future__ import annotations

import re
from collections.abc import Callable

from delta_cli.rewards.math.brackets import closing_brace, depth, trim

MAX_CHARACTERS = 2000  # of an answer; a longer one is refused unread
MAX_DEPTH = 24  # of nested brackets
MAX_STYLES = 60  # style commands in an answer

FUNCTIONS = tuple(
    """
    arcsin arccos arctan arccot arcsec arccsc arcsinh arccosh arctanh arsinh arcosh artanh sinh cosh tanh coth sech
    csch sin cos tan cot sec csc ln log lg exp
    """.split()  # noqa: SIM905
)
# Operators that are set upright and are not read any further.
OPERATORS = tuple("max min sup inf gcd lcm det tr rank dim deg arg sgn Re Im Var Pr lim ker mod".split())  # noqa: SIM905

_UNICODE = {
    "−": "-", "–": "-", "﹣": "-", "－": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "∞": r"\infty ", "°": r"^{\circ}",
    "º": r"^{\circ}", "˚": r"^{\circ}", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
    "≈": r"\approx ",
    "≡": r"\equiv ", "∨": r"\lor ", "∧": r"\land ", "€": r"\text{€}", "£": r"\text{£}", "¥": r"\text{¥}",
    "₹": r"\text{₹}", "¢": r"\text{¢}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ",
    "\u202f": " ", "％": "%", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∠": r"\angle ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "（": "(", "）": ")", "，": ",", "；": ";", "：": ":", "＝": "=", "＋": "+", "／": "/", "＜": "<", "＞": ">",
    "｛": "{", "｝": "}", "［": "[", "］": "]", "．": ".", "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": " ",
}  # fmt: skip
_UNICODE |= {chr(0xFF10 + digit): str(digit) for digit in range(10)}
_FRACTIONS = {
    "½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅖": "25", "⅗": "35", "⅘": "45", "⅙": "16",
    "⅚": "56", "⅐": "17", "⅛": "18", "⅜": "38", "⅝": "58", "⅞": "78", "⅑": "19",
}  # fmt: skip
_UNICODE |= {sign: rf"\frac{{{pair[0]}}}{{{pair[1]}}}" for sign, pair in _FRACTIONS.items()}
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "µ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho",
    "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega",
    "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi",
    "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_UNICODE |= {letter: rf"\{name} " for letter, name in _GREEK.items()}
_TRANSLATION = str.maketrans(_UNICODE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱˣ", "0123456789+-nix")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙₖₓ", "0123456789+-nkx")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱˣ]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙₖₓ]+")

_NAMES = {"pi": r"\pi ", "sqrt": r"\sqrt ", "cbrt": r"\sqrt[3] ", "infinity": r"\infty ", "inf": r"\infty "}
Replacement = str | Callable[[re.Match[str]], str]


# ------------------------------------------------------------------ style commands, and text set upright

_STYLE = re.compile(
    r"\\(?P<color>textcolor|colorbox|color)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}\s*(?P<group>\{)?"
    r"|\\(?P<math>underline|ensuremath|mathstrut|mathop|mathord|mathrel|mathbin|mathnormal|boldsymbol|bm|mathbf|mathit"
    r"|mathsf|mathtt|bold|pmb|large|Large|LARGE|huge|Huge|normalsize|displaystyle|textstyle)\s*\{"
    r"|\\(?P<text>text|textbf|textit|textrm|textnormal|textsf|texttt|textsc|textup|textmd|emph|mbox|hbox|mathrm|rm"
    r"|operatorname|operatorname\*)\s*\{"
)
_BOLD = ("boldsymbol", "bm", "mathbf", "bold", "pmb")
_WORDS_OF_LISTS = {"and": r"\land ", "or": r"\lor ", "&": r"\land ", ",": ","}
_CONSTANTS = ("e", "i", "d")
_OTHER_NAMES = {"tg": "tan", "ctg": "cot", "arctg": "arctan", "arcctg": "arccot", "sh": "sinh", "ch": "cosh"}
_NUMBER_SETS = ("R", "Z", "N", "Q", "C")
_AFTER_NUMBER = re.compile(r"[\d}]\s*$")


def _unstyled(text: str) -> str:
    """``text`` without colours, sizes and fonts; words as ``\\text{…}``."""
    position = 0
    for _ in range(MAX_STYLES):
        match = _STYLE.search(text, position)
        if match is None:
            break
        opening = match.end() - 1
        if match["color"] and not match["group"]:  # \color{red} 84
            text = text[: match.start()] + " " + text[match.end() :]
            continue
        end = closing_brace(text, opening)
        if end < 0:
            break
        inside = text[opening + 1 : end]
        if match["text"]:
            new, keep = _words(inside, match["text"], text[: match.start()])
        elif match["math"] in _BOLD and re.fullmatch(r"\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*", inside):
            new, keep = _bold(inside.strip()), True
        else:
            new, keep = f"{{{inside}}}", False
        text = text[: match.start()] + new + text[end + 1 :]
        position = match.start() + (len(new) if keep else 0)
    return text


def _bold(letter: str) -> str:
    """A bold letter: a set of numbers, or a vector or matrix."""
    return rf"\mathbb{{{letter}}}" if letter in _NUMBER_SETS else rf"\mathbf{{{letter}}}"


def _words(inside: str, command: str, before: str) -> tuple[str, bool]:
    """The content of a text command in one spelling, and whether that is final. ``before`` is the text before it."""
    words = re.sub(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " ", inside)
    words = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", words).replace(r"\cdot", "·")
    bare = words.strip()
    if bare.lower() in _WORDS_OF_LISTS:
        return _WORDS_OF_LISTS[bare.lower()], True
    bare = _OTHER_NAMES.get(bare, bare)
    if bare in (*FUNCTIONS, *OPERATORS) and not (bare in ("min", "sec", "deg") and _AFTER_NUMBER.search(before)):
        return rf"\{bare} ", True
    if bare in _CONSTANTS:
        return bare, True
    if command != "text" and bare in _NUMBER_SETS and re.fullmatch(r"(?:.*\\in)?\s*", before, re.DOTALL):
        return rf"\mathbb{{{bare}}}", True
    if not bare:
        return " ", True
    if re.search(r"[\\{}]", bare) or not re.search(r"[^\W\d_]|[€£¥₹¢]", bare):
        return f"{{{words}}}", False
    return rf"\text{{{words.strip()}}}", True


# ------------------------------------------------------------------------------------ decimals and thousands

_REPEATING = re.compile(
    r"(?P<start>\d*\.\d*)\s*(?:\{\s*)?(?:\\(?:overline|bar|dot)\s*(?:\{\s*(?P<period>\d+)\s*\}|(?P<digit>\d))"
    r"(?P<rest>\d*)(?:\\dot\s*\{?\s*(?P<last>\d)\s*\}?)?|\(\s*(?P<parens>\d+)\s*\))"
)
_SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
_COMMA_IN_NUMBER = re.compile(r"(?<![\d.}])(\d+)((?:\{\s*,\s*\}\d+)+)(\.\d+)?")


def _repeating(match: re.Match[str]) -> str:
    if match["parens"]:
        return rf"{match['start']}\overline{{{match['parens']}}}"
    period = match["period"] or match["digit"]
    if match["last"]:
        period += match["rest"] + match["last"]
    elif match["rest"]:
        return match.group()
    opened = match.group().count("{") - match.group().count("}")
    return "{" * opened + rf"{match['start']}\overline{{{period}}}"


def _comma(match: re.Match[str]) -> str:
    """``1{,}234`` is a number with thousands, ``1{,}5`` one with a decimal comma, ``1{,}2{,}3`` neither."""
    first, groups, decimals = match[1], re.findall(r"\d+", match[2]), match[3] or ""
    if len(first) <= 3 and first != "0" and all(len(group) == 3 for group in groups):
        return first + "".join(groups) + decimals
    if len(groups) == 1 and not decimals and (first == "0" or len(groups[0]) != 3):
        return f"{first}.{groups[0]}"
    return match.group()


# ----------------------------------------------------------------------------------------------- spellings

_COMMANDS = {
    **dict.fromkeys(
        """
        displaystyle textstyle scriptstyle limits nolimits mathstrut strut nonumber notag large Large LARGE huge Huge
        normalsize small footnotesize bf bfseries it itshape sf tt em boldmath centering therefore implies Rightarrow
        checkmark qed quad qquad thinspace enspace medspace thickspace enskip hfill rm
        """.split(),  # noqa: SIM905
        " ",
    ),
    **dict.fromkeys((f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")), ""),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "xfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("cdots", "dots", "ldots", "dotsc", "dotsb"), r"\ldots "),
    **dict.fromkeys(("leq", "leqslant", "le"), r"\le "), **dict.fromkeys(("geq", "geqslant", "ge"), r"\ge "),
    **dict.fromkeys(("neq", "ne"), r"\ne "), "lt": "<", "gt": ">", "coloneqq": "=", "colon": ":",
    **dict.fromkeys(("lor", "vee"), r"\lor "), **dict.fromkeys(("land", "wedge"), r"\land "),
    **dict.fromkeys(("vert", "lvert", "rvert", "mid"), "|"), **dict.fromkeys(("Vert", "lVert", "rVert"), "||"),
    **dict.fromkeys(("backslash", "smallsetminus"), r"\setminus "), "varnothing": r"\emptyset ", "cr": r"\\ ",
    "langle": "(", "rangle": ")", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "surd": r"\sqrt ",
    "R": r"\mathbb{R}", "reals": r"\mathbb{R}", "imath": "i", "jmath": "j", "infin": r"\infty ", "infty": r"\infty ",
    "uppi": r"\pi ", "pi": r"\pi ", "degree": r"^{\circ}", "prime": "'",
}  # fmt: skip
_SYMBOLS = {
    ",": " ", ";": " ", ":": " ", ">": " ", " ": " ", "!": "", "/": "", "(": " ", ")": " ", "[": " ", "]": " ",
    "&": r"\land ", "|": "||",
}  # fmt: skip
_COMMAND = re.compile(r"\\\\(?:\s*\[[^\[\]]*\])?|\\([A-Za-z]+)|\\(.)", re.DOTALL)
_ACCENTED = r"\\(vec|hat|bar|tilde|overline|mathbf|dot|ddot)"


def _command(match: re.Match[str]) -> str:
    if match[1]:
        return _COMMANDS.get(match[1], match.group())
    if match[2]:
        return _SYMBOLS.get(match[2], match.group())
    return r"\\ "  # a new row, without the space below it


# Text that must occur for the rule to apply (empty: always), what is replaced, and by what.
_RULES: list[tuple[str, str, Replacement]] = [
    ("", r"\s+", " "),
    (r"\le", r"\\left\s*<", "("),
    (r"\ri", r"\\right\s*>", ")"),
    (r"\le", r"\\left(?![A-Za-z])\s*\.?", ""),
    (r"\ri", r"\\right(?![A-Za-z])\s*\.?", ""),
    (r"\mi", r"\\middle(?![A-Za-z])\s*\.?", ""),
    (r"\rm", r"\\rm\s+([A-Za-z]{2,})", r"\\text{\1}"),
    ("space", r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
    ("{", r"\\(?:label|tag\*?)\s*\{[^{}]*\}", ""),
    ("$", r"(?<!\\)\$", " "),
    ("~", r"(?<!\\)~", " "),
    (r"\not", r"\\not\s*=", r"\\ne "),
    ("\\", _COMMAND.pattern, _command),
    (r"\fr", r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
    (r"\sq", r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}"),
    (r"\log", r"\\log\s*_\s*(\d)", r"\\log_{\1}"),
    ("bb", r"\\(?:Bbb|mathbb)\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb{\1}"),
    ("\\", rf"{_ACCENTED}\s+([A-Za-z0-9])(?![A-Za-z])", r"\\\1{\2}"),
    ("\\", rf"{_ACCENTED}\s*\{{\s*([A-Za-z])\s*\}}", r"\\\1{\2}"),
    ("..", r"\.\s?\.\s?\.", r"\\ldots "),
    ("and", r"\\text\{[^{}]*\}|\s*(?<![A-Za-z\\])and(?![A-Za-z])\s*",
     lambda m: m.group() if m.group()[0] == "\\" else r"\land "),
    ("or", r"\\text\{[^{}]*\}|\s*(?<![A-Za-z\\])or(?![A-Za-z])\s*",
     lambda m: m.group() if m.group()[0] == "\\" else r"\lor "),
    (",", r",\s*(?:,\s*)+", ","),
    (",", r",\s*(\\l(?:and|or) )", r"\1"),  # 19, 46, and 82
    (":", r"\{\s*:\s*\}|\\mathbin\s*:", ":"),
    ("=", r":=|==", "="),
    (r"\circ", r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?", r"^{\\circ}"),
    ("^", r"(?<=[\d}])\^\s*\{?\s*(?:o(?![A-Za-z])|\\text\{o\})\s*\}?", r"^{\\circ}"),
    ("%", r"(?<!\\)%", r"\\%"),
    ("c", r"\s*(?<![A-Za-z\\])(?:per\s?cent|pct)(?![A-Za-z])|\s*\\text\{(?:per\s?cent|pct)\}", r"\\%"),
    ("<=", r"<=", r"\\le "),
    (">=", r">=", r"\\ge "),
    ("!=", r"!=", r"\\ne "),
    (r"\{", r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\abs", r"\\abs\s*\{([^{}]*)\}", r"|\1|"),
    ("'", r"\^\s*\{\s*((?:'\s*)+)\}|\^\s*'", lambda m: "'" * m.group().count("'")),
    ("i", r"\\text\{[^{}]*\}|(?<![A-Za-z\\])(pi|infinity|inf)(?![A-Za-z])",
     lambda m: _NAMES[m[1]] if m[1] else _NAMES.get(m.group()[6:-1].strip().lower(), m.group())),
    ("rt", r"(?<![A-Za-z\\])(sqrt|cbrt)(?![A-Za-z])", lambda m: _NAMES[m[1]]),
    ("rt", r"\\(sqrt(?:\[3\])?)\s*\(([^()]*)\)", r"\\\1{\2}"),
    ("C", r"(?<![A-Za-z\\\d{])(?:\{\s*\})?([_^])\s*(?:\{\s*(\w+)\s*\}|(\w))\s*C\s*_\s*(?:\{\s*(\w+)\s*\}|(\w))",
     lambda m: rf"\binom{{{m[2] or m[3]}}}{{{m[4] or m[5]}}}"),
    (r"\pm", r"\\pmatrix\s*\{([^{}]*)\}", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    ("**", r"\*\*", "^"),
    ("*", r"(?<!\^)(?<!\^\{)\*", r"\\cdot "),
]  # fmt: skip
_SPACES = re.compile(r"\s{2,}")
_COMPILED = [(trigger, re.compile(pattern).sub, replacement) for trigger, pattern, replacement in _RULES]

_PLAIN = re.compile(r"-?\d{1,15}", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_QUOTES = re.compile(r"^\s*(?:\"(.*)\"|''(.*)''|``(.*)''|'(.*)'|`(.*)`|\*\*(.*)\*\*)\s*$", re.DOTALL)
_ONLY_TEXT = re.compile(r"\s*\\text\{([^{}\\]*)\}\s*\.?\s*")
_NUMBER_AND_WORDS = re.compile(r"\s*([-+]?[\d.,]+)\s+(?!and\b|or\b)([A-Za-z][^\d,;=]*)")


def normalise(answer: str) -> str | None:
    """The answer in one spelling; None if it is empty, too long or nested too deeply to be an answer."""
    if _PLAIN.fullmatch(answer):
        return answer
    if _THOUSANDS.fullmatch(answer):
        return answer.replace(",", "") if len(answer) <= MAX_CHARACTERS else None
    if not answer or len(answer) > MAX_CHARACTERS or depth(answer) > MAX_DEPTH:
        return None
    text = answer
    if not text.isascii():
        text = _RAISED_RUN.sub(lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)
        text = _LOWERED_RUN.sub(lambda match: f"_{{{match.group().translate(_LOWERED)}}}", text)
        text = text.translate(_TRANSLATION)
    quoted = _QUOTES.match(text)
    if quoted:
        text = next(filter(None, quoted.groups()), "")
    if "\\" in text or "{" in text or "~" in text:
        text = _SPACE_IN_NUMBER.sub("{,}", re.sub(r"(?<=\d)\s*(?:,|\{\s*,\s*\})\s*\\!\s*(?=\d{3}(?!\d))", "{,}", text))
        text = _unstyled(text)
        only = _ONLY_TEXT.fullmatch(text)
        if only:
            text = _out_of_text(only[1])
        text = _COMMA_IN_NUMBER.sub(_comma, text)
    if "." in text:
        text = _REPEATING.sub(_repeating, text)
    for trigger, substitute, replacement in _COMPILED:
        if trigger in text:
            text = substitute(replacement, text)
    return trim(_SPACES.sub(" ", text)) or None


def _out_of_text(words: str) -> str:
    r"""The content of an answer that is one ``\text{…}``; words stay in it."""
    if re.fullmatch(r"\s*[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*\.?\s*", words) and not re.search(r"\b(?:and|or)\b", words):
        return rf"\text{{{words}}}"
    number = _NUMBER_AND_WORDS.fullmatch(words)
    return rf"{number[1]}\text{{ {number[2]}}}" if number else words


_CANONICAL = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S")


def canonical(text: str) -> tuple[str, ...]:
    """The tokens of a normalised answer without spaces and without braces around a single token."""
    tokens: list[str] = []
    for token in _CANONICAL.findall(text):
        if token == "}" and len(tokens) > 1 and tokens[-2] == "{":
            tokens[-2:] = [tokens[-1]]
        else:
            tokens.append(token)
    return tuple(tokens)
