"""Incentives for persuading, and being persuaded, to the right answer in a debate that is scored turn by turn.

Invariant: persuading others to the right answer never lowers a reward, and being persuaded to a wrong one never raises
it, whatever the (non-negative) weights. The four weights are MAPoRL's (arXiv 2502.18439); its released code adds the
terms for influence with the opposite sign, which punishes what the paper rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Incentives:
    """Weights, all at least 0: a change to the right answer earns its weight, a change to a wrong one costs it. The
    symbols are MAPoRL's."""

    follow: float = 0.0
    """a0: the agent changes to the side that the others were on."""
    leave: float = 0.0
    """a1: the agent changes away from that side."""
    repel: float = 0.0
    """a2: the others change away from the side that the agent was on."""
    attract: float = 0.0
    """a3: the others change to that side."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0.0:
                raise ValueError(f"{name}: {value} is not at least 0")


def incentives(scores: Tensor, mask: Tensor, weights: Incentives, *, threshold: float) -> Tensor:
    """Return [E, T, A] the bonus to add to the rewards of debates with `scores` [E, T, A].

    A score of at least `threshold` is right. `mask` [E, T, A]: True where the agent moved. The others are right if the
    mean score of the peers that moved is at least `threshold`. A change needs a move in both turns, by the agent and by
    at least one peer. The bonus for an agent's own change is paid in the later turn, that for influence in the earlier
    turn, whose message caused the change.
    """
    bonus = torch.zeros_like(scores)
    right = (scores >= threshold) & mask
    total, moved = torch.where(mask, scores, 0.0).sum(2, keepdim=True), mask.sum(2, keepdim=True)
    peers = moved - mask.long()
    peer_mean = (total - torch.where(mask, scores, 0.0)) / peers.clamp_min(1)
    peers_right = peer_mean >= threshold  # read only where there are peers
    for t in range(1, scores.shape[1]):
        has_peers_before = peers[:, t - 1] > 0  # [E, A]
        own_change = _change(right[:, t - 1], right[:, t])
        weight = torch.where((own_change > 0) == peers_right[:, t - 1], weights.follow, weights.leave)
        can_change = mask[:, t - 1] & mask[:, t] & has_peers_before
        bonus[:, t] += torch.where(can_change, own_change * weight, 0.0)

        peer_change = _change(peers_right[:, t - 1], peers_right[:, t])
        weight = torch.where((peer_change > 0) == right[:, t - 1], weights.attract, weights.repel)
        can_influence = mask[:, t - 1] & has_peers_before & (peers[:, t] > 0)
        bonus[:, t - 1] += torch.where(can_influence, peer_change * weight, 0.0)
    return bonus


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Return +1 from wrong to right, -1 from right to wrong, 0 otherwise."""
    return after.to(torch.float64) - before.to(torch.float64)
