"""All checks of a workflow's pieces against each other.

Invariant: a check does not depend on the results of the other checks, and covers only pieces that could be read: one
mistake, one problem. Checks that need the whole file (an unused policy) run only if all of it could be read. Every name
that becomes part of a metric's or a folder's name is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.checks.agent import check_agents, check_envs
from recipe.dag.workflow.checks.candidates import check_candidates
from recipe.dag.workflow.checks.condition import check_condition, check_condition_order
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.checks.flow import check_dependencies, check_flow, check_loop_order, check_loops
from recipe.dag.workflow.checks.node import check_node
from recipe.dag.workflow.checks.policy import check_policies
from recipe.dag.workflow.checks.reward import check_rewards
from recipe.dag.workflow.checks.reward_option import check_reward_options
from recipe.dag.workflow.checks.tool import check_tools
from recipe.dag.workflow.checks.training import check_training
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node import TRAINING_KINDS, Kind
from recipe.dag.workflow.overrides import check_overrides


def check_workflow(facts: DraftFacts) -> list[Problem]:
    """Return every problem of a draft beyond those that reading its pieces found."""
    draft = facts.draft
    loops, dependencies = list(check_loops(draft)), list(check_dependencies(draft))
    acyclic = draft.complete and not dependencies
    disorder = list(check_loop_order(draft)) if acyclic and draft.loops and not loops else []
    facts.ordered = acyclic and not loops and not disorder
    options = list(_check_reward_options(facts))
    problems = [
        *_check_names(draft),
        *check_agents(draft),
        *check_policies(draft, facts.references),
        *draft.algorithm.check_options(facts),
        *check_tools(draft, facts.references),
        *check_envs(draft, facts.references),
        *_check_nodes(facts),
        *check_overrides(draft),
        *options,
        *loops,
        *dependencies,
        *disorder,
    ]
    conditions = list(draft.each_condition())
    for path, condition, _, _ in conditions:
        problems += check_condition(draft, condition, path)
    if acyclic:
        problems += check_condition_order(draft) if conditions and not loops else []
        problems += check_flow(draft)
        problems += check_training(draft) if any(n.kind in TRAINING_KINDS for n in facts.nodes) else []
        problems += draft.algorithm.check(facts)
        problems += [] if options else check_rewards(facts)
    return problems


def _check_nodes(facts: DraftFacts) -> Iterator[Problem]:
    for index, node in facts.draft.each_node():
        yield from check_node(facts.draft, index, node)
        yield from facts.references.check_node(node, ("nodes", index))
        if node.candidates is not None and node.kind is Kind.ROLLOUT:
            yield from check_candidates(facts, index, node, node.candidates)


def _check_reward_options(facts: DraftFacts) -> Iterator[Problem]:
    for index, node, _, entry in facts.reward_functions:
        if entry is not None:
            yield from check_reward_options(facts, index, node, entry)


def _check_names(draft: Draft) -> Iterator[Problem]:
    """Check that names consist of letters, digits, `_` and `-`, without duplicates."""
    agents: list[tuple[KeyPath, str]] = [(("agents", i, "name"), name) for i, name in enumerate(draft.agent_names)]
    nodes: list[tuple[KeyPath, str]] = [(("nodes", i, "id"), name) for i, name in enumerate(draft.node_ids)]
    yield from _check_unique(draft, agents, "agent")
    for kind, key in (("policy", "policies"), ("tool", "tools"), ("env", "envs"), ("loop", "loops")):
        yield from _check_unique(draft, [((key, name), name) for name in getattr(draft, key)], kind, key=True)
    yield from _check_unique(draft, nodes, "node")


def _check_unique(draft: Draft, names: list[tuple[KeyPath, str]], kind: str, *, key: bool = False) -> Iterator[Problem]:
    seen: set[str] = set()
    for path, name in names:
        if draft.has(*path) and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) and (name or key):
            message = f"`{name}` is not a valid name; use letters, digits, `_` and `-` (it names metrics and folders)"
            yield draft.source.problem(path, message, key=key)
        elif name in seen:
            yield draft.source.problem(path, f"another {kind} is called `{name}`; rename one of them", key=key)
        if name:
            seen.add(name)
