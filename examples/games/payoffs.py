"""The games: small cooperative tables whose best joint play is known.

Invariant: both players of a table get its entry [row action, column action].
"""

from __future__ import annotations

import torch
from torch import Tensor


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


SEPARATING = table([[0, 2], [2, -1]])
"""Each player alone does best to go for action 1; both together do worst. Best: 2."""
CLIMBING = table([[11, -30, 0], [-30, 7, 6], [0, 0, 5]])
"""Claus and Boutilier 1998. The way to 11 is fenced with -30; (0, 0), (1, 1) and, for a while, (1, 2) hold players."""
ANTI_COORDINATION = table([[0, 1], [1, 0]])
"""Be different. Best: 1."""


def value(game: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Expected payoff [...] of independent mixed policies [..., A] and [..., B]."""
    return torch.einsum("...i,ij,...j->...", row, game, column)
