"""Which calls of one episode a group can hold, as far as the file says.

Invariant: static; a function of nodes, loops, agents and `group_by` alone. What only an episode knows (its branch, its
prompts) parts calls further, and never brings any together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recipe.dag.workflow.moves import Move, moves_of
from recipe.dag.workflow.schema import Agent, EpisodeSpec, Loop, Node, NodeRole

STATIC = ("agent", "role", "node", "turn", "round")
"""What a call is grouped by that is known before it is made."""


def pooled(
    nodes: Sequence[Node],
    loops: Mapping[str, Loop],
    agents: Sequence[Agent],
    episode: EpisodeSpec,
    trained: Collection[str],
    group_by: Collection[str],
) -> list[list[Move]]:
    """The moves of the agents with policies in `trained`, in lists whose members one group can hold. Of several turns
    the first two stand for all."""
    agent_of = {n.node_id: agents[n.agent_group] for n in nodes if n.node_role is NodeRole.ROLLOUT}
    turns = 1 if episode.train_turns == "last" else min(episode.max_turns, 2)
    found: dict[tuple, list[Move]] = {}
    for move in moves_of(nodes, loops, turns):
        agent = agent_of[move.node]
        if agent.policy in trained:
            names = (agent.name, agent.role or agent.name, move.node, move.turn, move.round)
            key = tuple(name for name, known in zip(names, STATIC, strict=True) if known in group_by)
            found.setdefault((agent.policy, *key), []).append(move)
    return list(found.values())


def horizons(groups: Sequence[Sequence[Move]], nodes: Sequence[Node], loops: Mapping[str, Loop]) -> dict[Move, int]:
    """Return how many moves of its own agent may follow each."""
    agent_of = {node.node_id: node.agent_group for node in nodes}
    place = {node.node_id: index for index, node in enumerate(nodes)}
    # a loop is run through before what stands behind it, round by round
    entry = {name: min(place[other] for other in loop.nodes) for loop in loops.values() for name in loop.nodes}
    moves = sorted(
        (move for group in groups for move in group),
        key=lambda move: (move.turn, entry.get(move.node, place[move.node]), move.round, place[move.node]),
        reverse=True,
    )
    following: dict[int, int] = {}
    left: dict[Move, int] = {}
    for move in moves:
        agent = agent_of[move.node]
        left[move] = following.get(agent, 0)
        following[agent] = left[move] + 1
    return left
