"""Checks of what weighs the policy loss (`algorithm.importance`).

Invariant: in a workflow that passes, all log-probs that a weight compares are computed before the update.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import NodeRole


def check_loss(draft: Draft) -> Iterator[Problem]:
    path: KeyPath = ("algorithm", "importance")
    if draft.algorithm.importance is None:
        return
    if draft.algorithm.old_log_probs == "rollout":
        message = "with `old_log_probs: rollout` every ratio is taken against the server already; remove one of the two"
        yield draft.source.problem(path, message, key=True)
    else:
        yield from check_forward_passes(draft, path)


def check_forward_passes(draft: Draft, path: KeyPath) -> Iterator[Problem]:
    """Yield a problem at `path` where a declared training chain updates a policy without its old log-probs."""
    actors = [node for _, node in draft.each_node() if node.node_role is NodeRole.ACTOR]
    updates = sum(not node.only_forward_compute for node in actors)
    if updates > len(actors) - updates:
        message = "every policy needs an ACTOR node with `only_forward_compute: true`; add the missing ones"
        yield draft.source.problem(path, message, key=True)
