"""Judging answers by their text alone: the microsecond path of the grader.

`quick_grade` settles what needs no algebra (equal strings, plain numbers with or without units, words) and what can be
refused without any (hedges, endless answers). Everything else is None: for math-verify to decide. Nothing here
evaluates text, and every step is linear in its length.

Decisions:

- Numbers compare as exact fractions. Where one is a decimal, float noise (relative 1e-12) is forgiven; a difference
  below 1e-5 is left to math-verify, which rounds to six decimals.
- ``50\\%`` equals ``50%``, and, as in math-verify, also 50 and 0.5: data sets differ in how they write a percentage.
- A unit on one side only is ignored (``18 dollars`` is 18, ``90^\\circ`` is 90); a word that changes the number
  (million, dozen, squared, ...) is not a unit.
- An answer that offers several (``18 or 19``), or two numbers side by side (``18 19``, over two lines too), is wrong
  unless the gold answer is written the same way.
- An answer longer than `MAX_ANSWER_CHARS` is wrong unless it is the gold answer to the letter.
"""

import ast
import re
from fractions import Fraction
from typing import NamedTuple

MAX_ANSWER_CHARS = 2_000  # ten times the longest gold answer of MATH; math-verify's parsers are not linear

_SHORT_INTEGER = re.compile(r"-?[0-9]{1,18}")
_SPACES = re.compile(r"\s+")
_SPACE_OUTSIDE_WORDS = re.compile(r"(?<!\w) | (?!\w)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_REPLACEMENTS = (
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\quad(?![a-zA-Z])"), " "),
    (re.compile(r"\u2212"), "-"),
)

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:\\?\$)?\s*(?P<inner_sign>[+-]?)\s*
    (?: \\frac\s*(?:\{{\s*(?P<fs>[+-]?)(?P<fa>{_INTEGER})\s*\}}|(?P<fa1>\d))
            \s*(?:\{{\s*(?P<fb>{_INTEGER})\s*\}}|(?P<fb1>\d))
      | (?P<a>{_INTEGER})\s*/\s*(?P<b>{_INTEGER})
      | (?P<decimal>{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d{{1,3}}))?
    )\s*(?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
_UNIT = re.compile(r"(?:\\(?:text|mbox|mathrm|textrm)\s*\{(?P<text>[^{}\d\\]*)\}|(?P<plain>[a-zA-Z ]+))\s*")
_UNIT_SIGNS = {"\\%": "%", "%": "%", "^\\circ": "degrees", "^{\\circ}": "degrees", "°": "degrees", "\\$": "dollars"}
_NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|score|percent|squared|cubed|factorial|half|halves|quarters?|"
    r"(?:third|fourth|fifth|sixth|eighth|tenth|hundredth|thousandth)s?|"
    r"mod|and|or|not|plus|minus|times|over|to|sqrt|sin|cos|tan|log|exp|inf|infinity|nan)\b",
    re.IGNORECASE,
)

_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|textrm)\s*\{([^{}]*)\}")
_HEDGE = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])", re.IGNORECASE)
_DIGIT_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|textrm)\s*\{[^{}]*\d")
# Two numbers with only space between; a mixed number (1 1/2) is one number.
_SIDE_BY_SIDE = re.compile(r"\d\s+\d+(?!\d|\s*/)")


class PlainNumber(NamedTuple):
    """A number as written: its value, whether it has a decimal point or exponent, and its unit ("" for none)."""

    value: Fraction
    is_decimal: bool
    unit: str


def quick_grade(answer: str, gold: str) -> bool | None:
    """True or False where the texts alone decide whether ``answer`` equals ``gold``; None where algebra must."""
    if answer == gold:
        return bool(gold.strip())
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if _SHORT_INTEGER.fullmatch(answer) and _SHORT_INTEGER.fullmatch(gold):
        return int(answer) == int(gold)
    answer, gold = normalise(answer), normalise(gold)
    if not answer or not gold:
        return False
    if _SPACE_OUTSIDE_WORDS.sub("", answer) == _SPACE_OUTSIDE_WORDS.sub("", gold):
        return True
    if words := _TEXT.fullmatch(gold):
        inner = _TEXT.fullmatch(answer)
        return _words(inner[1] if inner else answer) == _words(words[1])
    if any(pattern.search(answer) and not pattern.search(gold) for pattern in (_HEDGE, _DIGIT_IN_TEXT, _SIDE_BY_SIDE)):
        return False
    if not _balanced(answer):
        return False
    return _compare_numbers(answer, gold)


def normalise(text: str) -> str:
    """Strip what carries no meaning: math delimiters, an outer ``\\boxed``, sizing, spacing, a final full stop."""
    text = _SPACES.sub(" ", text).strip()
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _SPACES.sub(" ", text).strip()
    for _ in range(3):
        before = text
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for left, right in _DELIMITERS:
            inner = text[len(left) : len(text) - len(right)]
            if (
                text.startswith(left)
                and text.endswith(right)
                and len(text) > len(left + right)
                and left[-1] not in inner
            ):
                text = inner.strip()
        if text.startswith("\\boxed{") and text.endswith("}") and _balanced(text[7:-1]):
            text = text[7:-1].strip()
        if text == before:
            break
    return text


def plain_number(text: str) -> PlainNumber | None:
    """Read a normalised text as one number, with at most a sign, a dollar sign and a unit; None when it is more."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_ANSWER_CHARS else None
    if match is None:
        return None
    unit = _unit(match["unit"].strip())
    if unit is None or (match["sign"] and match["inner_sign"]):
        return None
    over = match["fb"] or match["fb1"] or match["b"] or "1"
    under = match["fa"] or match["fa1"] or match["a"] or match["decimal"]
    if int(over.replace(",", "")) == 0:
        return None
    value = Fraction(under.replace(",", "").rstrip(".") or "0") / int(over.replace(",", ""))
    exponent = int(match["exponent"] or 0)
    value = value * 10**exponent if exponent >= 0 else value / 10**-exponent
    if "-" in (match["sign"], match["inner_sign"], match["fs"]):
        value = -value
    return PlainNumber(value, "." in under or match["exponent"] is not None, unit)


def python_to_latex(text: str) -> str:
    """Write a Python expression (what ``str`` makes of a sympy or Python value) as LaTeX; other text stays as it is.

    Nothing is evaluated: the syntax tree is printed, for the few node types that spell mathematics.
    """
    if re.search(r"[\\^${]", text) or not re.search(r"[a-zA-Z*]", text):
        return text
    try:
        return _latex(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _latex(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=int() | float() as value):
            return str(value)
        case ast.Name(id=name):
            return {"pi": "\\pi", "oo": "\\infty", "inf": "\\infty", "E": "e", "I": "i"}.get(name, name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-{_latex(operand)}"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"({_latex(left)})^{{{_latex(right)}}}"
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"\\frac{{{_latex(left)}}}{{{_latex(right)}}}"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return f"({_latex(left)}) \\cdot ({_latex(right)})"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_latex(left)} + {_latex(right)}"
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return f"{_latex(left)} - ({_latex(right)})"
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            return f"\\sqrt{{{_latex(argument)}}}"
        case ast.Call(func=ast.Name(id="Fraction" | "Rational"), args=[over, under], keywords=[]):
            return f"\\frac{{{_latex(over)}}}{{{_latex(under)}}}"
        case ast.Call(func=ast.Name(id="sin" | "cos" | "tan" | "log" | "exp" as name), args=[argument], keywords=[]):
            return f"\\{name}({_latex(argument)})"
        case ast.Tuple(elts=[_, _, *_] as elements):
            return f"({', '.join(map(_latex, elements))})"
    raise ValueError("not a mathematical expression")


def _compare_numbers(answer: str, gold: str) -> bool | None:
    if "=" not in gold:
        answer = re.sub(r"^[a-zA-Z] ?= ?", "", answer)
    a, g = plain_number(answer), plain_number(gold)
    if g is not None and a is None and _NO_UNIT.search(answer):
        # "18 million" for 18, in whichever way it is typeset: math-verify would take the word for a unit.
        return False if _NUMBER.fullmatch(answer) else None
    if a is None or g is None or (a.unit == "%") != (g.unit == "%"):
        return None
    if a.unit and g.unit and a.unit != g.unit:
        return None
    if a.value == g.value:
        return True
    if not (a.is_decimal or g.is_decimal):
        return False
    difference = abs(a.value - g.value)
    if difference * 10**12 <= min(abs(g.value), Fraction(1000)):
        return True
    return False if difference > Fraction(1, 10**5) else None


def _unit(text: str) -> str | None:
    """The unit that ``text`` is, normalised ("" for none); None when it is something else."""
    if not text:
        return ""
    if text in _UNIT_SIGNS:
        return _UNIT_SIGNS[text]
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    words = (match["text"] if match["text"] is not None else match["plain"]).lower().split()
    if _NO_UNIT.search(text):
        return None
    # Letters without a \text around them may be variables: only words of three letters or more are units.
    if match["plain"] is not None and any(len(word) < 3 for word in words):
        return None
    return " ".join(words)


def _words(text: str) -> str:
    """A text answer for comparison: case, spaces and surrounding brackets or full stop dropped."""
    return "".join(text.lower().split()).strip("().")


def _balanced(text: str) -> bool:
    """True when every brace closes and none closes before it opens."""
    depth = 0
    for token in re.finditer(r"\\[\s\S]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    return depth == 0
