"""Checks of the algorithm: an option that the estimator or the loss does not read is an error.

Invariant: what a reader finds under `algorithm` is in force.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recipe.dag.algorithms.base import GSPO_CLIP, Algorithm, is_held
from recipe.dag.algorithms.grouped import Grouped
from recipe.dag.algorithms.ippo import Ippo
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.groups import horizons, pooled
from recipe.dag.workflow.moves import Move
from recipe.dag.workflow.problem import Problem, listing

LOSSES = {"clip_ratio_c": "vanilla", "policy_drift_coef": "cpgd"}
"""Option -> the policy loss that reads it."""
LARGE_GSPO_CLIP = 0.01
"""Above this no update of a sequence's mean log-probability is clipped."""


def check_algorithm(draft: Draft) -> Iterator[Problem]:
    say, algorithm = draft.source.problem, draft.algorithm
    for position, key in enumerate(algorithm.grouping):
        if key in algorithm.grouping[:position]:
            yield say(("algorithm", "group_by", position), f"`{key}` is listed twice")
        elif key == "branch" and draft.whole and not _branches(draft):
            message = "nothing branches here: no node has a `when`, and there are no loops; remove it"
            yield say(("algorithm", "group_by", position), message)
        elif key == "round" and not is_held(type(algorithm), "group_by") and draft.whole and not draft.loops:
            message = "nothing runs in rounds here: there are no loops; remove it"
            yield say(("algorithm", "group_by", position), message)
    if isinstance(algorithm, Grouped) and algorithm.gamma_turn is not None and algorithm.stat_unit == "trajectory":
        message = "a trajectory is worth the sum of its rewards already; remove this, or add `stat_unit: call`"
        yield say(("algorithm", "gamma_turn"), message, key=True)
    yield from _check_loss_options(draft, algorithm)
    if not any(problem.where == "algorithm.estimator" for problem in draft.problems):
        yield from _check_own_rewards(draft, algorithm)
    if algorithm.share_reward_in_agent and algorithm.spans_policies:
        message = (
            f"{algorithm.estimator} carries the last agent's reward to the others; sharing it too would count it twice"
        )
        yield say(("algorithm", "share_reward_in_agent"), message, key=True)
    if algorithm.drop_zero_variance and not algorithm.grouping:
        message = (
            f"{algorithm.estimator} compares no groups: a row carries gradient whatever its siblings earned; remove "
            "this, or choose an estimator that compares the episodes of a sample (grpo)"
        )
        yield say(("algorithm", "drop_zero_variance"), message, key=True)
    if algorithm.dynamic_sampling is not None and not algorithm.drop_zero_variance:
        message = "dynamic sampling replaces groups that were left out; set `drop_zero_variance: true`"
        yield say(("algorithm", "dynamic_sampling"), message, key=True)
    if algorithm.policy_loss == "gspo" and algorithm.loss_agg != "seq-mean-token-mean":
        message = "gspo averages over each sequence: `loss_agg: seq-mean-token-mean`, or leave it out"
        yield say(("algorithm", "loss_agg"), message)


def _check_own_rewards(draft: Draft, algorithm: Algorithm) -> Iterator[Problem]:
    """A call that is worth its own reward alone gets nothing of an outcome, which stands on its agent's last call."""
    if not draft.whole or (agent := repeated_agent(draft)) is None:
        return
    again = f"agent `{agent}` may move more than once in an episode"
    if isinstance(algorithm, Ippo) and algorithm.stream == "call":
        message = f"{again}, and its earlier calls would get nothing of what it earns later; use `stream: agent`"
        yield draft.source.problem(("algorithm", "stream"), message, key=True)
    if isinstance(algorithm, Grouped) and algorithm.stat_unit == "call" and algorithm.gamma_turn is None:
        message = (
            f"{again}: say how much of its later rewards a call is worth, `gamma_turn: 1.0` for all, `gamma_turn: 0.0` "
            "for its own reward only; or use `stat_unit: trajectory`"
        )
        yield draft.source.problem(("algorithm", "stat_unit"), message, key=True)


def repeated_agent(draft: Draft) -> str | None:
    """Return an agent of a trained policy that may move more than once in an episode. Needs a whole draft."""
    nodes = {node.node_id: node for _, node in draft.each_node()}
    for moves in _pooled(draft, ("agent",)):
        if len(moves) > 1:
            return draft.agents[nodes[moves[0].node].agent_group].name
    return None


def _pooled(draft: Draft, group_by: Collection[str]) -> list[list[Move]]:
    trained = [name for name, policy in draft.each_policy() if not policy.frozen]
    loops, nodes = dict(draft.each_loop()), [node for _, node in draft.each_node()]
    return pooled(nodes, loops, draft.agents, draft.episode, trained, group_by)


def warn_of_algorithm(draft: Draft) -> Iterator[Problem]:
    """What is legal, yet seldom meant."""
    yield from _warn_of_clip(draft)
    yield from _warn_of_roles(draft)
    yield from _warn_of_horizons(draft)


def _warn_of_clip(draft: Draft) -> Iterator[Problem]:
    """A ratio that is averaged over a sequence moves by about 1e-3, so a token's clip never takes effect."""
    if draft.algorithm.policy_loss != "gspo":
        return
    for key, usual in GSPO_CLIP.items():
        value = getattr(draft.algorithm, key)
        if draft.has("algorithm", key) and value > LARGE_GSPO_CLIP:
            message = f"gspo clips a sequence's mean ratio, which never gets to {value:g}; the paper has {usual:g}"
            yield draft.source.problem(("algorithm", key), message)


def _warn_of_roles(draft: Draft) -> Iterator[Problem]:
    if "role" not in draft.algorithm.grouping:
        return
    policies_of: dict[str, dict[str, None]] = {}
    for _, agent in draft.each_agent():
        policies_of.setdefault(agent.role or agent.name, {})[agent.policy] = None
    at = ("algorithm", "group_by", draft.algorithm.grouping.index("role"))
    for role, policies in policies_of.items():
        if len(policies) > 1:
            message = f"role `{role}` has several policies ({', '.join(policies)}), whose calls are not compared"
            yield draft.source.problem(at, message)


def _warn_of_horizons(draft: Draft) -> Iterator[Problem]:
    """A discounted sum of more calls is larger where every reward is the same."""
    algorithm, at = draft.algorithm, ("algorithm", "gamma_turn")
    if not isinstance(algorithm, Grouped) or not (algorithm.gamma_turn and draft.has(*at)):
        return
    if "prompt_hash" in algorithm.group_by or not (mixed := _unequal(draft, algorithm.group_by)):
        return
    missing = [key for key in ("node", "turn", "round") if any(len({getattr(m, key) for m in g}) > 1 for g in mixed)]
    for key in tuple(missing):
        fewer = [other for other in missing if other != key]
        missing = missing if _unequal(draft, (*algorithm.group_by, *fewer)) else fewer
    message = (
        "calls with more of their agent's calls after them are compared with calls that have fewer; "
        f"group by {listing(missing)}, too"
    )
    yield draft.source.problem(at, message, key=True)


def _unequal(draft: Draft, group_by: Collection[str]) -> list[list[Move]]:
    """Groups in which the discounted sums have different numbers of terms."""
    loops, nodes = dict(draft.each_loop()), [node for _, node in draft.each_node()]
    groups = _pooled(draft, group_by)
    left = horizons(groups, nodes, loops)
    return [group for group in groups if len({left[move] for move in group}) > 1]


def _branches(draft: Draft) -> bool:
    return bool(draft.loops) or any(node.when is not None for _, node in draft.each_node())


def _check_loss_options(draft: Draft, algorithm: Algorithm) -> Iterator[Problem]:
    """Options that this policy loss does not read."""
    for key, loss in LOSSES.items():
        if draft.has("algorithm", key) and algorithm.policy_loss != loss:
            message = f"policy_loss `{algorithm.policy_loss}` does not read this, only `{loss}` does; remove it"
            yield draft.source.problem(("algorithm", key), message, key=True)
