"""The consumption of an API policy: requests, tokens and their price.

Invariant: a record's counts are those that the server reported; a server that reports none counts as 0 tokens. An
answer from the cache counts as a hit, and as nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recipe.dag.types.model import Api
from recipe.dag.types.record import Call, Episode

Usage = dict[str, float]
"""requests (repeated ones included), retries, prompt_tokens, completion_tokens, with a price cost, and with a cache
cache_hits."""


def usage_of(tokens: tuple[int, int], tries: int, api: Api) -> Usage:
    """Return the usage of one answer that took `tries` requests, 0 if it came from the cache. `tokens`: those of the
    prompt and of the answer."""
    hit = tries == 0
    prompt_tokens, completion_tokens = (0, 0) if hit else tokens
    usage: Usage = {"requests": tries, "retries": max(tries - 1, 0)}
    usage |= {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage |= {"cost": api.price.of(prompt_tokens, completion_tokens)} if api.price is not None else {}
    return usage | ({"cache_hits": int(hit)} if api.cache is not None else {})


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
    first = first or {}
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
