"""Conditions in words, for plans and pictures.

Invariant: equal conditions give equal words.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.schema import Condition


def in_words(condition: Condition) -> str:
    return _words(condition, inside=False)


def _words(condition: Condition, *, inside: bool) -> str:
    for join, word in (("all_of", "and"), ("any_of", "or"), ("none_of", "or")):
        parts = getattr(condition, join)
        if parts is None:
            continue
        text = f" {word} ".join(_words(part, inside=len(parts) > 1) for part in parts)
        if join == "none_of":
            return f"not ({text})"
        return f"({text})" if inside and len(parts) > 1 else text
    if condition.agree is not None:
        *most, last = condition.agree
        return f"{', '.join(most)} and {last} agree on {condition.key or 'answer'}"
    if condition.phase is not None:
        return f"in {condition.phase}"
    return f"{_subject(condition)} {_test(condition)}"


def _subject(condition: Condition) -> str:
    if condition.sample is not None:
        return f"the sample's {condition.sample}"
    if condition.env is not None:
        return f"{condition.key} of {condition.env}'s env"
    return f"{condition.key} of {condition.node}" if condition.key is not None else str(condition.node)


def _test(condition: Condition) -> str:
    if condition.exists is not None:
        return "is there" if condition.exists else "is not there"
    if condition.one_of is not None:
        return f"is one of {', '.join(map(_value, condition.one_of))}"
    if condition.at_least is not None:
        return f"is at least {condition.at_least:g}"
    if condition.at_most is not None:
        return f"is at most {condition.at_most:g}"
    if condition.matches is not None:
        return f"matches {condition.matches}"
    return f"is {_value(condition.equals)}"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'" if isinstance(value, str) else f"{value:g}"
