"""Incentives to be persuaded rightly and to persuade rightly, in a debate scored turn by turn.

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
    """Every turn to the right answer earns its weight, every turn to a wrong one costs it. All at least 0; 0 turns a
    term off. In brackets MAPoRL's number for it."""

    follow: float = 0.0
    """[a0] I turn to the side on which the others were."""
    leave: float = 0.0
    """[a1] I turn away from it."""
    repel: float = 0.0
    """[a2] The others turn away from the side on which I was."""
    attract: float = 0.0
    """[a3] The others turn to it."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0.0:
                raise ValueError(f"{name}: {value} is not at least 0")


def incentives(scores: Tensor, mask: Tensor, weights: Incentives, *, threshold: float = 0.5) -> Tensor:
    """The bonus [E, T, A] that is added to the rewards of a debate with `scores` [E, T, A]; a score of at least
    `threshold` is right. `mask`: the agent moved. "Others" are right if the mean score of the peers that moved is at
    least `threshold`. A change needs a move in both turns and at least one peer in both; the bonus for one's own change
    stands on the later turn, the one for influence on the earlier turn, whose words did it."""
    bonus = torch.zeros_like(scores)
    right = (scores >= threshold) & mask
    total, moved = torch.where(mask, scores, 0.0).sum(2, keepdim=True), mask.sum(2, keepdim=True)
    peers = moved - mask.long()
    peer_mean = (total - torch.where(mask, scores, 0.0)) / peers.clamp_min(1)
    peers_right = (peer_mean >= threshold) & (peers > 0)
    for t in range(1, scores.shape[1]):
        both = mask[:, t - 1] & mask[:, t] & (peers[:, t - 1] > 0)
        own = _turned(right[:, t - 1], right[:, t])
        weight = torch.where((own > 0) == peers_right[:, t - 1], weights.follow, weights.leave)
        bonus[:, t] += torch.where(both, own * weight, 0.0)
        others = _turned(peers_right[:, t - 1], peers_right[:, t])
        weight = torch.where((others > 0) == right[:, t - 1], weights.attract, weights.repel)
        heard = mask[:, t - 1] & (peers[:, t - 1] > 0) & (peers[:, t] > 0)
        bonus[:, t - 1] += torch.where(heard, others * weight, 0.0)
    return bonus


def _turned(before: Tensor, after: Tensor) -> Tensor:
    """+1 from wrong to right, -1 from right to wrong, 0 otherwise."""
    return after.to(torch.float64) - before.to(torch.float64)
