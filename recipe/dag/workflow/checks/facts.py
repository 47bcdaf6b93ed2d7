"""The facts about a draft of a workflow file.

Invariant: a fact is derived from the draft when it is asked for, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.reward_catalogue import SHAPED, RewardEntry, chosen_shaping, read_entry
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.types.move import Move
from recipe.dag.workflow.agent_schema import Agent, Policy
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.training import check_forward_passes
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import agents_heard, find_cycle
from recipe.dag.workflow.moves import horizons, moves_of, pooled, reactions
from recipe.dag.workflow.node import Kind, Node
from recipe.dag.workflow.schema import Loop

PAYS_OWN_ONLY = ("reward.outcome:outcome_reward", "reward.outcome:env_outcome")
"""Functions outside the reward catalogue that pay each agent only for its own calls."""


class DraftFacts(Facts):
    def __init__(self, draft: Draft):
        self.draft, self.references, self.ordered = draft, References(draft.source), False
        self.has, self.problem, self.no_node = draft.has, draft.source.problem, draft.no_node
        self.check_function = self.references.check_function

    @property
    def algorithm(self) -> Algorithm:
        return self.draft.algorithm

    @property
    def complete(self) -> bool:
        return self.draft.complete

    @property
    def one_turn(self) -> bool:
        return self.draft.episode.max_turns == 1 and not self.draft.reported("episode")

    @property
    def drops_turns(self) -> bool:
        return self.draft.episode.train_turns == "last" and self.draft.episode.max_turns > 1

    @property
    def branches(self) -> bool:
        return bool(self.draft.loops) or any(node.when is not None for _, node in self.draft.each_node())

    @property
    def nodes(self) -> list[Node]:
        return [node for _, node in self.draft.each_node()]

    @property
    def loops(self) -> dict[str, Loop]:
        return dict(self.draft.each_loop())

    @property
    def agents(self) -> list[Agent]:
        return [agent for _, agent in self.draft.each_agent()]

    @property
    def trained_policies(self) -> dict[str, Policy]:
        return {name: policy for name, policy in self.draft.each_policy() if not policy.frozen}

    @property
    def frozen_policies(self) -> set[str]:
        return {name for name, policy in self.draft.each_policy() if policy.frozen}

    @property
    def trained_agents(self) -> list[Agent]:
        trained = self.trained_policies
        return [agent for agent in self.agents if agent.policy in trained]

    @property
    def agent_of(self) -> dict[str, str]:
        return {node.id: node.agent for node in self.nodes if node.agent is not None}

    @cached_property
    def repeated_agent(self) -> str | None:
        for moves in self._groups(("agent",)):
            if len(moves) > 1:
                return self.agent_of[moves[0].node]
        return None

    def uneven_groups(self, group_by: Collection[str]) -> list[list[Move]]:
        groups = self._groups(group_by)
        following = horizons(groups, self.nodes, self.loops)
        return [group for group in groups if len({following[move] for move in group}) > 1]

    def _groups(self, group_by: Collection[str]) -> list[list[Move]]:
        return pooled(self.nodes, self.loops, self.agents, self.draft.episode, self.trained_policies, group_by)

    def moves(self) -> Sequence[Move]:
        return moves_of(self.nodes, self.loops, self._turns)

    def reactions(self) -> dict[str, tuple[str, ...]]:
        return reactions(self.nodes, self.loops, self.draft.agents, self._turns)

    @property
    def _turns(self) -> int:
        return min(self.draft.episode.max_turns, 2)

    def cycle_of_hearing(self) -> list[str] | None:
        trained = {agent.name for agent in self.trained_agents}
        heard = agents_heard(self.nodes)
        return find_cycle({name: others for name, others in heard.items() if name in trained})

    def check_forward_passes(self, path: KeyPath) -> Iterator[Problem]:
        return check_forward_passes(self.draft, path)

    @property
    def paying_nodes(self) -> list[str]:
        pays = (node for node in self.nodes if node.kind is Kind.REWARD or node.env_pays)
        return [node.id for node in pays]

    @property
    def shares_rewards(self) -> bool:
        algorithm = self.algorithm
        return (
            algorithm.share_reward_in_agent
            or algorithm.spans_policies
            or any(node.env_pays for node in self.nodes)
            or any(entry is None and where not in PAYS_OWN_ONLY for _, _, where, entry in self.reward_functions)
            or any(entry.traits.copies for _, _, entry in self.catalogued_rewards())
        )

    @cached_property
    def reward_functions(self) -> list[tuple[int, Node, str | None, RewardEntry | None]]:
        return [
            (index, node, *self._engine_function(node.reward or "", ("nodes", index, "reward")))
            for index, node in self.draft.each_node()
            if node.kind is Kind.REWARD
        ]

    def _engine_function(self, ref: str, here: KeyPath) -> tuple[str | None, RewardEntry | None]:
        file, function = self.references.definition(ref, here) or (Path(), None)
        _, inside, name = file.as_posix().rpartition("recipe/dag/")
        if function is None or not inside:
            return None, None
        where = f"{name.removesuffix('.py').replace('/', '.')}:{function.name}"
        return where, read_entry(where, function)

    def catalogued_rewards(self) -> Iterator[tuple[int, Node, RewardEntry]]:
        """Yield (index, node, its entry) of each reward node whose function is in the catalogue; for `shaped`, the
        entry of its shaping."""
        for index, node, _, entry in self.reward_functions:
            if entry is not None and entry.where == SHAPED:
                entry = chosen_shaping(node.args)
            if entry is not None:
                yield index, node, entry
