"""Which way an episode took to a call: what conditions decided before it.

Invariant: pure, and a function of the record's slots, not of the clock. Two calls have the same branch if and only if,
on the way to them, the same nodes were skipped and the same loops ended after the same rounds; where nothing branches,
all branches are "".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recipe.dag.episode.graph import EpisodeGraph, Slot


def branch_of(
    graph: EpisodeGraph, slot: Slot, turn: int, skipped: Collection[Slot], rounds: Mapping[str, int], before: str
) -> str:
    """The branch of a call at `slot` in `turn`: of this turn, the decisions about those that it waited for; of the
    turns before, all, which are `before`. `rounds`: the last round, from 0, of each loop."""
    place = graph.by_id[slot[0]]
    earlier = [
        other
        for other in skipped
        if (other[0] in place.ancestors and (graph.by_id[other[0]].loop != place.loop or other[1] <= slot[1]))
        or (place.loop is not None and graph.by_id[other[0]].loop == place.loop and other[1] < slot[1])
    ]
    over = [loop for loop in rounds if loop != place.loop and any(b.id in place.ancestors for b in graph.bodies[loop])]
    return _written(graph, turn, earlier, {loop: rounds[loop] for loop in over}, before)


def branch_after(
    graph: EpisodeGraph, turn: int, skipped: Collection[Slot], rounds: Mapping[str, int], before: str
) -> str:
    """All decisions up to the end of `turn`."""
    return _written(graph, turn, skipped, rounds, before)


def _written(graph: EpisodeGraph, turn: int, skipped: Collection[Slot], rounds: Mapping[str, int], before: str) -> str:
    parts = [f"{turn}.{round} without {node}" for node, round in sorted(skipped, key=graph.causal)]
    parts += [f"{turn} {loop} x{last + 1}" for loop, last in rounds.items()]
    return "; ".join([before] * bool(before) + parts)
