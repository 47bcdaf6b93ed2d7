"""CORY (arXiv 2410.06101): agents exchange their policies every few steps.

Invariant: in a workflow that passes the checks, the roles are different agents with different policies, all trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from recipe.dag.algorithms.blocks import Block
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.credit.causality import descendants

PATH: KeyPath = ("algorithm", "cory")


class Cory(Block):
    """Agents exchange policies every few steps (CORY, arXiv 2410.06101): with a pioneer and an observer that hears it,
    both policies learn both roles, and either can be deployed alone. Validation uses the policies as declared."""

    source: ClassVar[str] = "arXiv 2410.06101"
    assumes: ClassVar[str] = (
        "as many trained policies as roles; rewards are shared (shaping shared); the pioneer is deployed alone"
    )

    roles: tuple[str, ...]
    """The agents, in the order in which their policies move on."""
    every: int = Field(default=5, ge=1)
    """Steps."""

    def check(self, facts: Facts) -> Iterator[Problem]:
        path = (*PATH, "roles")
        if len(self.roles) < 2:
            yield facts.problem(path, "an exchange needs at least two agents")
        policy_of = {agent.name: agent.policy for agent in facts.agents}
        role_of: dict[str, str] = {}
        for position, role in enumerate(self.roles):
            policy = policy_of.get(role)
            if policy is None:
                message = f"no agent `{role}`{did_you_mean(role, list(policy_of))}"
            elif policy in role_of:
                message = f"`{role}` has the same policy as `{role_of[policy]}` (`{policy}`), so nothing is exchanged"
            elif policy in facts.frozen_policies:
                message = f"policy `{policy}` of `{role}` is frozen; only trained policies can be exchanged"
            else:
                role_of[policy] = role
                continue
            yield facts.problem((*path, position), message)

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Warn of a role that certainly learns nothing from the other roles: it hears none of them, or every reward is
        for one role alone."""
        for position in self._deaf_roles(facts):
            message = f"`{self.roles[position]}` hears none of the other roles; let one of its nodes depend on theirs"
            yield facts.problem((*PATH, "roles", position), message)
        if not facts.shares_rewards:
            message = (
                "each role is paid only for its own calls; add a REWARD node `recipe.dag.reward.credit:shaped` with "
                "`{shaping: shared}`"
            )
            yield facts.problem(PATH, message, key=True)

    def _deaf_roles(self, facts: Facts) -> Iterator[int]:
        """Yield the positions of the roles, except the pioneer, none of whose moves can react to another role's."""
        agent_of = {move.id: facts.agent_of[move.node] for move in facts.moves()}
        spoken = [move for move, agent in agent_of.items() if agent in self.roles]
        after = descendants(facts.reactions(), spoken)
        for position, role in enumerate(self.roles[1:], 1):
            reactions = {later for move in spoken if agent_of[move] != role for later in after[move]}
            if not any(agent == role and move in reactions for move, agent in agent_of.items()):
                yield position
