"""The calls of one episode that may be in one group, derived from the file alone.

Invariant: static; a function of nodes, loops, agents and `group_by`. Properties of an episode (its branch, its prompts)
can only divide these groups further.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recipe.dag.types.move import Move
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.moves import moves_of
from recipe.dag.workflow.schema import EpisodeSpec, Loop, Node

STATIC = ("agent", "role", "node", "turn", "round")
"""Entries of `group_by` that are known before a call is made."""


def pooled(
    nodes: Sequence[Node],
    loops: Mapping[str, Loop],
    agents: Sequence[Agent],
    episode: EpisodeSpec,
    trained: Collection[str],
    group_by: Collection[str],
) -> list[list[Move]]:
    """Return the moves of agents with policies in `trained`, in lists of moves that may be in one group. With several
    turns, only the first two are included, as later ones do not differ from the second."""
    by_name = {agent.name: agent for agent in agents}
    agent_of = {node.id: by_name[node.agent] for node in nodes if node.agent is not None}
    turns = 1 if episode.train_turns == "last" else min(episode.max_turns, 2)
    groups: dict[tuple, list[Move]] = {}
    for move in moves_of(nodes, loops, turns):
        agent = agent_of[move.node]
        if agent.policy in trained:
            names = (agent.name, agent.role or agent.name, move.node, move.turn, move.round)
            key = tuple(name for name, criterion in zip(names, STATIC, strict=True) if criterion in group_by)
            groups.setdefault((agent.policy, *key), []).append(move)
    return list(groups.values())


def horizons(groups: Sequence[Sequence[Move]], nodes: Sequence[Node], loops: Mapping[str, Loop]) -> dict[Move, int]:
    """Return, for each move, how many moves of its own agent may follow."""
    agent_of = {node.id: node.agent for node in nodes}
    position = {node.id: index for index, node in enumerate(nodes)}
    # all rounds of a loop precede the nodes after it, so a loop's moves sort by its first node, then by round
    entry = {name: min(position[other] for other in loop.nodes) for loop in loops.values() for name in loop.nodes}
    moves = sorted(
        (move for group in groups for move in group),
        key=lambda move: (move.turn, entry.get(move.node, position[move.node]), move.round, position[move.node]),
        reverse=True,
    )
    count_of_agent: dict[str | None, int] = {}
    following: dict[Move, int] = {}
    for move in moves:
        agent = agent_of[move.node]
        following[move] = count_of_agent.get(agent, 0)
        count_of_agent[agent] = following[move] + 1
    return following
