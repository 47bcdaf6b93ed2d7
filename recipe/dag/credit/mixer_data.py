"""Episodes as a team's value reads them.

Invariant: plain tensors; a call that was not made is -1, not a text. Nothing here knows weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipe.dag.credit.td import td_targets


@dataclass(frozen=True)
class Layout:
    """The N calls that an episode can hold."""

    roles: tuple[int, ...]
    """[N] Calls of one role share a utility."""
    turns: tuple[int, ...]
    """[N]"""
    peers: Tensor
    """[N, N] bool: call j may stand in call i's baseline."""

    @property
    def seen(self) -> Tensor:
        """[N, N] bool: call j is call i, or may stand in its baseline."""
        return self.peers | torch.eye(len(self.turns), dtype=torch.bool)


@dataclass(frozen=True)
class Encoded:
    """E episodes of at most T turns: what was said, as K vectors, and what it earned."""

    vectors: Tensor
    """[K, D]"""
    question: Tensor
    """[E] int64, into vectors."""
    message: Tensor
    """[E, N] int64, into vectors; -1: the call was not made."""
    rewards: Tensor
    """[E, T] float64, the team's per turn."""
    turns: Tensor
    """[E] int64, how many each episode had."""
    group: Tensor
    """[E] int64 from 0, equal for siblings."""

    def points(self) -> tuple[Tensor, Tensor]:
        """(episode [P], turn [P]) of every turn that was played."""
        return torch.nonzero(torch.arange(self.rewards.shape[1]) < self.turns.unsqueeze(1), as_tuple=True)


def returns_of(data: Encoded, *, gamma_turn: float = 1.0) -> Tensor:
    """[E, T] float64, what the team earned from each turn on; 0 behind an episode's end."""
    return td_targets(data.rewards, data.rewards, data.turns, gamma_turn=gamma_turn)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """As one. Siblings of different parts stay strangers."""
    fields: dict[str, list[Tensor]] = {name: [] for name in Encoded.__dataclass_fields__}
    vectors = groups = 0
    for part in parts:
        shifted = {
            "question": part.question + vectors,
            "message": torch.where(part.message >= 0, part.message + vectors, -1),
            "group": part.group + groups,
        }
        for name, values in fields.items():
            values.append(shifted.get(name, getattr(part, name)))
        vectors += len(part.vectors)
        groups += int(part.group.max()) + 1
    return Encoded(**{name: torch.cat(values) for name, values in fields.items()})
