"""The declarations of the engine's reward functions: how their rewards count, and what their options are.

Invariant: declarations are read from the function's source (algorithms/reward_catalogue.py), so that a check imports no
reward; they have no effect when the function runs.

    @Catalogued("MARTI", "a node that judges another one", copies=True)
    def example(episode: Episode, *, judge: NodeName, weight: Annotated[float, Field(ge=0.0)] = 1.0): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

AgentName = str
AgentNames = Sequence[str]
NodeName = str
"""A rollout node, as in the types below."""
NodeNames = Sequence[str]
Players = Sequence[Sequence[str]]
"""Lists of nodes: each list is a player; the k-th nodes of all players are a stage."""
Scalar = str | float | bool
ShapingName = str
"""A catalogued function of credit/shaping.py."""


@dataclass(frozen=True)
class Catalogued:
    """A decorator: the function is in the catalogue of reward nodes, with these traits."""

    source: str
    assumes: str = "rewards per node and turn"
    copies: bool = False
    """Pays several calls for the same reward."""
    discounts: bool = False
    """Pays a call for rewards earned after it."""
    peers: bool = False
    """Compares the nodes that moved in the same turn and in the next, so that its result depends on the players."""
    graded: bool = False
    """Reads the episode's outcome, which a node before it must have set."""

    def __call__(self, function: F) -> F:
        return function
