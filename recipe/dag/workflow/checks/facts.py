"""The facts about a workflow file that the checks of an algorithm need.

Invariant: an algorithm and its blocks, which are a layer below the workflow's code, ask everything about a file here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.reward_catalogue import SHAPED, RewardEntry, chosen_shaping, read_entry
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.training import check_forward_passes
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import agents_heard, find_cycle
from recipe.dag.workflow.groups import horizons, pooled
from recipe.dag.workflow.moves import Move, moves_of, reactions
from recipe.dag.workflow.schema import Agent, Loop, Node, NodeRole, Policy


class DraftFacts:
    def __init__(self, draft: Draft, references: References, *, ordered: bool = True):
        """`ordered`: the nodes and loops of the file can be put in an order."""
        self.draft, self.references, self.ordered = draft, references, ordered

    @property
    def algorithm(self) -> Algorithm:
        return self.draft.algorithm

    @property
    def complete(self) -> bool:
        """Whether every part of the file could be read."""
        return self.draft.complete

    def problem(self, path: KeyPath, message: str, *, key: bool = False) -> Problem:
        """Return a problem at the value of `path`, or at its key."""
        return self.draft.source.problem(path, message, key=key)

    def has(self, *path: str | int) -> bool:
        """Return whether the user wrote this key."""
        return self.draft.has(*path)

    @property
    def one_turn(self) -> bool:
        """Whether the block `episode` could be read and allows one turn."""
        readable = not any(problem.where.startswith("episode") for problem in self.draft.problems)
        return readable and self.draft.episode.max_turns == 1

    @property
    def branches(self) -> bool:
        """Whether episodes may take different ways through the nodes."""
        return bool(self.draft.loops) or any(node.when is not None for _, node in self.draft.each_node())

    @property
    def nodes(self) -> list[Node]:
        return [node for _, node in self.draft.each_node()]

    @property
    def loops(self) -> dict[str, Loop]:
        return dict(self.draft.each_loop())

    @property
    def trained_policies(self) -> list[tuple[str, Policy]]:
        return [(name, policy) for name, policy in self.draft.each_policy() if not policy.frozen]

    @property
    def trained_agents(self) -> list[Agent]:
        trained = dict(self.trained_policies)
        return [agent for _, agent in self.draft.each_agent() if agent.policy in trained]

    @property
    def agent_of(self) -> dict[str, str]:
        """Node -> the name of its agent. Needs a complete draft."""
        return {node.node_id: self.draft.agent(node.agent_group).name for node in self.nodes}

    @cached_property
    def repeated_agent(self) -> str | None:
        """An agent with a trained policy that may move more than once in an episode; None without one. Needs a complete
        draft."""
        for moves in self._groups(("agent",)):
            if len(moves) > 1:
                return self.agent_of[moves[0].node]
        return None

    def uneven_groups(self, group_by: Collection[str]) -> list[list[Move]]:
        """Return the groups whose moves are followed by different numbers of moves of their agents. Needs a complete
        draft."""
        groups = self._groups(group_by)
        following = horizons(groups, self.nodes, self.loops)
        return [group for group in groups if len({following[move] for move in group}) > 1]

    def _groups(self, group_by: Collection[str]) -> list[list[Move]]:
        agents = [agent for _, agent in self.draft.each_agent()]
        trained = [name for name, _ in self.trained_policies]
        return pooled(self.nodes, self.loops, agents, self.draft.episode, trained, group_by)

    def moves(self) -> Sequence[Move]:
        """Return the moves of an episode; two turns represent any number of turns."""
        return moves_of(self.nodes, self.loops, self._turns)

    def reactions(self) -> dict[str, tuple[str, ...]]:
        """Return the graph of these moves: id -> ids of what it may react to. Needs an ordered draft."""
        return reactions(self.nodes, self.loops, self.draft.agents, self._turns)

    @property
    def _turns(self) -> int:
        return min(self.draft.episode.max_turns, 2)

    def cycle_of_hearing(self) -> list[str] | None:
        """Return trained agents each of which hears the one before it in the same turn, the first one also the last;
        None without such a cycle. Needs a complete draft."""
        trained = {agent.name for agent in self.trained_agents}
        heard = {
            self.draft.agent(group).name: tuple(self.draft.agent(other).name for other in others)
            for group, others in agents_heard(self.nodes).items()
        }
        return find_cycle({name: others for name, others in heard.items() if name in trained})

    def check_forward_passes(self, path: KeyPath) -> Iterator[Problem]:
        """Yield a problem at `path` if a declared training chain updates a policy without its old log-probs."""
        return check_forward_passes(self.draft, path)

    @property
    def paying_nodes(self) -> list[str]:
        """The ids of the nodes that pay rewards."""
        pays = (node for node in self.nodes if node.node_role is NodeRole.REWARD or node.agent_options.rewards_with_env)
        return [node.node_id for node in pays]

    def reward_functions(self) -> Iterator[tuple[int, Node, str | None, RewardEntry | None]]:
        """Yield (index, node, function, its entry) of each reward node. The function is named by module and name
        (`reward.credit:shaped`) if it is the engine's, else None; the entry is None if it is not catalogued."""
        for index, node in self.draft.each_node():
            if node.node_role is NodeRole.REWARD:
                yield index, node, *self._engine_function(node.executable_ref or "", ("nodes", index, "executable_ref"))

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
        for index, node, _, entry in self.reward_functions():
            if entry is not None and entry.where == SHAPED:
                entry = chosen_shaping(node.executable_kwargs)
            if entry is not None:
                yield index, node, entry
