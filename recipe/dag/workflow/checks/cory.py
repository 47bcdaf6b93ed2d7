"""Checks of role exchange (`algorithm.cory`): different agents with different policies, all of them trained."""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.causality import descendants
from recipe.dag.rewards import CALLED, SHAPED
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.reward import catalogued, engine_function
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.moves import moves_of, reactions
from recipe.dag.workflow.problem import Problem, did_you_mean
from recipe.dag.workflow.schema import NodeRole

OWN = {"reward.outcome:outcome_reward", "reward.outcome:env_outcome", SHAPED, *CALLED}
"""Functions that pay nobody for what others did, but for those of the catalogue that copy."""


def check_cory(draft: Draft) -> Iterator[Problem]:
    cory, say, path = draft.algorithm.cory, draft.source.problem, ("algorithm", "cory", "roles")
    if cory is None:
        return
    if len(cory.roles) < 2:
        yield say(path, "an exchange needs at least two agents")
    policy_of, taken = {agent.name: agent.policy for _, agent in draft.each_agent()}, dict[str, str]()
    for position, role in enumerate(cory.roles):
        at, policy = (*path, position), policy_of.get(role)
        if policy is None:
            yield say(at, f"no agent `{role}`{did_you_mean(role, list(policy_of))}")
        elif policy in taken:
            yield say(at, f"`{role}` has policy `{policy}`, like `{taken[policy]}`: nothing to exchange")
        elif draft.policies[policy].frozen:
            yield say(at, f"policy `{policy}` of `{role}` is frozen; an exchange is between policies that are trained")
        else:
            taken[policy] = role


def warn_of_cory(draft: Draft) -> Iterator[Problem]:
    """Where it is certain that a role learns nothing of the others: it hears none of them, or all rewards are its own.
    Needs a sound draft."""
    cory, say, path = draft.algorithm.cory, draft.source.problem, ("algorithm", "cory")
    if cory is None:
        return
    nodes, loops = [node for _, node in draft.each_node()], dict(draft.each_loop())
    turns = min(draft.episode.max_turns, 2)
    speaker = {node.node_id: draft.agents[node.agent_group].name for node in nodes}
    moves = [(move.id, speaker[move.node]) for move in moves_of(nodes, loops, turns)]
    graph = reactions(nodes, loops, draft.agents, turns)
    after = descendants(graph, [move for move, agent in moves if agent in cory.roles])
    for position, role in enumerate(cory.roles[1:], 1):
        heard = {later for move, agent in moves if agent in cory.roles and agent != role for later in after[move]}
        if not any(move in heard for move, agent in moves if agent == role):
            message = f"`{role}` hears none of the others; let a node of it depend on one of theirs"
            yield say((*path, "roles", position), message)
    if not _may_share(draft):
        message = "every role is paid for itself alone; add a REWARD node `recipe.dag.reward.credit:shaped` with "
        yield say(path, message + "`{shaping: shared}`", key=True)


def _may_share(draft: Draft) -> bool:
    """Whether anything may pay one agent for what another one did."""
    algorithm, references = draft.algorithm, References(draft.source)
    if algorithm.share_reward_in_agent or algorithm.spans_policies:
        return True
    for index, node in draft.each_node():
        if node.agent_options.rewards_with_env:
            return True
        if node.node_role is NodeRole.REWARD and engine_function(references, node, index) not in OWN:
            return True
    return any(entry.copies for _, _, entry in catalogued(draft, references))
