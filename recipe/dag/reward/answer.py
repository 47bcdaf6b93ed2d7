"""Extraction of an answer from a text, and comparisons that need no algebra.

Invariant: pure functions of strings; model text is never evaluated. `quick_equal` returns True or False only if an
exact comparison of rational numbers, or of identical strings, decides; the grader compares everything else.
"""

from __future__ import annotations

import re
from fractions import Fraction

from recipe.dag.types.markup import after_thinking, prose

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_ANSWER_IS = re.compile(r"answer\s*(?:is|:)\s*:?[ \t]*", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+)")


def extract_answer(text: str, *, strict: bool = True, complete: bool = True, tagged: bool = False) -> str | None:
    r"""Return the answer of a solution, or None.

    The answer is the last non-blank \boxed{...} or \fbox{...} with balanced braces. Thoughts, tool calls and Python
    blocks are not searched.

    strict: if False (the published behaviour), fall back to the text after the last "answer is", then the last number
    complete: if False, the text was cut off, so a box without braces at its end may lack digits and does not count
    tagged: prefer the content of the last <answer>...</answer>, or the last box in it
    """
    text = prose(text) if strict else after_thinking(text)
    if tagged:
        for inside in reversed(_TAGGED.findall(text)):
            if inside.strip():
                return _last_box(inside, complete=True) or inside.strip()
    if inside := _last_box(text, complete=complete or not strict):
        return inside
    if strict:
        return None
    if matches := list(_ANSWER_IS.finditer(text)):
        return _sentence(text[matches[-1].end() :].partition("\n")[0]) or None
    numbers = _PLAIN_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _last_box(text: str, *, complete: bool) -> str:
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        inside, braced = _boxed(text, start), text[start : start + 1] == "{"
        if not complete and (start == len(text) or (braced and not _closes(text, start))):
            return ""  # the text was cut off in a later box, which would have replaced the earlier ones
        cut_off = not complete and not braced and start + len(inside) == len(text)
        if inside and not cut_off:
            return inside
    return ""


def _boxed(text: str, start: int) -> str:
    """Return the content of the braces that open at `start`, or the token there; "" if the braces never close."""
    if start >= len(text):
        return ""
    if text[start] != "{":
        return re.split(r"[\s$.,;}]", text[start:], maxsplit=1)[0]
    end = _closes(text, start)
    return text[start + 1 : end].strip() if end else ""


def _closes(text: str, start: int) -> int:
    """Return the index at which the brace that opens at `start` closes; 0 if it never does."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":  # an escaped brace is text
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
        at += 1
    return 0


def _sentence(text: str) -> str:
    """Return the first sentence, or the formula that it starts with, without surrounding markup."""
    if math := re.match(r"\s*(?:\$+|\\\(|\\\[)(.+?)(?:\$+|\\\)|\\\])", text):
        return math[1].strip()
    return re.split(r"[.!?](?:\s|$)", text.strip(), maxsplit=1)[0].strip(" *_`\"'")


_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\s*=\s*|(?<=[^\s\\])\s*[,;]\s*$", ""),
        (r"(?<=\d)\s*(?:percent|\\text\{\s*percent\s*\})\s*$", r"\\%"),
        (r"(?<=\d)\s*(?:dollars?|\\text\{\s*dollars?\s*\})\s*$", ""),
        (r"^(\s*[+-]?\s*\d+)\s+([1-9]\d*)\s*/\s*([1-9]\d*)\s*$", r"\1\\frac{\2}{\3}"),
    )
)


def plain_spelling(text: str) -> str:
    r"""Return the answer as mathematics: without an equals sign before it or a comma behind it, with \% for percent,
    without dollars, and mixed numbers (2 1/2) with \frac."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[\u2212\u2013]", "-"),
        (r",\\!\s*|\{,\}", ","),
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:left|right)(?![a-zA-Z])\s*", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\\$|\$|\\[()\[\]](?=\s*$)|^\s*\\[()\[\]]", ""),
        (r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\u00b0)", ""),
        (r"\*\*", "^"),
        (r"\s+", " "),
        (r"(?<!\d)\s|\s(?!\d)", ""),
    )
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed)\{([^{}]*)\}")


def normalize(text: str) -> str:
    r"""Return a canonical spelling: without \left and \dfrac, degree and dollar signs, optional spaces, a final full
    stop."""
    text = plain_spelling(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").rstrip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1].strip()
    return text


_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<num>{_DECIMAL})(?:[eE](?P<exp>[+-]?\d{{1,3}}))?(?:\s*/\s*(?P<den>{_DECIMAL}))?"
    r"|(?P<whole>\d+)?\\frac(?:(?P<n1>\d)(?P<d1>\d)|\s?\{(?P<n2>-?\d+)\}\s?(?:\{(?P<d2>-?\d+)\}|(?P<d4>\d))|\s?(?P<n3>\d)\s?\{(?P<d3>-?\d+)\}))"
    r"(?P<percent>\\?%)?"
)
_MAX_DIGITS = 1000


def _value(text: str) -> tuple[Fraction, bool] | None:
    """Return the rational number in a normalized text, and if it is a percentage; None if it is not a plain number."""
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    if match is None:
        return None
    groups = match.groupdict()
    numerator = next(groups[key] for key in ("num", "n1", "n2", "n3") if groups[key])
    denominator = next((groups[key] for key in ("den", "d1", "d2", "d3", "d4") if groups[key]), "1")
    below = Fraction(denominator.replace(",", ""))
    if below == 0:
        return None
    if groups["whole"] and not 0 < Fraction(numerator) < below:
        return None  # a product, or no mixed number
    value = Fraction(numerator.replace(",", "")) * Fraction(10) ** int(groups["exp"] or 0) / below + int(
        groups["whole"] or 0
    )
    return (-value if groups["sign"] == "-" else value), bool(groups["percent"])


_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_UNIT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\{[~\s]*([a-zA-Z ]+?)\s*(?:\^\s*\{?(\d)\}?)?\s*\}\s*(?:\^\s*\{?(\d)\}?)?$"
)
_INFINITY = r"(?:\\infty(?![a-zA-Z])|\u221e)"
_FROM_INFINITY = re.compile(rf"([(\[\]])-{_INFINITY}")
_TO_INFINITY = re.compile(rf"{_INFINITY}([)\[\]])")


def _differ_in_notation(a: str, b: str) -> bool:
    """Return whether two normalized texts differ in what the algebra ignores: the base of a number, the power of a
    unit, or whether an interval includes infinity."""
    first, second = _BASE.search(a), _BASE.search(b)
    if first and second and first[1] != second[1]:
        return True
    first, second = _UNIT.search(a), _UNIT.search(b)
    if first and second and first[1] == second[1] and (first[2] or first[3]) != (second[2] or second[3]):
        return True
    first, second = (
        [x == "[" for x in _FROM_INFINITY.findall(t)] + [x == "]" for x in _TO_INFINITY.findall(t)] for t in (a, b)
    )
    return len(first) == len(second) and sorted(first) != sorted(second)


def quick_equal(a: str, b: str) -> bool | None:
    """Compare two plain numbers, identical strings, or notations that differ; None if the comparison needs algebra.

    If only one side is a percentage, it equals both its number and a hundredth of it. Numbers that differ by no more
    than a rounding error in the fifth place are undecided (None).
    """
    a, b = normalize(a), normalize(b)
    if a and a == b:
        return True
    if _differ_in_notation(a, b):
        return False
    first, second = _value(a), _value(b)
    if first is None or second is None:
        return None
    (x, x_percent), (y, y_percent) = first, second
    pairs = [(x, y)]
    if x_percent != y_percent:
        pairs.append((x / 100, y) if x_percent else (x, y / 100))
    if any(left == right for left, right in pairs):
        return True
    close = any(abs(left - right) <= Fraction(1, 100_000) * max(1, abs(right)) for left, right in pairs)
    return None if close else False


def first_number(text: str) -> float | None:
    r"""Return the first fraction a/b in the text, else the first number, in any context; None without one.

    Deliberately coarse, to compare a program's output with a label. "x1 = 7" is 1.0.
    """
    text = re.sub(r"[^0-9.\-/]", " ", text.replace("\\boxed", ""))
    number = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
    try:
        if fraction := re.search(rf"({number})\s*/\s*({number})", text):
            return float(fraction[1]) / float(fraction[2])
        match = re.search(number, text)
        return float(match[0]) if match else None
    except (ZeroDivisionError, OverflowError):
        return None


_HEAVY = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d\s*\)?\s*\^\s*[{(]*\s*-?\d+\s*[})]*\s*\^",
        r"\^\s*[{(]*\s*-?\d{5,}",
        r"\d{5,}\s*[})]*\s*!|!\s*[})]*\s*!",
        r"\\[dt]?binom\s*\{\s*\d{6,}|\^\s*\{?\s*-?\d{6,}",
    )
)
_MAX_CHARS = 2000


def hopeless(prediction: str, truth: str) -> bool:
    """Return True if a prediction is too expensive to compare: far longer than an answer, or with towers of powers or
    huge factorials that the truth does not have. It counts as wrong; a worker would be busy with it until killed."""
    if len(prediction) > max(_MAX_CHARS, 2 * len(truth)):
        return True
    prediction, truth = prediction.replace("**", "^"), truth.replace("**", "^")
    return any(pattern.search(prediction) and not pattern.search(truth) for pattern in _HEAVY)
