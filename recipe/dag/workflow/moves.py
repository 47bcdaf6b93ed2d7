"""The moves of an episode, the moves to which each of them may react, and those that an estimator may compare.

Invariant: static; a function of the file alone. A move is one call of a node, in one round of its loop in one turn.
Everything that a move may have seen, or that may decide whether it is made, precedes it in the graph: dependencies with
their complete loops, earlier rounds, the whole turn before, and the actions of other players on an env whose
observations it gets. Agents that use one tool with a memory may react to each other. Properties of an episode (its
branch, its prompts) can only divide the groups of `pooled` further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.types.move import Move
from recipe.dag.workflow.agent_schema import Agent, ToolSpec
from recipe.dag.workflow.graph import causal_order, graph_of, topological_order
from recipe.dag.workflow.node import EPISODE_KINDS, Kind, Node
from recipe.dag.workflow.schema import EpisodeSpec, Loop

STATIC = ("agent", "role", "node", "turn", "round")
"""Entries of `group_by` that are known before a call is made."""


def moves_of(nodes: Sequence[Node], loops: Mapping[str, Loop], turns: int) -> tuple[Move, ...]:
    """Return every possible call of an agent in an episode, by turn, node (in the given order) and round."""
    rounds = _rounds(loops)
    names = [node.id for node in nodes if node.kind is Kind.ROLLOUT]
    return tuple(
        Move(name, turn, number) for turn in range(turns) for name in names for number in range(rounds.get(name, 1))
    )


def reactions(
    nodes: Sequence[Node], loops: Mapping[str, Loop], agents: Sequence[Agent | None], turns: int
) -> dict[str, tuple[str, ...]]:
    """Return the graph of all moves, by id: each move with those to which it may react. Env steps (`step:` and the
    move's id) and vote and compute nodes are included. Dependencies must not contain a cycle."""
    by_id = {node.id: node for node in nodes if node.kind in EPISODE_KINDS}
    graph_in_order = graph_of(by_id[name] for name in topological_order(graph_of(by_id.values())))
    order = causal_order(graph_in_order, {name: loop.nodes for name, loop in loops.items()})
    graph: dict[str, tuple[str, ...]] = {}
    for turn in range(turns):
        steps = dict(_turn([by_id[name] for name in order], loops, agents, turn))
        graph |= {step: (*before, f"turn:{turn}") for step, before in steps.items()}
        graph[f"turn:{turn + 1}"] = tuple(steps)
    return graph


def _turn(
    nodes: Sequence[Node], loops: Mapping[str, Loop], agents: Sequence[Agent | None], turn: int
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (id, ids before it) of the moves and env steps of one turn. `nodes` are in causal order."""
    loop_of = {name: key for key, loop in loops.items() for name in loop.nodes}
    rounds = _rounds(loops)
    by_id = {node.id: node for node in nodes}

    def in_turn(name: str) -> list[str]:
        """Return the ids of all moves and env steps of a node in the turn."""
        prefixes = ("", "step:") if by_id[name].env else ("",)
        return [f"{prefix}{Move(name, turn, k).id}" for prefix in prefixes for k in range(rounds.get(name, 1))]

    def in_round(name: str, number: int) -> list[str]:
        """Return the ids of the move and the env step of a node in a round of its loop."""
        move = Move(name, turn, number).id
        return [move, f"step:{move}"] if by_id[name].env else [move]

    for position, node in enumerate(nodes):
        name, loop = node.id, loop_of.get(node.id)
        body = [other for other in loops[loop].nodes if other in by_id] if loop else []
        inner = [dependency for dependency in node.after if dependency in body]
        outer = [dependency for dependency in node.after if dependency in by_id and dependency not in body]
        # a dependency outside the node's loop is waited for with all nodes of its own loop
        awaited = sorted({other for dependency in outer for other in _loop_nodes(dependency, loops)})
        outside = [move for other in (*awaited, *_sharing_tools(node, nodes, agents)) for move in in_turn(other)]
        earlier = nodes[:position]
        same_loop = [other for other in earlier if not loop or loop_of.get(other.id) == loop]
        actors = dict.fromkeys(
            other.id
            for other in earlier
            if _same_env(other, node) or (other in same_loop and _acts_in_env(other, node))
        )
        for number in range(rounds.get(name, 1)):
            move = Move(name, turn, number).id
            before = [earlier_move for dependency in inner for earlier_move in in_round(dependency, number)]
            if number > 0:
                before += [earlier_move for other in body for earlier_move in in_round(other, number - 1)]
            yield move, [*outside, *before]
            if node.env:
                step = [move]
                for actor in actors:
                    step += in_round(actor, number) if actor in body else in_turn(actor)
                yield f"step:{move}", step


def _acts_in_env(other: Node, owner: Node) -> bool:
    """Return whether the text of `other` may be an action in the env that `owner` steps."""
    return other.sees_env and (not other.env or _same_env(other, owner))


def _same_env(node: Node, other: Node) -> bool:
    return bool(set(node.env) & set(other.env))


def _sharing_tools(node: Node, nodes: Sequence[Node], agents: Sequence[Agent | None]) -> list[str]:
    """Return the other nodes whose agents share a tool that remembers calls with this node's agent."""
    own = _tools(node, agents)
    return [other.id for other in nodes if other is not node and own & _tools(other, agents)]


def _tools(node: Node, agents: Sequence[Agent | None]) -> set[str]:
    agent = next((agent for agent in agents if agent is not None and agent.name == node.agent), None)
    return {tool.key for tool in agent.tools if remembers(tool)} if agent is not None else set()


def remembers(tool: ToolSpec) -> bool:
    """Return whether a call of the tool may see earlier calls, as a user's tool always may."""
    return tool.path is not None or tool.name is None or tool.name not in BUILTIN or BUILTIN[tool.name].remembers


def _loop_nodes(name: str, loops: Mapping[str, Loop]) -> Sequence[str]:
    """Return all nodes of the loop that contains a node, or the node alone."""
    return next((loop.nodes for loop in loops.values() if name in loop.nodes), (name,))


def _rounds(loops: Mapping[str, Loop]) -> dict[str, int]:
    return {name: loop.max_rounds for loop in loops.values() for name in loop.nodes}


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
