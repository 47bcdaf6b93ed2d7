"""HAPPO (arXiv 2109.11251): policies learn one after the other, and each update weights the advantages of later ones.

Invariant: every workflow that passes the checks meets the assumptions of the compound factor: a policy per agent, each
updated in every step on all calls of the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.blocks import Block
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.problem import KeyPath, Problem

PATH: KeyPath = ("algorithm", "happo")


class Happo(Block):
    """Policies learn one after the other. The change that an update made to the probability of an agent's messages
    weights the advantages of the policies after it (HAPPO, arXiv 2109.11251): those of the same turn if advantages
    differ by turn, those of the whole episode if one return applies to every turn. Each agent needs its own policy."""

    source: ClassVar[str] = "arXiv 2109.11251"
    assumes: ClassVar[str] = "a policy per agent, none shared; every agent's reward is the team's; with any estimator"
    reads_old_log_probs: ClassVar[bool] = True

    order: Literal["random", "reverse_topological"] = "random"
    """random: drawn anew in every step. reverse_topological: the agent that speaks last learns first."""
    ratio: Literal["sequence_sum", "sequence_mean", "clamped"] = "clamped"
    """Measure of an update. clamped: the exact ratio of all tokens of an agent, within 1 / bound and bound.
    sequence_sum: the exact ratio, whose variance grows with length. sequence_mean: its geometric mean per token, which
    differs from 1 by less than a thousandth from a hundred tokens on, so that an update hardly affects later ones."""
    bound: float = Field(default=4.0, gt=1.0)
    """Limit of one policy's ratio; factors of several policies multiply."""

    def check(self, facts: Facts) -> Iterator[Problem]:
        yield from self._check_policies(facts)
        yield from self._check_options(facts)
        yield from facts.check_forward_passes(PATH)
        if self.order == "reverse_topological" and (cycle := facts.cycle_of_hearing()):
            message = f"these agents hear each other: {' -> '.join(cycle)}; use `random`"
            yield facts.problem((*PATH, "order"), message)

    def _check_policies(self, facts: Facts) -> Iterator[Problem]:
        trained = facts.trained_policies
        if len(trained) < 2:
            message = "sequential updates need at least two trained policies; remove this"
            yield facts.problem(PATH, message, key=True)
        for name, policy in trained.items():
            agents = [agent.name for agent in facts.trained_agents if agent.policy == name]
            if len(agents) > 1:
                message = f"{', '.join(agents)} share policy `{name}`, so an update of one changes the other"
                yield facts.problem(PATH, f"{message}; give each agent its own policy", key=True)
            if policy.train_cycle is not None:
                message = "with `algorithm.happo` every policy learns in every step, one after the other; remove this"
                yield facts.problem(("policies", name, "train_cycle"), message, key=True)

    def _check_options(self, facts: Facts) -> Iterator[Problem]:
        if self.ratio != "clamped" and facts.has(*PATH, "bound"):
            yield facts.problem((*PATH, "bound"), "only `ratio: clamped` reads this; remove it", key=True)
        if facts.algorithm.old_log_probs == "rollout":
            message = "the compound factor compares the trainer's log-probs before and after an update; use `trainer`"
            yield facts.problem(("algorithm", "old_log_probs"), message)
        if facts.algorithm.drop_zero_variance:
            message = "the compound factor needs every call of an episode, and this leaves some out; remove it"
            yield facts.problem(("algorithm", "drop_zero_variance"), message, key=True)
        if facts.drops_turns:
            message = "the compound factor needs the calls of all turns, not only the last one's; write `all`"
            yield facts.problem(("episode", "train_turns"), message)
