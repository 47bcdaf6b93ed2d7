"""What has happened in an episode so far, and what of it a node sees.

Invariant: pure; what a node sees follows from the graph, not from the clock. Of this turn it sees the moves of its
ancestors: in its own loop those of its own round, of other loops the latest. Of its own loop's other nodes, itself
included, it sees the latest of the rounds before. Of all others, and of those in its loop that have not moved in this
turn yet, it sees the turn before's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.context import Output
from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot
from recipe.dag.episode.record import Call


@dataclass(slots=True)
class Turn:
    """What the nodes of one turn have done, by slot: who has moved, and what its env answered."""

    number: int
    calls: dict[Slot, Call] = field(default_factory=dict)
    """Those under way included."""
    said: dict[Slot, Call | Output] = field(default_factory=dict)
    """Finished calls, and the results of vote and compute nodes."""
    obs: dict[Slot, dict[str, Any]] = field(default_factory=dict)
    """By the node that stepped the env, then by agent name."""
    infos: dict[Slot, dict[str, Any]] = field(default_factory=dict)
    """By the node that stepped the env."""
    done: set[Slot] = field(default_factory=set)
    """Who ended the episode, itself or by its env."""
    full: set[Slot] = field(default_factory=set)
    """Whose prompt did not fit."""


@dataclass(slots=True)
class Memory:
    """What the turn before left: the latest of each node that moved in it; observations and infos stay until there are
    new ones, the newest last."""

    said: dict[str, Call | Output] = field(default_factory=dict)
    obs: dict[str, dict[str, Any]] = field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reader:
    """Who looks. A loop's condition looks with the ancestors of all its nodes, those nodes included, and no loop."""

    ancestors: frozenset[str]
    loop: str | None = None
    round: int = 0


@dataclass(frozen=True, slots=True)
class View:
    said: dict[str, Call | Output]
    """By node id, in causal order."""
    moves: list[Call]
    """All calls of this turn that the reader can know of, in causal order."""
    obs: dict[str, dict[str, Any]]
    """By the node that stepped the env, the newest last; then by agent name."""
    infos: dict[str, dict[str, Any]]
    """By the node that stepped the env, the newest last."""


def reader_of(place: EpisodeNode, round: int) -> Reader:
    return Reader(place.ancestors, place.loop, round)


def loop_reader(graph: EpisodeGraph, loop: str) -> Reader:
    body = graph.bodies[loop]
    return Reader(frozenset(place.id for place in body).union(*(place.ancestors for place in body)))


def view(graph: EpisodeGraph, reader: Reader, turn: Turn, memory: Memory) -> View:
    known = sorted(_known(graph, reader, turn), key=graph.causal)
    latest = {slot[0]: turn.said[slot] for slot in known}
    said = {}
    for place in graph.nodes:
        near = place.id in reader.ancestors
        if near and reader.loop is not None and place.loop == reader.loop:
            found = turn.said.get((place.id, reader.round))
        else:
            found = latest.get(place.id) or (None if near else memory.said.get(place.id))
        if found is not None:
            said[place.id] = found
    return View(
        said=said,
        moves=[move for slot in known if isinstance(move := turn.said[slot], Call)],
        obs=_renewed(memory.obs, turn.obs, known),
        infos=_renewed(memory.infos, turn.infos, known),
    )


def remember(graph: EpisodeGraph, turn: Turn, memory: Memory) -> Memory:
    """What `turn` leaves for the next one."""
    order = sorted(turn.said, key=graph.causal)
    return Memory(
        said={slot[0]: turn.said[slot] for slot in order},
        obs=_renewed(memory.obs, turn.obs, order),
        infos=_renewed(memory.infos, turn.infos, order),
    )


def _known(graph: EpisodeGraph, reader: Reader, turn: Turn) -> Iterator[Slot]:
    """The slots of this turn that the reader may look at."""
    for node, round in turn.said:
        near = node in reader.ancestors
        if reader.loop is not None and graph.by_id[node].loop == reader.loop:
            if round < reader.round or (near and round == reader.round):
                yield node, round
        elif near:
            yield node, round


def _renewed(before: dict[str, Any], fresh: dict[Slot, Any], slots: list[Slot]) -> dict[str, Any]:
    found = dict(before)
    for slot in slots:
        if slot in fresh:
            found.pop(slot[0], None)
            found[slot[0]] = fresh[slot]
    return found
