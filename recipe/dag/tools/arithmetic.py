"""Exact arithmetic on a text, for the tool `calculator`.

Invariant: nothing is executed: the text is parsed, and each kind of term has a rule here. No input takes long or much
memory, since the length of the text, the size of every number and the arguments of growing functions are limited.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_CHARS = 1000
MAX_BITS = 4096
"""Of the numerator and denominator of an exact number: about 1,200 digits."""
MAX_NESTING = 50
_LARGEST_FACTORIAL = 500

Number = int | Fraction | float


class CalculationError(Exception):
    """The expression has no value; the text says why."""


_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "π": " pi ", "\n": " "})
_NUMBER = re.compile(r"(?:\d[\d_]*)?\.?\d[\d_]*\.?(?:[eE]([+-]?\d+))?")
_GROUPED = re.compile(r"\d,\d{3}(?!\d)")
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*(?:(?<=[eE])[+-]\d+)?")
_STRANGE = re.compile(r"[^\w\s.,+*/%()\[\]=<>-]|[^\x00-\x7f]")
_BRACKETS = {"(": 1, "[": 1, ")": -1, "]": -1}


def evaluate(text: str) -> Number:
    """Return the value of an arithmetic expression: an int or Fraction where it is exact, else a float. `^` is a power.

    Raises CalculationError."""
    if len(text) > MAX_CHARS:
        raise CalculationError(f"the expression has {len(text)} characters; at most {MAX_CHARS} are read")
    source = text.translate(_SIGNS).replace("^", "**").strip()
    if not source:
        raise CalculationError("the expression is empty")
    _check_tokens(source)
    _check_nesting(source)
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculationError(_reason(text)) from None
    try:
        return _checked(_Evaluator(source).value(tree.body))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError("the result is too large") from None
    except RecursionError:
        raise CalculationError("the expression is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise CalculationError(str(error)) from None


def show(value: Number, digits: int = 12) -> str:
    """Return a value as text: whole numbers with all digits, other exact ones as fraction and decimal number."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        try:
            decimal = f"{float(value):.{digits}g}"
        except OverflowError:
            return str(value)
        return decimal if Fraction(decimal) == value else f"{value} = {decimal} (rounded)"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def _check_tokens(source: str) -> None:
    """Reject what Python's parser would warn of, such as `2x`, and signs that no expression has."""
    if strange := _STRANGE.search(source):
        raise CalculationError(f"only arithmetic is allowed, not `{strange[0]}`")
    for token in _TOKEN.findall(source):
        if token[0].isdigit() and _NUMBER.fullmatch(token) is None:
            raise CalculationError(f"`{token[:40]}` is not a number; write * between factors")


def _check_nesting(source: str) -> None:
    """Limit what makes a parser recurse: brackets, and signs in a row."""
    depth = deepest = signs = 0
    for character in source:
        depth += _BRACKETS.get(character, 0)
        signs = signs + 1 if character in "+-~" else signs if character.isspace() else 0
        deepest = max(deepest, depth, signs)
    if deepest > MAX_NESTING:
        raise CalculationError(f"the expression is nested too deeply (more than {MAX_NESTING})")


def _reason(text: str) -> str:
    if "=" in text:
        return "this is not one arithmetic expression: there are no equations or variables"
    if re.search(r"%\s*(?:$|[)+*/-])", text):
        return "this is not one arithmetic expression: write 15/100 for 15 %; `%` is the remainder"
    return "this is not one arithmetic expression, such as 2*(3+4)^2 or sqrt(2)/3"


class _Evaluator:
    def __init__(self, source: str) -> None:
        self._source = source

    def value(self, node: ast.expr) -> Number:
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Name):
            return _known(CONSTANTS, node.id, "number")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            operand = self.value(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _checked(_OPERATIONS[type(node.op)](self.value(node.left), self.value(node.right)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            function = _known(FUNCTIONS, node.func.id, "function")
            return _checked(function(*self._arguments(node.args)))
        part = ast.get_source_segment(self._source, node) or ""
        hint = "; write 1234, not 1,234" if isinstance(node, ast.Tuple) and _GROUPED.search(part) else ""
        raise CalculationError(f"only arithmetic is allowed, not `{part[:40]}`{hint}")

    def _arguments(self, nodes: list[ast.expr]) -> list[Number]:
        """Return the values of a call's arguments; a list counts as its items, as in sum([1, 2])."""
        values = []
        for node in nodes:
            values += map(self.value, node.elts) if isinstance(node, ast.List | ast.Tuple) else [self.value(node)]
        return values

    def _constant(self, node: ast.Constant) -> Number:
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            return node.value
        text = ast.get_source_segment(self._source, node) or ""
        match = _NUMBER.fullmatch(text)
        if not isinstance(node.value, float) or match is None:
            raise CalculationError(f"only numbers are allowed, not `{text[:40]}`")
        # a decimal number is exact here: 0.1 + 0.2 is 0.3; a large exponent would be written out
        if match[1] is not None and abs(int(match[1])) > MAX_BITS // 4:
            raise CalculationError("the result is too large")
        return _simplest(Fraction(text.replace("_", "")))


def _checked(value: Number) -> Number:
    """Return the value, whole numbers as int. Raises CalculationError for one that is not finite, or too large."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculationError("the result is too large" if math.isinf(value) else "the result is not a number")
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("the result is too large")
    return _simplest(value)


def _simplest(value: int | Fraction) -> Number:
    return value.numerator if value.denominator == 1 else value


def _divide(left: Number, right: Number) -> Number:
    return left / right if isinstance(left, float) or isinstance(right, float) else Fraction(left) / right


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or not isinstance(exponent, int):
        return _root(base, exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length(), 1)
    # 0, 1 and -1 stay small, whatever the exponent
    if bits > 1 and (bits - 1) * abs(exponent) > MAX_BITS:
        raise CalculationError("the result is too large")
    if abs(base) == 1 or base == 0:
        exponent = min(exponent, 1) if base == 0 else exponent % 2
    return Fraction(base) ** exponent


def _root(base: Number, exponent: Number) -> Number:
    """Return a power whose base or exponent is not exact, or whose exponent is a fraction; exact if it can be."""
    if exponent == Fraction(1, 2):
        return _square_root(base)
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise CalculationError("a fractional power of a negative number is not real")
    return result


def _square_root(value: Number) -> Number:
    if not isinstance(value, float) and value >= 0:
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if (roots[0] ** 2, roots[1] ** 2) == (value.numerator, value.denominator):
            return Fraction(*roots)
    return _real(math.sqrt)(value)


def _real(function: Callable[..., float]) -> Callable[..., float]:
    def apply(*values: Number) -> float:
        try:
            return function(*(float(value) if isinstance(value, Fraction) else value for value in values))
        except ValueError:
            arguments = ", ".join(show(value) for value in values)
            raise CalculationError(f"{function.__name__}({arguments[:80]}) is not a real number") from None

    return apply


def _whole(function: Callable[..., int], largest: int | None = None) -> Callable[..., int]:
    """Return a function of whole numbers, none above `largest`."""

    def apply(*values: Number) -> int:
        if not all(isinstance(value, int) for value in values):
            raise CalculationError(f"{function.__name__} takes whole numbers")
        if largest is not None and any(value > largest for value in values):
            raise CalculationError(f"{function.__name__} takes numbers up to {largest}")
        return function(*values)

    return apply


def _rounded(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise CalculationError("round takes a whole number of digits, up to 100")
    return round(Fraction(value), digits) if digits else round(value)


def _log(value: Number, base: Number = math.e) -> float:
    return _real(math.log)(value) if base == math.e else _real(math.log)(value) / _real(math.log)(base)


def _known(table: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in table:
        raise CalculationError(f"there is no {kind} `{name[:40]}`; known: {', '.join(table)}")
    return table[name]


_OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: _divide,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}
CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sqrt": _square_root,
    "cbrt": _real(math.cbrt),
    "abs": abs,
    "round": _rounded,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "sum": lambda *values: sum(values),
    "mean": lambda *values: _divide(sum(values), len(values)),
    "factorial": _whole(math.factorial, _LARGEST_FACTORIAL),
    "comb": _whole(math.comb, _LARGEST_FACTORIAL),
    "perm": _whole(math.perm, _LARGEST_FACTORIAL),
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "exp": _real(math.exp),
    "ln": _real(math.log),
    "log": _log,
    "log2": _real(math.log2),
    "log10": _real(math.log10),
    **{name: _real(getattr(math, name)) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: _real(getattr(math, name)) for name in ("sinh", "cosh", "tanh", "degrees", "radians", "hypot")},
}
