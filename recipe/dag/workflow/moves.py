"""The moves that an episode can hold, and which of them may react to which.

Invariant: static; a function of the nodes, loops and turns alone. A move is a node's in one round of its loop in one
turn. Whatever a move may have seen, or that may decide whether it is made at all, stands before it: dependencies with
their loops whole, rounds before, all of the turn before, and what other players did to an env whose observations it
gets. Agents that use one tool with a memory may react to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from recipe.dag.workflow.graph import causal_order, graph_of, topological_order
from recipe.dag.workflow.schema import EPISODE_ROLES, Agent, Loop, Node, NodeRole


class Move(NamedTuple):
    node: str
    turn: int
    round: int

    @property
    def id(self) -> str:
        return f"{self.node}@{self.turn}.{self.round}"


def moves_of(nodes: Sequence[Node], loops: Mapping[str, Loop], turns: int) -> tuple[Move, ...]:
    """Every call of an agent that an episode can hold: turn by turn, the nodes as they come, round by round."""
    rounds = _rounds(loops)
    spoken = [node.node_id for node in nodes if node.node_role is NodeRole.ROLLOUT]
    return tuple(
        Move(name, turn, round) for turn in range(turns) for name in spoken for round in range(rounds.get(name, 1))
    )


def reactions(
    nodes: Sequence[Node], loops: Mapping[str, Loop], agents: Sequence[Agent | None], turns: int
) -> dict[str, tuple[str, ...]]:
    """Graph of all moves by id; env steps (`step:` and the move's id) and vote and compute nodes stand in it, too.
    Needs nodes whose dependencies have no cycle."""
    by_id = {node.node_id: node for node in nodes if node.node_role in EPISODE_ROLES}
    graph_in_order = graph_of(by_id[name] for name in topological_order(graph_of(by_id.values())))
    order = causal_order(graph_in_order, {name: loop.nodes for name, loop in loops.items()})
    graph: dict[str, tuple[str, ...]] = {}
    for turn in range(turns):
        found = dict(_turn([by_id[name] for name in order], loops, agents, turn))
        graph |= {id: (*before, f"turn:{turn}") for id, before in found.items()}
        graph[f"turn:{turn + 1}"] = tuple(found)
    return graph


def _turn(
    nodes: Sequence[Node], loops: Mapping[str, Loop], agents: Sequence[Agent | None], turn: int
) -> Iterator[tuple[str, Sequence[str]]]:
    """(id, ids before it) of the moves and env steps of one turn; `nodes` in causal order."""
    loop_of = {name: key for key, loop in loops.items() for name in loop.nodes}
    rounds = _rounds(loops)
    by_id = {node.node_id: node for node in nodes}

    def every(name: str) -> list[str]:
        """All that a node does in the turn."""
        steps = ("", "step:") if by_id[name].agent_options.env_path else ("",)
        return [f"{step}{Move(name, turn, round).id}" for step in steps for round in range(rounds.get(name, 1))]

    def at(name: str, round: int) -> list[str]:
        """What it does in a round of its loop."""
        suffix = Move(name, turn, round).id
        return [suffix, f"step:{suffix}"] if by_id[name].agent_options.env_path else [suffix]

    for place, node in enumerate(nodes):
        name, loop = node.node_id, loop_of.get(node.node_id)
        body = [other for other in loops[loop].nodes if other in by_id] if loop else []
        near = [d for d in node.dependencies if d in body]
        far = {other for d in node.dependencies if d in by_id and d not in body for other in _whole(d, loops)}
        outside = [id for other in (*sorted(far), *_sharing_tools(node, nodes, agents)) for id in every(other)]
        earlier = nodes[:place]
        mates = [other for other in earlier if not loop or loop_of.get(other.node_id) == loop]
        stage = dict.fromkeys(o.node_id for o in earlier if _one_env(o, node) or o in mates and _plays(o, node))
        for round in range(rounds.get(name, 1)):
            move = Move(name, turn, round).id
            before = [id for d in near for id in at(d, round)]
            before += [id for other in body for id in at(other, round - 1)] if round else []
            yield move, [*outside, *before]
            if node.agent_options.env_path:
                yield f"step:{move}", [move, *(id for o in stage for id in (at(o, round) if o in body else every(o)))]


def _plays(other: Node, owner: Node) -> bool:
    """Whether its text may be an action in the env that `owner` steps."""
    options = other.agent_options
    return options.obs_with_env and (not options.env_path or _one_env(other, owner))


def _one_env(one: Node, other: Node) -> bool:
    return bool(set(one.agent_options.env_path) & set(other.agent_options.env_path))


def _sharing_tools(node: Node, nodes: Sequence[Node], agents: Sequence[Agent | None]) -> list[str]:
    """Other nodes whose agents use a tool that this one's uses and that remembers calls."""
    own = _tools(node, agents)
    return [other.node_id for other in nodes if other is not node and own & _tools(other, agents)]


def _tools(node: Node, agents: Sequence[Agent | None]) -> set[str]:
    agent = agents[node.agent_group] if node.node_role is NodeRole.ROLLOUT else None
    # A built-in tool remembers nothing.
    return {tool.key for tool in agent.tools if tool.path is not None} if agent is not None else set()


def _whole(name: str, loops: Mapping[str, Loop]) -> Sequence[str]:
    return next((loop.nodes for loop in loops.values() if name in loop.nodes), (name,))


def _rounds(loops: Mapping[str, Loop]) -> dict[str, int]:
    return {name: loop.max_rounds for loop in loops.values() for name in loop.nodes}
