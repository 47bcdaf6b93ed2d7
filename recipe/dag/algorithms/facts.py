"""The questions that the checks of an algorithm ask about a workflow file.

Invariant: an algorithm and its blocks, which are a layer below the workflow's code, ask everything about a file here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from recipe.dag.algorithms.reward_catalogue import RewardEntry
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.types.convention import Convention, Reference
from recipe.dag.types.move import Move


class TeamValue(Protocol):
    loss: str


class Algorithm(Protocol):
    """What its blocks and the checks of its loss read of an algorithm, which is built from them."""

    policy_loss: str
    loss_agg: str
    old_log_probs: str
    drop_zero_variance: bool
    team_value: TeamValue | None


class Sampling(Protocol):
    max_tokens: int
    temperature: float


class Agent(Protocol):
    name: str
    policy: str
    role: str | None
    sampling: Sampling
    tools: Sequence[object]


class KeptReference(Protocol):
    refresh: int | None


class Policy(Protocol):
    train_cycle: int | None
    reference: KeptReference | None


class Node(Protocol):
    id: str
    candidates: object | None
    scope: str


class Facts(Protocol):
    """The facts about a workflow file. What needs a complete file may be asked if `complete` is true."""

    algorithm: Algorithm
    complete: bool
    """Whether every part of the file could be read."""
    ordered: bool
    """Whether the nodes and loops of the file can be put in an order."""
    one_turn: bool
    """Whether the block `episode` could be read and allows one turn."""
    drops_turns: bool
    """Whether the calls of some turns become no training rows."""
    branches: bool
    """Whether episodes may take different ways through the nodes."""
    shares_rewards: bool
    """Whether anything may pay an agent for the calls of another one. Needs a complete file."""
    nodes: Sequence[Node]
    loops: Mapping[str, object]
    agents: Sequence[Agent]
    trained_agents: Sequence[Agent]
    trained_policies: Mapping[str, Policy]
    frozen_policies: Collection[str]
    agent_of: Mapping[str, str]
    """Node -> the name of its agent. Needs a complete file."""
    repeated_agent: str | None
    """An agent with a trained policy that may move more than once in an episode; None without one. Needs a complete
    file."""
    paying_nodes: Sequence[str]
    """The ids of the nodes that pay rewards."""
    reward_functions: Sequence[tuple[int, Node, str | None, RewardEntry | None]]
    """(index, node, function, its entry) of each reward node. The function is named by module and name
    (`reward.credit:shaped`) if it is the engine's, else None; the entry is None if it is not catalogued."""

    def check_function(
        self, reference: Reference, convention: Convention, or_class: Mapping[str, Convention] | None = None
    ) -> Iterator[Problem]:
        """Yield the problems of a user's function, called with the options of `reference`. `or_class` also allows a
        class, built with the options, that has these methods."""
        ...

    def problem(self, path: KeyPath, message: str, *, key: bool = False) -> Problem:
        """Return a problem at the value of `path`, or at its key."""
        ...

    def has(self, *path: str | int) -> bool:
        """Return whether the user wrote this key."""
        ...

    def no_node(self, path: KeyPath, name: str) -> str:
        """Return the error message for `name`, written at `path`, which is not a node."""
        ...

    def uneven_groups(self, group_by: Collection[str]) -> list[list[Move]]:
        """Return the groups whose moves are followed by different numbers of moves of their agents. Needs a complete
        file."""
        ...

    def moves(self) -> Sequence[Move]:
        """Return the moves of an episode; two turns represent any number of turns."""
        ...

    def reactions(self) -> Mapping[str, Sequence[str]]:
        """Return the graph of these moves: id -> ids of what it may react to. Needs `ordered`."""
        ...

    def cycle_of_hearing(self) -> list[str] | None:
        """Return trained agents each of which hears the one before it in the same turn, the first one also the last;
        None without such a cycle. Needs a complete file."""
        ...

    def check_forward_passes(self, path: KeyPath) -> Iterator[Problem]:
        """Yield a problem at `path` if a declared training chain updates a policy without its old log-probs."""
        ...
