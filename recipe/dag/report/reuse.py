"""What of the prompts a server with a prefix cache need not compute: `verl-dag plan --reuse`.

Invariant: pure. A prompt is computed from the first token on in which it differs from everything that its policy's
server has read or written, so what counts is the longest prefix in common with an earlier call. Caches never overflow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from os.path import commonprefix
from statistics import fmean
from typing import Any

from recipe.dag.report.compare import aligned
from recipe.dag.report.metrics import CACHED
from recipe.dag.types.record import Call, Episode

LOW, WORTH = 0.5, 0.1
"""A node gets a hint if it reuses less than this share of its prompts, and another order would add this share."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a node's prompts: their mean length in tokens, and the mean shares that are found in earlier calls."""

    node: str
    policy: str
    tokens: float
    episode: float
    """Of the same episode."""
    siblings: float
    """Of other episodes of the same problem, before or beside it."""
    others: float
    """Of other problems."""
    hit: float
    """Predicted over a step."""
    hint: str = ""


def reuse_by_node(problems: Sequence[Sequence[Episode]], n: int) -> list[Reuse]:
    """Return the reuse of each node, in the order of calls. problems: the episodes of each, at least two of two
    problems. n: episodes per problem of a step, whose first one finds nothing of its siblings."""
    shares: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    calls: dict[str, list[tuple[Call, Episode]]] = defaultdict(list)
    for problem in problems:
        for episode in problem:
            for position, call in enumerate(episode.calls):
                siblings = [other.calls[: position + 1] for other in problem if other is not episode]
                others = [other.calls[: position + 1] for own in problems if own is not problem for other in own]
                shares[call.node].append(
                    (
                        _share(call, episode.calls[:position]),
                        _share(call, (earlier for calls in siblings for earlier in calls)),
                        _share(call, (earlier for calls in others for earlier in calls)),
                    )
                )
                calls[call.node].append((call, episode))
    return [_reuse(own, shares[node], n) for node, own in calls.items()]


def _reuse(calls: Sequence[tuple[Call, Episode]], shares: Sequence[tuple[float, float, float]], n: int) -> Reuse:
    (call, episode), *_ = calls
    hit = fmean((max(own, others) + (n - 1) * max(own, siblings, others)) / n for own, siblings, others in shares)
    episodes, siblings, others = (fmean(column) for column in zip(*shares, strict=True))
    hint = _hint(call, episode) if hit < LOW else ""
    tokens = fmean(len(own.prompt_ids) for own, _ in calls)
    return Reuse(call.node, call.policy, tokens, episodes, siblings, others, hit, hint)


def _share(call: Call, earlier: Iterable[Call]) -> float:
    """Return the share of a call's prompt that is the beginning of an earlier call of its policy."""
    common = (_common(call, other) for other in earlier if other.policy == call.policy)
    return max(common, default=0) / max(len(call.prompt_ids), 1)


def _common(call: Call, other: Call) -> int:
    return len(commonprefix([call.prompt_ids, [*other.prompt_ids, *other.response_ids]]))


def _hint(call: Call, episode: Episode) -> str:
    """Return what another order of the prompt would save, or ""."""
    total = len(call.prompt_ids)
    best, hint = WORTH * total, ""
    for other in episode.calls[: episode.calls.index(call)]:
        read = [*other.prompt_ids, *other.response_ids]
        match = SequenceMatcher(None, call.prompt_ids, read, autojunk=False).find_longest_match()
        begun = _common(call, other)
        if other.policy == call.policy and match.size - begun > best:
            best = match.size - begun
            hint = (
                f"{call.node} reads {match.size / total:.0%} of its prompt again, which {other.node} has read: they "
                f"differ after {begun / total:.0%}; put what they share first and the role after it"
            )
    return hint


def measured_by_node(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean share over a run's steps of each node whose server reported it. `metrics`: those of the steps."""
    shares: dict[str, list[float]] = defaultdict(list)
    for key, value in (item for step in metrics for item in step.items()):
        if key.startswith("node/") and key.endswith(CACHED):
            shares[key.removeprefix("node/").removesuffix(CACHED)].append(value)
    return {node: fmean(values) for node, values in shares.items()}


def lines_of(reuse: Sequence[Reuse], n: int, unit: str, measured: Mapping[str, float] | None = None) -> Iterator[str]:
    """Yield a table and the hints. `unit`: of the prompts' lengths. `measured`: a run's share by node."""
    heading = ["node", "policy", "prompt", "same episode", "siblings", "other problems", f"step of {n} per problem"]
    rows = [
        [own.node, own.policy, f"{own.tokens:.0f}"]
        + [f"{share:.0%}" for share in (own.episode, own.siblings, own.others, own.hit)]
        for own in reuse
    ]
    if measured is not None:
        heading.append("measured")
        for row in rows:
            row.append(f"{measured[row[0]]:.0%}" if row[0] in measured else "-")
    yield f"Share of the prompts, with answers of a line, that a prefix cache has read before (in {unit}):"
    yield from aligned([heading, *rows])
    if measured == {}:
        yield "measured: nothing; the run's servers reported no cached tokens"
    total = sum(own.tokens for own in reuse)
    yield f"over all nodes: {sum(own.hit * own.tokens for own in reuse) / max(total, 1):.0%}"
    yield from (own.hint for own in reuse if own.hint)
