"""What an API policy's requests consumed: requests, tokens and their price.

Invariant: a record's counts are those that the server reported; a server that reports none counts as 0 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipe.dag.types.model import Price
from recipe.dag.types.record import Call, Episode

Usage = dict[str, float]
"""requests (repeated ones included), retries, prompt_tokens, completion_tokens and, with a price, cost."""


def usage_of(answer: Mapping[str, Any], tries: int, price: Price | None) -> Usage:
    """Return the usage of one answer that took `tries` requests."""
    reported = answer.get("usage")
    counts = reported if isinstance(reported, Mapping) else {}
    usage: Usage = {"requests": tries, "retries": tries - 1}
    for name in ("prompt_tokens", "completion_tokens"):
        count = counts.get(name)
        usage[name] = count if isinstance(count, int) and count >= 0 else 0
    if price is not None:
        usage["cost"] = (usage["prompt_tokens"] * price.input + usage["completion_tokens"] * price.output) / 1e6
    return usage


def with_calls(spent: Mapping[str, Usage], calls: Iterable[Call]) -> dict[str, Usage]:
    """Return `spent`, a usage by policy, with that of `calls` added."""
    total = dict(spent)
    for call in calls:
        if call.usage is not None:
            total[call.policy] = added(total.get(call.policy), call.usage)
    return total


def usage_by_policy(episodes: Iterable[Episode]) -> dict[str, Usage]:
    """Return what the episodes consumed together, by policy."""
    total: dict[str, Usage] = {}
    for episode in episodes:
        for policy, usage in episode.usage.items():
            total[policy] = added(total.get(policy), usage)
    return total


def added(first: Usage | None, second: Usage) -> Usage:
    """Return the sum of two usages; the first may be missing."""
    return {name: (first or {}).get(name, 0) + value for name, value in second.items()}
