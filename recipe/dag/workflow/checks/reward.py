"""Checks of the engine's own reward nodes: their options, what they need before them, and rewards that count twice.

Invariant: a reward of such a node counts once, by the node or by the estimator. A user's function may do anything, and
is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from recipe.dag.algorithms.reward_catalogue import RewardEntry
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import listing
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import graph_of, topological_order
from recipe.dag.workflow.moves import moves_of
from recipe.dag.workflow.node import Kind, Node, Vote

COACH_SCORES = "coach.reward:coach_scores"
"""The function that turns the verdicts of coaches into rewards."""


def check_rewards(facts: DraftFacts) -> Iterator[Problem]:
    """Needs a complete draft, a graph without cycles, and options that passed."""
    for index, node, entry in facts.catalogued_rewards():
        yield from _check_twice(facts, index, node, entry)
        if entry.name == "pairwise_ranking":
            yield from _check_comparison(facts, index, node)
        if entry.traits.graded and not _graded_before(facts, node):
            message = "reads the episode's outcome, but no node before it sets one; let it depend on a node that does"
            yield facts.problem(_path(index, entry), message)
        if entry.name == "vote_marginals":
            yield from _check_vote(facts.draft, index, node)


def warn_of_rewards(facts: DraftFacts) -> Iterator[Problem]:
    """Needs a workflow without problems."""
    yield from _warn_of_players(facts)
    yield from _warn_of_summed_scores(facts)


def _warn_of_players(facts: DraftFacts) -> Iterator[Problem]:
    rounds = {name: loop.max_rounds for loop in facts.loops.values() for name in loop.nodes}
    speaking = [node.id for node in facts.nodes if node.kind is Kind.ROLLOUT]
    in_loops = [name for name in speaking if rounds.get(name, 1) > 1]
    if not in_loops or len(in_loops) == len(speaking):
        return
    for index, node, entry in facts.catalogued_rewards():
        if entry.traits.peers and node.args.get("players") is None:
            players = ", ".join(f"[{name}]" for name in in_loops)
            message = (
                f"`{entry.name}` compares all nodes that speak in a round, and nodes outside loops speak in the first "
                f"one; name the players: `players: [{players}]`"
            )
            yield facts.problem(_path(index, entry), message)


def _warn_of_summed_scores(facts: DraftFacts) -> Iterator[Problem]:
    """Warn of coaches that score every round of a loop if the return of a call includes its agent's later rewards:
    acting more often would earn more."""
    algorithm = facts.algorithm
    if not algorithm.carries_back or algorithm.carries_back_unless is None:
        return
    agents = {agent.name for agent in facts.trained_agents}
    trained = {node for node, agent in facts.agent_of.items() if agent in agents}
    loops = [set(loop.nodes) for loop in facts.loops.values() if loop.max_rounds > 1]
    for index, node, function, _ in facts.reward_functions:
        coaches = node.args.get("coaches")
        if function != COACH_SCORES or not isinstance(coaches, Mapping):
            continue
        for coach, judged in coaches.items():
            # the coach's own check reports a judged node that is not a name
            if isinstance(judged, str) and judged in trained and any({coach, judged} <= nodes for nodes in loops):
                message = (
                    f"`{coach}` scores every round of `{judged}`, and with {algorithm.estimator} the return of a call "
                    f"includes its agent's later rewards, so that more rounds earn more; set "
                    f"`{algorithm.carries_back_unless}`"
                )
                problem = facts.problem(("nodes", index, "args", "coaches"), message)
                yield replace(problem, training_only=True)


def _path(index: int, entry: RewardEntry) -> KeyPath:
    return ("nodes", index, *(("args", "shaping") if entry.shaping else ("reward",)))


def _check_twice(facts: DraftFacts, index: int, node: Node, entry: RewardEntry) -> Iterator[Problem]:
    algorithm = facts.algorithm
    if entry.traits.copies and algorithm.spans_policies and _payments(facts.draft, node, entry) > 1:
        several = "calls" if entry.shaping else "agents"
        remedy = "name one agent in `args.agents`" if entry.of_group else "remove this node"
        message = (
            f"`{entry.name}` copies one reward to several {several}, and {algorithm.estimator} already carries rewards "
            f"from agent to agent, so it would count more than once; {remedy}"
        )
        yield facts.problem(_path(index, entry), message)
    elif entry.traits.discounts and algorithm.carries_back and (algorithm.spans_policies or facts.repeated_agent):
        instead = f", or set `{algorithm.carries_back_unless}`" if algorithm.carries_back_unless else ""
        message = (
            f"`{entry.name}` credits a call with later rewards, and so does {algorithm.estimator}, so they would count "
            f"twice; remove this node{instead}"
        )
        yield facts.problem(_path(index, entry), message)


def _check_comparison(facts: DraftFacts, index: int, node: Node) -> Iterator[Problem]:
    comparisons = [key for key in ("compare", "judge") if node.args.get(key) is not None]
    if len(comparisons) != 1:
        have = "both" if comparisons else "neither"
        message = f"needs `compare: file.py:function` or `judge: <node>`, and has {have}"
        yield facts.problem(("nodes", index, "reward"), message)
    elif comparisons == ["compare"] and "key" in node.args:
        path: KeyPath = ("nodes", index, "args", "key")
        yield facts.problem(path, "only `judge` reads this; remove it", key=True)


def _payments(draft: Draft, node: Node, entry: RewardEntry) -> int:
    """Return how many agents a reward function, or calls of an episode a shaping may pay; two turns represent any
    number of turns."""
    names = node.args.get("agents")
    agents = {agent.name for _, agent in draft.each_agent() if names is None or agent.name in names}
    if not entry.shaping:
        return len(agents)
    nodes = [other for _, other in draft.each_node() if other.agent in agents]
    return len(moves_of(nodes, dict(draft.each_loop()), min(draft.episode.max_turns, 2)))


def _graded_before(facts: DraftFacts, node: Node) -> bool:
    """Return whether a node that runs before this one may set the outcome; no function of the catalogue does."""
    order = topological_order(graph_of(facts.nodes))
    before = set(order[: order.index(node.id)])
    return any(entry is None and other.id in before for _, other, _, entry in facts.reward_functions)


def _check_vote(draft: Draft, index: int, node: Node) -> Iterator[Problem]:
    """Check that the options match the vote node that shares the most voters, if each that shares any differs."""
    path, options = ("nodes", index, "args"), node.args
    voters = options.get("voters", [])
    candidates = []
    for position, other in draft.each_node():
        shared = set(other.after) & set(voters) if other.kind is Kind.VOTE else set()
        if shared:
            candidates.append((-len(shared), position, other, list(_differences(other, voters, options))))
    if candidates and all(differences for *_, differences in candidates):
        *_, vote, differences = min(candidates, key=lambda candidate: candidate[:2])
        for key, text in differences:
            key_path: KeyPath = (*path, key) if key in options else ("nodes", index, "reward")
            yield draft.source.problem(key_path, f"the vote `{vote.id}` {text}; write the same here")


def _differences(vote: Node, voters: list[str], options: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (option, what the vote has) for each option that differs from the vote's."""
    if list(vote.after) != voters:
        yield "voters", f"counts {listing(vote.after)}, in this order"
    rule = vote.vote or Vote()
    for key in ("ties", "key"):
        if options.get(key, Vote.model_fields[key].default) != getattr(rule, key):
            yield key, f"has `{key}: {getattr(rule, key)}`"
