"""Checks of the project's own reward nodes: their options, what they need before them, and what pays twice.

Invariant: what a node pays for is paid once, by it or by the estimator. A function of the user's may do anything, and
is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.entry import REWARD, Entry
from recipe.dag.rewards import CALLED, SHAPED, SHAPINGS
from recipe.dag.workflow.checks.algorithm import repeated_agent
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import graph_of, topological_order
from recipe.dag.workflow.moves import moves_of
from recipe.dag.workflow.problem import KeyPath, Problem, listing
from recipe.dag.workflow.schema import Node, NodeRole, Vote

Paying = tuple[int, Node, Entry]
"""A reward node of the catalogue, with its place."""


def engine_function(references: References, node: Node, index: int) -> str | None:
    """`reward.credit:shaped`, and the like, where a reward node runs a function of the engine; None where it may run
    anything else."""
    if node.node_role is not NodeRole.REWARD or node.executable_ref is None:
        return None
    place = references.definition(node.executable_ref, ("nodes", index, "executable_ref"))
    _, inside, name = (place or "").rpartition("recipe/dag/")
    return name.replace(".py:", ":").replace("/", ".") if inside else None


def catalogued(draft: Draft, references: References) -> Iterator[Paying]:
    for index, node in draft.each_node():
        name = engine_function(references, node, index)
        shaping = node.executable_kwargs.get("shaping")
        entry = SHAPINGS.get(shaping) if name == SHAPED and isinstance(shaping, str) else CALLED.get(name)
        if entry is not None:
            yield index, node, entry


def check_rewards(draft: Draft, references: References) -> Iterator[Problem]:
    """Needs a whole draft, a graph without cycles, and options that passed."""
    for index, node, entry in catalogued(draft, references):
        yield from _check_twice(draft, index, node, entry)
        if entry.graded and not _graded_before(draft, references, node):
            message = "it needs the episode's outcome, and no node before it grades; let it depend on one that does"
            yield draft.source.problem(_place(index, entry), message)
        if entry.name == "vote_marginals":
            yield from _check_vote(draft, index, node)


def warn_of_rewards(draft: Draft) -> Iterator[Problem]:
    """Needs a sound draft."""
    rounds = {name: loop.max_rounds for _, loop in draft.each_loop() for name in loop.nodes}
    spoken = [node.node_id for _, node in draft.each_node() if node.node_role is NodeRole.ROLLOUT]
    inside = [name for name in spoken if rounds.get(name, 1) > 1]
    if not inside or len(inside) == len(spoken):
        return
    for index, node, entry in catalogued(draft, References(draft.source)):
        if entry.peers and node.executable_kwargs.get("players") is None:
            players = ", ".join(f"[{name}]" for name in inside)
            message = (
                f"`{entry.name}` compares all who speak in a round, and nodes outside of loops speak in the first one; "
                f"say who takes part: `players: [{players}]`"
            )
            yield draft.source.problem(_place(index, entry), message)


def _place(index: int, entry: Entry) -> KeyPath:
    return ("nodes", index, *(("executable_kwargs", "shaping") if entry.name in SHAPINGS else ("executable_ref",)))


def _check_twice(draft: Draft, index: int, node: Node, entry: Entry) -> Iterator[Problem]:
    algorithm, say = draft.algorithm, draft.source.problem
    if entry.copies and algorithm.spans_policies and _payments(draft, node, entry) > 1:
        several = "agents" if entry.use == REWARD else "calls"
        message = (
            f"`{entry.name}` pays several {several} for one reward, and {algorithm.estimator} hands rewards on itself: "
            "it would count more than once; remove this node"
        )
        yield say(_place(index, entry), message)
    elif entry.discounts and algorithm.carries_back and (algorithm.spans_policies or repeated_agent(draft)):
        own = ", or set `gamma_turn: 0`" if "gamma_turn" in type(algorithm).model_fields else ""
        message = (
            f"`{entry.name}` pays a call for what comes after it, and so does {algorithm.estimator}: it would count "
            f"twice; remove this node{own}"
        )
        yield say(_place(index, entry), message)


def _payments(draft: Draft, node: Node, entry: Entry) -> int:
    """How many agents a reward function, or calls of an episode a shaping may pay; of several turns, two count."""
    names = node.executable_kwargs.get("agents")
    agents = {group for group, agent in draft.each_agent() if names is None or agent.name in names}
    if entry.use == REWARD:
        return len(agents)
    nodes = [other for _, other in draft.each_node() if other.agent_group in agents]
    return len(moves_of(nodes, dict(draft.each_loop()), min(draft.episode.max_turns, 2)))


def _graded_before(draft: Draft, references: References, node: Node) -> bool:
    """Whether one before it, in the order in which they run, may set the outcome: none of the catalogue does."""
    indexed = {other.node_id: (index, other) for index, other in draft.each_node()}
    order = topological_order(graph_of(other for _, other in indexed.values()))
    before = [indexed[name] for name in order[: order.index(node.node_id)]]
    rewards = [place for place in before if place[1].node_role is NodeRole.REWARD]
    return any(engine_function(references, n, i) not in (SHAPED, *CALLED) for i, n in rewards)


def _check_vote(draft: Draft, index: int, node: Node) -> Iterator[Problem]:
    """Where a VOTE node counts some of the voters, it is that vote's marginals."""
    say, at, given = draft.source.problem, ("nodes", index, "executable_kwargs"), node.executable_kwargs
    voters = given.get("voters", [])
    differ = []
    for _, other in draft.each_node():
        shared = set(other.dependencies) & set(voters) if other.node_role is NodeRole.VOTE else set()
        if shared:
            differ.append((-len(shared), len(differ), other, list(_differences(other, voters, given))))
    if differ and all(found for *_, found in differ):
        *_, vote, found = min(differ, key=lambda one: one[:2])
        for key, what in found:
            path = (*at, key) if key in given else ("nodes", index, "executable_ref")
            yield say(path, f"the vote `{vote.node_id}` {what}; say the same here")


def _differences(vote: Node, voters: list[str], given: dict[str, object]) -> Iterator[tuple[str, str]]:
    if list(vote.dependencies) != voters:
        yield "voters", f"counts {listing(vote.dependencies)}, in this order"
    rule = vote.vote or Vote()
    for key in ("ties", "key"):
        if given.get(key, Vote.model_fields[key].default) != getattr(rule, key):
            yield key, f"has `{key}: {getattr(rule, key)}`"
