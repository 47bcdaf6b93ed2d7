"""Checks of the algorithm: an option that the estimator or the loss does not read is an error.

Invariant: what a reader finds under `algorithm` is in force.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.algorithms import ENTRIES, SELECTABLE, SPANNING, contradictions
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.problem import Problem
from recipe.dag.workflow.schema import Algorithm

READ = {key for name in SELECTABLE for key in ENTRIES[name].options}
"""Options that some estimators read and others do not."""
GROUPING = ("group_by", "stat_unit", "gamma_turn")
"""What also decides which groups earned one and the same."""
LOSSES = {"clip_ratio_c": "vanilla", "policy_drift_coef": "cpgd"}
"""Option -> the policy loss that reads it."""


def check_algorithm(draft: Draft) -> Iterator[Problem]:
    say, algorithm = draft.source.problem, draft.algorithm
    grouped = "group_by" in ENTRIES[algorithm.estimator].options or algorithm.drop_zero_variance
    for position, key in enumerate(algorithm.group_by):
        if key in algorithm.group_by[:position]:
            yield say(("algorithm", "group_by", position), f"`{key}` is listed twice")
        elif key == "branch" and grouped and draft.whole and not _branches(draft):
            message = "nothing branches here: no node has a `when`, and there are no loops; remove it"
            yield say(("algorithm", "group_by", position), message)
    if not any(problem.where == "algorithm.estimator" for problem in draft.problems):
        yield from _check_unread(draft, algorithm)
    if algorithm.share_reward_in_agent and algorithm.estimator in SPANNING:
        message = (
            f"{algorithm.estimator} carries the last agent's reward to the others; sharing it too would count it twice"
        )
        yield say(("algorithm", "share_reward_in_agent"), message, key=True)
    if algorithm.dynamic_sampling is not None and not algorithm.drop_zero_variance:
        message = "dynamic sampling replaces groups that were left out; set `drop_zero_variance: true`"
        yield say(("algorithm", "dynamic_sampling"), message, key=True)
    if algorithm.policy_loss == "gspo" and algorithm.loss_agg != "seq-mean-token-mean":
        message = "gspo averages over each sequence: `loss_agg: seq-mean-token-mean`, or leave it out"
        yield say(("algorithm", "loss_agg"), message)


def warn_of_algorithm(draft: Draft) -> Iterator[Problem]:
    """What is legal, yet seldom meant."""
    if "role" not in draft.algorithm.group_by:
        return
    policies_of: dict[str, dict[str, None]] = {}
    for _, agent in draft.each_agent():
        policies_of.setdefault(agent.role or agent.name, {})[agent.policy] = None
    at = ("algorithm", "group_by", draft.algorithm.group_by.index("role"))
    for role, policies in policies_of.items():
        if len(policies) > 1:
            message = f"role `{role}` has several policies ({', '.join(policies)}), whose calls are not compared"
            yield draft.source.problem(at, message)


def _branches(draft: Draft) -> bool:
    return bool(draft.loops) or any(node.when is not None for _, node in draft.each_node())


def _check_unread(draft: Draft, algorithm: Algorithm) -> Iterator[Problem]:
    """Options that this estimator or loss does not read, or that it has otherwise."""
    for key, loss in LOSSES.items():
        if draft.has("algorithm", key) and algorithm.policy_loss != loss:
            message = f"policy_loss `{algorithm.policy_loss}` does not read this, only `{loss}` does; remove it"
            yield draft.source.problem(("algorithm", key), message, key=True)
    entry = ENTRIES[algorithm.estimator]
    read = {*entry.options, *(GROUPING if algorithm.drop_zero_variance else ())}
    if entry.name == "gdpo":  # which compares what each node paid, and not what came of it later
        read -= {"gamma_turn"}
    given = {key: getattr(algorithm, key) for key in sorted(READ) if draft.has("algorithm", key)}
    for key in sorted(given.keys() - read):
        message = f"estimator `{entry.name}` does not read this; remove it or choose another estimator"
        yield draft.source.problem(("algorithm", key), message, key=True)
    for key in contradictions(entry.name, given):
        message = f"estimator `{entry.name}` has another value here; remove it, or choose `grpo` to set it freely"
        yield draft.source.problem(("algorithm", key), message, key=True)
