"""The state of an episode, and the part of it that a node sees.

Invariant: pure; what a node sees follows from the graph, not from the clock. Of this turn it sees its ancestors: those
in its own loop in its own round, those in other loops in their latest round. Of its own loop it also sees the latest
outputs of earlier rounds, its own included. Of all other nodes, and of those in its loop that have not run in this turn
yet, it sees the previous turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot
from recipe.dag.types.context import Context, Output
from recipe.dag.types.record import Call
from recipe.dag.workflow.agent_schema import Agent


@dataclass(slots=True)
class Turn:
    """The calls, results and env steps of one turn, by slot."""

    number: int
    calls: dict[Slot, Call] = field(default_factory=dict)
    """Includes calls that have not finished."""
    dropped: dict[Slot, list[Call]] = field(default_factory=dict)
    """Candidates that were not kept, or not yet, and the calls that judged them."""
    outputs: dict[Slot, Call | Output] = field(default_factory=dict)
    """Finished calls, and the results of vote and compute nodes."""
    obs: dict[Slot, dict[str, Any]] = field(default_factory=dict)
    """Observations by agent name; the slot is that of the node that stepped the env."""
    infos: dict[Slot, dict[str, Any]] = field(default_factory=dict)
    """The env's `info`, by the same slot."""
    done: set[Slot] = field(default_factory=set)
    """Slots that ended the episode, through the node's output or its env."""
    too_long: set[Slot] = field(default_factory=set)
    """Slots whose prompt did not fit into the policy's context."""


@dataclass(slots=True)
class TurnState:
    """The state carried over from the previous turn, by node id. Observations and infos stay until newer ones replace
    them; the newest is last."""

    outputs: dict[str, Call | Output] = field(default_factory=dict)
    """The latest output of each node that ran in the previous turn."""
    obs: dict[str, dict[str, Any]] = field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reader:
    """The node, or the loop condition, whose view is computed. A condition reads with the nodes of its loop and all
    their ancestors, and belongs to no loop itself."""

    ancestors: frozenset[str]
    loop: str | None = None
    round: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The part of the episode that a reader sees."""

    outputs: dict[str, Call | Output]
    """By node id, in causal order."""
    calls: list[Call]
    """All visible calls of this turn, in causal order."""
    obs: dict[str, dict[str, Any]]
    """Observations by agent name, for each node that stepped an env; the newest is last."""
    infos: dict[str, dict[str, Any]]
    """The env's `info`, for each node that stepped one; the newest is last."""


def node_reader(node: EpisodeNode, round_index: int) -> Reader:
    """Return the reader for a node, its hooks and its `when`."""
    return Reader(node.ancestors, node.loop, round_index)


def loop_reader(graph: EpisodeGraph, loop: str) -> Reader:
    """Return the reader for a loop's `until`."""
    body = graph.bodies[loop]
    return Reader(frozenset(node.id for node in body).union(*(node.ancestors for node in body)))


def view(graph: EpisodeGraph, reader: Reader, turn: Turn, state: TurnState) -> View:
    """Return the part of this turn, and of the `state` before it, that `reader` sees."""
    slots = sorted(visible_slots(graph, reader, turn), key=graph.causal)
    latest = {slot[0]: turn.outputs[slot] for slot in slots}
    outputs: dict[str, Call | Output] = {}
    for node in graph.nodes:
        is_ancestor = node.id in reader.ancestors
        if is_ancestor and reader.loop is not None and node.loop == reader.loop:
            output = turn.outputs.get((node.id, reader.round))
        else:
            # An ancestor that was skipped in this turn is absent: its output of the turn before would be stale.
            output = latest.get(node.id) or (None if is_ancestor else state.outputs.get(node.id))
        if output is not None:
            outputs[node.id] = output
    return View(
        outputs=outputs,
        calls=[call for slot in slots if isinstance(call := turn.outputs[slot], Call)],
        obs=_updated(state.obs, turn.obs, slots),
        infos=_updated(state.infos, turn.infos, slots),
    )


def without_private(seen: View, node: EpisodeNode, private: frozenset[str]) -> View:
    """Return what `node` sees without the calls of private agents (`Agent.private`) whose nodes it does not name."""
    if not private:
        return seen
    visible = seen.outputs.keys() - private | {node.id, *node.spec.after}
    outputs = {name: output for name, output in seen.outputs.items() if name in visible}
    return replace(seen, outputs=outputs, calls=[call for call in seen.calls if shows(node, call, private)])


def shows(node: EpisodeNode, call: Call, private: frozenset[str]) -> bool:
    """Return whether `node` may see the call, which is of a node in `private` or not."""
    return call.agent == node.agent_name or call.node not in private or call.node in node.spec.after


def context_of(
    graph: EpisodeGraph, node: EpisodeNode, seen: View, earlier: Iterable[Call], private: frozenset[str], **others: Any
) -> Context:
    """Return the context of `node`, which sees `seen` of this turn and what it may of the calls of `earlier` turns.
    `private`: the nodes of private agents; `others`: the fields that do not follow from these."""
    calls = [*(call for call in earlier if shows(node, call, private)), *seen.calls]
    obs = None
    if node.spec.sees_env:
        for by_agent in seen.obs.values():  # the newest last
            obs = by_agent.get(node.agent_name, obs)
    return Context(
        agent=node.agent_name,
        node=node.id,
        upstream={name: output for name, output in seen.outputs.items() if isinstance(output, Call)},
        results={name: output for name, output in seen.outputs.items() if isinstance(output, Output)},
        history=[call for call in calls if call.agent == node.agent_name],
        calls=calls,
        obs=obs,
        max_rounds=graph.max_rounds(node),
        **others,
    )


def new_call(node: EpisodeNode, agent: Agent, turn: int, round_index: int) -> Call:
    call = Call(node.id, agent.name, node.agent_group, agent.policy, turn, round=round_index)
    call.role = agent.role or agent.name
    call.hand_over = agent.hand_over
    return call


def carry_over(graph: EpisodeGraph, turn: Turn, state: TurnState) -> TurnState:
    """Return the state that the turn after `turn` starts from."""
    slots = sorted(turn.outputs, key=graph.causal)
    return TurnState(
        outputs={slot[0]: turn.outputs[slot] for slot in slots},
        obs=_updated(state.obs, turn.obs, slots),
        infos=_updated(state.infos, turn.infos, slots),
    )


def visible_slots(graph: EpisodeGraph, reader: Reader, turn: Turn) -> Iterator[Slot]:
    """Yield the slots of this turn that the reader may see."""
    for name, round_index in turn.outputs:
        is_ancestor = name in reader.ancestors
        if reader.loop is not None and graph.by_id[name].loop == reader.loop:
            if round_index < reader.round or (is_ancestor and round_index == reader.round):
                yield name, round_index
        elif is_ancestor:
            yield name, round_index


def _updated(before: Mapping[str, Any], fresh: Mapping[Slot, Any], slots: Sequence[Slot]) -> dict[str, Any]:
    updated = dict(before)
    for slot in slots:
        if slot in fresh:
            updated.pop(slot[0], None)  # so that the newest is last
            updated[slot[0]] = fresh[slot]
    return updated
