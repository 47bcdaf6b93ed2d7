"""Kinds of values of keys in the run's configuration and of flags.

Invariant: hydra parses the values, and only `ValueKind.accepts` checks them. An accepted value can be written into the
workflow or the run's configuration unchanged. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from recipe.dag.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag or key with its value, as it was passed."""

    flag: str
    """Full name of the key."""
    text: str
    """The text after the `=`."""
    value: Any = None
    """The parsed text."""

    def __str__(self) -> str:
        return " ".join(f"{self.flag}={self.text}".split())


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A set of values."""

    takes: str
    """Description for error messages: `a whole number, 1 or more`."""
    accepts: Callable[[Any], bool]

    def read(self, flag: str, text: str) -> Argument:
        """Parse a flag's value. Raises UserError, which names the flag and the values that it takes."""
        argument = Argument(flag, text, hydra_value(text))
        if not self.accepts(argument.value):
            raise UserError(f"{argument}: it takes {self.takes}")
        return argument


class _Unreadable:
    """Represents text that is not a value of any kind."""


def hydra_value(text: str) -> Any:
    """Return the value that hydra parses; a sweep (`1,2`) and unreadable text give a value that no kind accepts."""
    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except (HydraException, ValueError, RecursionError):
        return _Unreadable()


def whole(low: int = 1, *also: int) -> ValueKind:
    takes = f"a whole number, {low} or more"
    if also:
        takes += f" ({', '.join(map(str, also))} is off)"
    return ValueKind(takes, lambda value: type(value) is int and (value >= low or value in also))


def number(takes: str = "a number", within: Callable[[float], bool] = lambda value: True) -> ValueKind:
    """Return the kind of finite numbers in the range `within`, which `takes` describes."""

    def accepts(value: Any) -> bool:
        if type(value) not in (int, float) or abs(value) > 1e300:  # a larger int may not fit into a float
            return False
        return math.isfinite(value) and within(value)

    return ValueKind(takes, accepts)


def or_null(kind: ValueKind) -> ValueKind:
    return ValueKind(f"{kind.takes}, or null", lambda value: value is None or kind.accepts(value))


def one_of(*choices: str) -> ValueKind:
    return ValueKind(f"one of {', '.join(choices)}", lambda value: value in choices)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_names(value: Any, among: tuple[str, ...]) -> bool:
    return isinstance(value, list) and bool(value) and all(name in among for name in value)


def names(*among: str) -> ValueKind:
    return ValueKind(f"a list [...] of {', '.join(among)}", lambda value: _are_names(value, among))


STRING = ValueKind("text", lambda value: isinstance(value, str))
LIST = ValueKind("a list [...]", lambda value: isinstance(value, list))
TRUTH = ValueKind("True or False", lambda value: type(value) is bool)
TEXT = ValueKind("text", _is_text)
PATH = ValueKind("a path", _is_text)
PATHS = ValueKind(
    "a path, or a list [A,B] of paths",
    lambda value: _is_text(value) or isinstance(value, list) and bool(value) and all(map(_is_text, value)),
)
ANY = ValueKind("a value", lambda value: True)

COUNT = whole(1)
FINITE = number()
POSITIVE = number("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a number of at least 0", lambda value: value >= 0)
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
PART = number("a number above 0, up to 1", lambda value: 0 < value <= 1)
ABOVE_ONE = number("a number above 1", lambda value: value > 1)
