"""The layout of a workflow's graph: a rank and a place within it for each node.

Invariant: an edge leads to a higher rank, except that of a loop's next round. An edge over several ranks has a place of
its own in each rank between, so that it passes between the nodes. Equal workflows give equal layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

KINDS = ("reward", "vote", "compute", "train")
"""Kinds of nodes without an agent, by the key that makes a node one."""
_SWEEPS = 6

Place = tuple[int, float]
"""Rank, and distance from the middle of the rank."""


def graph_of(workflow: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return {"nodes": [{id, kind, agent, policy, when, place}], "edges": [{places, loop}]} of a workflow as parsed;
    None without nodes."""
    nodes = workflow.get("nodes") or []
    if not nodes:
        return None
    policies = {agent["name"]: agent["policy"] for agent in workflow.get("agents", ())}
    after: dict[str, list[str]] = {node["id"]: list(node.get("after") or ()) for node in nodes}
    places, edges = _layout(after)
    loops = [list(loop["nodes"]) for loop in (workflow.get("loops") or {}).values() if loop.get("nodes")]
    described = [
        {
            "id": node["id"],
            "kind": next((kind for kind in KINDS if node.get(kind) is not None), "agent"),
            "agent": node.get("agent"),
            "policy": node.get("policy") or policies.get(node.get("agent")),
            "when": node.get("when") is not None,
            "place": places[node["id"]],
        }
        for node in nodes
    ]
    forward = [{"places": edge, "loop": False} for edge in edges]
    back = [{"places": [places[body[-1]], places[body[0]]], "loop": True} for body in loops]
    return {"nodes": described, "edges": forward + back}


def _layout(after: Mapping[str, list[str]]) -> tuple[dict[str, Place], list[list[Place]]]:
    ranks: dict[str, int] = {}

    def rank_of(name: str) -> int:
        if name not in ranks:
            ranks[name] = 1 + max((rank_of(one) for one in after[name] if one in after), default=-1)
        return ranks[name]

    for name in after:
        rank_of(name)
    chains = [_chain(one, name, ranks) for name in after for one in after[name] if one in after]
    levels: dict[int, list[Any]] = defaultdict(list)
    for name in after:
        levels[ranks[name]].append(name)
    for chain in chains:
        for offset, passing in enumerate(chain[1:-1], 1):
            levels[ranks[chain[0]] + offset].append(passing)
    links = [pair for chain in chains for pair in zip(chain, chain[1:], strict=False)]
    _order(levels, links)
    places = {
        name: (rank, index - (len(level) - 1) / 2) for rank, level in levels.items() for index, name in enumerate(level)
    }
    return {name: places[name] for name in after}, [[places[one] for one in chain] for chain in chains]


def _chain(source: str, target: str, ranks: Mapping[str, int]) -> list[Any]:
    between = range(ranks[source] + 1, ranks[target])
    return [source, *((source, target, rank) for rank in between), target]


def _order(levels: dict[int, list[Any]], links: Iterable[tuple[Any, Any]]) -> None:
    """Sort each rank by the mean position of what its members are linked to, in turn above and below."""
    above, below = defaultdict(list), defaultdict(list)
    for source, target in links:
        above[target].append(source)
        below[source].append(target)
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for rank in sorted(levels, reverse=sweep % 2 == 1):
            position = {name: index for level in levels.values() for index, name in enumerate(level)}
            levels[rank].sort(
                key=lambda name, position=position, neighbours=neighbours: (
                    fmean(position[one] for one in neighbours[name]) if neighbours[name] else position[name]
                )
            )
