"""Checks of sequential updates (`algorithm.happo`): a policy per agent, all of them updated in every step.

Invariant: what the compound factor assumes holds in every workflow that passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.workflow.checks.loss import check_forward_passes
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import agents_heard, find_cycle
from recipe.dag.workflow.problem import Problem


def check_happo(draft: Draft) -> Iterator[Problem]:
    happo, say, path = draft.algorithm.happo, draft.source.problem, ("algorithm", "happo")
    if happo is None:
        return
    agents_of: dict[str, list[str]] = {name: [] for name, policy in draft.policies.items() if not policy.frozen}
    for _, agent in draft.each_agent():
        agents_of.get(agent.policy, []).append(agent.name)
    if len(agents_of) < 2:
        yield say(path, "one policy after the other needs at least two that are trained; remove it", key=True)
    for policy, names in agents_of.items():
        if len(names) > 1:
            message = f"{', '.join(names)} share policy `{policy}`, so one's update moves the other; give each its own"
            yield say(path, message, key=True)
        if draft.policies[policy].train_cycle is not None:
            message = "with `algorithm.happo` every policy learns in every step, one after the other; remove it"
            yield say(("policies", policy, "train_cycle"), message, key=True)
    if happo.ratio != "clamped" and draft.has(*path, "bound"):
        yield say((*path, "bound"), "only `ratio: clamped` reads this; remove it", key=True)
    if draft.algorithm.old_log_probs == "rollout":
        message = "the compound factor compares the trainer's log-probs before and after an update; use `trainer`"
        yield say(("algorithm", "old_log_probs"), message)
    if draft.algorithm.drop_zero_variance:
        message = "the compound factor follows all that agents said, and this leaves some of it out; remove it"
        yield say(("algorithm", "drop_zero_variance"), message, key=True)
    if draft.episode.train_turns == "last" and draft.episode.max_turns > 1:
        message = "the compound factor follows all that agents said, not the last turn alone; write `all`"
        yield say(("episode", "train_turns"), message)
    yield from check_forward_passes(draft, path)
    trained = {group for group, agent in draft.each_agent() if agent.policy in agents_of}
    heard = agents_heard(node for _, node in draft.each_node())
    heard = {group: tuple(trained.intersection(others)) for group, others in heard.items() if group in trained}
    if happo.order == "reverse_topological" and (cycle := find_cycle(heard)):
        names = " -> ".join(draft.agents[group].name for group in cycle)
        yield say((*path, "order"), f"these agents hear each other: {names}; use `random`")
