"""Checks of what learns the team's value (`algorithm.mixer`, estimators vdn and qmix).

Invariant: no baseline of a workflow that passes reads a message that could have reacted to the one it is for, and every
key of the block is in force.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.causality import Graph, descendants, in_baseline, reacting
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.moves import Move, moves_of, reactions
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import NodeRole

PATH: KeyPath = ("algorithm", "mixer")


def check_mixer(draft: Draft) -> Iterator[Problem]:
    """Keys without an effect."""
    algorithm, say, mixer = draft.algorithm, draft.source.problem, draft.algorithm.team_value
    if mixer is None:
        return
    if mixer.lam == 1.0 and draft.has(*PATH, "target_tau"):
        yield say((*PATH, "target_tau"), "with `lam: 1` there is no slow copy; remove it, or lower lam", key=True)
    if draft.episode.max_turns == 1 and not any(problem.where.startswith("episode") for problem in draft.problems):
        for key in ("lam", "gamma_turn"):
            if draft.has(*PATH, key):
                yield say((*PATH, key), "with `episode.max_turns: 1` no later turn pays; remove it", key=True)
    if algorithm.drop_zero_variance:
        message = "equal returns may hide who helped, so vdn and qmix learn from them, too; remove it"
        yield say(("algorithm", "drop_zero_variance"), message, key=True)


def check_mixer_peers(draft: Draft) -> Iterator[Problem]:
    """Needs a whole draft whose graph has no cycles."""
    mixer, say, nodes = draft.algorithm.team_value, draft.source.problem, draft.by_id()
    if mixer is None or not mixer.peers:
        return
    places = list(nodes.values())
    loops, turns = dict(draft.each_loop()), min(draft.episode.max_turns, 2)
    graph = reactions(places, loops, draft.agents, turns)
    moves: dict[str, list[Move]] = {}
    for move in moves_of(places, loops, turns):
        moves.setdefault(move.node, []).append(move)
    for name, peers in mixer.peers.items():
        path = (*PATH, "peers", name)
        if name not in moves:
            yield say(path, _no_call(draft, path, name), key=True)
            continue
        for index, peer in enumerate(peers):
            at = (*path, index)
            if peer not in moves:
                yield say(at, _no_call(draft, at, peer))
            elif peer in peers[:index]:
                yield say(at, f"`{peer}` is listed twice")
            elif (problem := _reacts(graph, moves[name], moves[peer])) is not None:
                yield say(at, problem)


def _no_call(draft: Draft, path: KeyPath, name: str) -> str:
    node = draft.by_id().get(name)
    if node is None:
        return draft.no_node(path, name)
    return f"`{name}` is a {node.node_role} node; a mixer values the messages of {NodeRole.ROLLOUT} nodes"


def _reacts(graph: Graph, own: list[Move], peers: list[Move]) -> str | None:
    """Why a baseline for the moves `own` of one node may not read a node's moves `peers`: the nearest reaction."""
    if own == peers:
        return in_baseline("its own message")
    after = descendants(graph, [move.id for move in own])
    found = [(b.turn - a.turn, max(0, b.round - a.round), b) for a in own for b in peers if b.id in after[a.id]]
    if not found:
        return None
    turns, rounds, move = min(found)
    return in_baseline(
        reacting(f"`{move.node}`" + (" of a later turn" if turns else " of a later round" * bool(rounds)))
    )
