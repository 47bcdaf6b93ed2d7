"""One entry of the catalogue of reward nodes, and what an option may be.

Invariant: data only, free of imports of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

REWARD = "a reward node: executable_ref is its code"
SHAPING = "a reward node: executable_ref recipe.dag.reward.credit:shaped, its kwargs shaping=<name>, players=None, ..."
MUST = object()
"""The default of an option that must be given."""


class Kind(StrEnum):
    NUMBER = "number"
    TEXT = "text"
    CHOICE = "choice"
    SCALAR = "scalar"
    NODE = "node"
    NODES = "nodes"
    PLAYERS = "players"
    """Lists of nodes: each list a player, the k-th nodes of all of one stage."""
    AGENTS = "agents"
    """None stands for all."""


@dataclass(frozen=True)
class Option:
    """What an option of a reward node may be. All nodes are rollout nodes."""

    kind: Kind
    default: Any = MUST
    low: float = -math.inf
    """Of a number; of nodes and players: how many at least."""
    high: float = math.inf
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    name: str
    source: str
    assumes: str
    where: str
    """The function, as module:name under recipe.dag."""
    use: str
    free: Mapping[str, Any]
    """Options of the function, and their defaults."""
    takes: Mapping[str, Option] = field(default_factory=dict)
    """Reward nodes: what each option may be, those without a default included."""
    copies: bool = False
    """Reward nodes: pays several calls for one and the same reward."""
    discounts: bool = False
    """Reward nodes: pays a call for what is earned after it."""
    peers: bool = False
    """Reward nodes: compares who moved in the same turn and the next, so that it matters who that is."""
    graded: bool = False
    """Reward nodes: reads the episode's outcome, which a node before it must have set."""


def reward_entry(name: str, source: str, assumes: str, where: str, use: str, /, **more: Any) -> Entry:
    """`more`: `copies`, `discounts`, `peers`, `graded`, and options by name."""
    takes = {key: option for key, option in more.items() if isinstance(option, Option)}
    free = {key: option.default for key, option in takes.items() if option.default is not MUST}
    traits = {key: value for key, value in more.items() if key not in takes}
    return Entry(name, source, assumes, where, use, MappingProxyType(free), takes=MappingProxyType(takes), **traits)
