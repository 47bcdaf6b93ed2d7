"""Does a condition of the workflow hold?

Invariant: pure, and total: whatever the agents said, the answer is True or False. A subject that is not there fails
every test but `exists: false`; None counts as not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

from recipe.dag.episode.answers import normalised
from recipe.dag.workflow.schema import Condition

AGREE_KEY = "answer"
"""What `agree` compares where the condition names no key."""


class Said(Protocol):
    """A Call or an Output."""

    text: str | None
    parsed: dict[str, Any]


def holds(
    condition: Condition,
    results: Mapping[str, Said],
    infos: Mapping[str, Mapping[str, Any]],
    sample: Mapping[str, Any],
    *,
    validate: bool = False,
) -> bool:
    """`results` and `infos` (of the env that a node steps) by node id; nodes that have none yet are absent. `validate`:
    the episode is one of validation."""
    for group, verdict in (
        (condition.all_of, lambda parts: all(parts)),
        (condition.any_of, lambda parts: any(parts)),
        (condition.none_of, lambda parts: not any(parts)),
    ):
        if group is not None:
            return verdict(holds(part, results, infos, sample, validate=validate) for part in group)
    if condition.phase is not None:
        return condition.phase == ("validation" if validate else "training")
    if condition.agree is not None:
        key = AGREE_KEY if condition.key is None else condition.key
        answers = [_said(results, name, key) for name in condition.agree]
        return None not in answers and len({normalised(answer) for answer in answers}) == 1
    if condition.node is not None:
        value = _said(results, condition.node, condition.key)
    elif condition.env is not None:
        value = infos.get(condition.env, {}).get(condition.key)
    else:
        value = look_up(sample, condition.sample)
    return _passes(condition, value)


def look_up(sample: Mapping[str, Any], path: str) -> Any:
    """What stands under a dotted path (`extra_info.level`, `turns.0.role`); None where there is nothing."""
    value: Any = sample
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _said(results: Mapping[str, Said], node: str, key: str | None) -> Any:
    if node not in results:
        return None
    return results[node].text if key is None else results[node].parsed.get(key)


def _passes(condition: Condition, value: Any) -> bool:
    if condition.exists is not None and condition.exists != (value is not None):
        return False
    tests = (condition.equals, condition.one_of, condition.at_least, condition.at_most, condition.matches)
    if value is None:
        return all(test is None for test in tests) and condition.exists is False
    if condition.equals is not None and normalised(value) != normalised(condition.equals):
        return False
    if condition.one_of is not None and normalised(value) not in map(normalised, condition.one_of):
        return False
    if condition.matches is not None:
        text = value if isinstance(value, str) else normalised(value)
        if re.search(condition.matches, text) is None:
            return False
    number = _number(value)
    if condition.at_least is not None and not number >= condition.at_least:
        return False
    return condition.at_most is None or number <= condition.at_most


def _number(value: Any) -> float:
    """Also of a text that reads as one; NaN, which passes no test, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
