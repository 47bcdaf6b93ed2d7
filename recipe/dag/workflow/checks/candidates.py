"""Checks of nodes with candidates: what scores them, what they may share, and which algorithms can learn from them.

Invariant: the candidates of a node that passes cannot affect each other, nor anything but the record before one of them
is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.types.convention import COMPUTE, Reference
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.moves import remembers
from recipe.dag.workflow.node import Candidates, Kind, Node, title


def check_candidates(facts: DraftFacts, index: int, node: Node, candidates: Candidates) -> Iterator[Problem]:
    draft, path = facts.draft, ("nodes", index, "candidates")
    if ":" in candidates.by:
        yield from _check_function(facts, candidates, path)
    elif draft.complete:
        yield from _check_judge(draft, node, candidates, path)
    if draft.complete:
        if draft.agent(node).on_failure == "skip":
            message = "`on_failure: skip` of its agent has no effect here: a candidate that fails ends the attempt"
            yield draft.source.problem(path, message, key=True)
        yield from _check_tools(draft, node, path)
        yield from _check_algorithm(facts, node, path)


def _check_function(facts: DraftFacts, spec: Candidates, path: KeyPath) -> Iterator[Problem]:
    yield from facts.check_function(Reference(spec.by, (*path, "by"), spec.args, (*path, "args")), COMPUTE)
    if facts.has(*path, "key"):
        yield facts.problem((*path, "key"), "a function returns the score; only a node has a key; remove it", key=True)


def _check_judge(draft: Draft, node: Node, spec: Candidates, path: KeyPath) -> Iterator[Problem]:
    """Check that the node `by` can run once for each candidate, right after it."""
    at = (*path, "by")
    judge = draft.by_id().get(spec.by)
    if draft.has(*path, "args"):
        yield draft.source.problem((*path, "args"), "only a function takes these; remove them", key=True)
    if judge is None:
        yield draft.source.problem(at, f"{draft.no_node(at, spec.by)}; or write `file.py:function`")
        return
    loops = {name: loop for loop, spec_ in draft.each_loop() for name in spec_.nodes}
    name = judge.id
    reasons = {
        f"`{name}` is {title(judge.kind)}; name a node with `agent` or `compute`": (
            judge.kind not in (Kind.ROLLOUT, Kind.COMPUTE)
        ),
        f"`{name}` runs once for each candidate, so it must depend on `{node.id}` and nothing else": (
            judge.after != (node.id,)
        ),
        f"`{name}` must be in the same loop as `{node.id}`": loops.get(name) != loops.get(node.id),
        f"`{name}` judges every candidate, so it cannot have a `when`": judge.when is not None,
        f"`{name}` cannot have candidates itself": judge.candidates is not None,
        f"`{name}` must not step an env, since it runs for candidates that are not kept": (bool(judge.env)),
    }
    message = next((message for message, applies in reasons.items() if applies), None)
    if message is not None:
        yield draft.source.problem(at, message)


def _check_tools(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check that no candidate, nor what judges it, leaves anything in a tool."""
    judge = draft.by_id().get(node.candidates.by) if node.candidates is not None else None
    for other in (node, judge):
        if other is None or other.kind is not Kind.ROLLOUT:
            continue
        agent = draft.agent(other)
        for tool in filter(remembers, agent.tools):
            message = (
                f"agent `{agent.name}` uses the tool `{tool}`, which may remember calls, so candidates that are not "
                "kept would change what the others see; use a tool without a memory, or remove this"
            )
            yield draft.source.problem(path, message, key=True)


def _check_algorithm(facts: DraftFacts, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check that the algorithm can do with calls that have a score and no return."""
    agent, algorithm = facts.draft.agent(node), facts.algorithm
    policy = facts.trained_policies.get(agent.policy)
    if policy is None:
        return
    instead = "choose `grpo`, `rloo`, `reinforce` or another one without critic and team value"
    if algorithm.needs_values or algorithm.spans_policies:
        message = f"{algorithm.estimator} needs the return of every call, and candidates that are not kept have none"
        yield facts.problem(path, f"{message}; {instead}", key=True)
    elif policy.critic is not None:
        message = f"the critic of policy `{agent.policy}` would learn from candidates that have no return"
        yield facts.problem(path, f"{message}; remove the critic", key=True)
    if algorithm.happo is not None:
        message = "`algorithm.happo` needs one call of each agent per turn, and candidates are several; remove one"
        yield facts.problem(path, message, key=True)
    if algorithm.kl_reward_coef > 0:
        message = "candidates that are not kept have no return to take the KL from; use `algorithm.kl_loss_coef`"
        yield facts.problem(path, message, key=True)
