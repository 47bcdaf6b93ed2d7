"""Rewards to rewards: what a move earns beyond its own score, over turns and agents.

Invariant: every function maps rewards [E, T, A] (episodes, turns, agents) and a mask of the same shape (True where the
agent moved) to shaped rewards of the same shape and dtype, 0 where the mask is 0. What the mask leaves out influences
nothing, whatever number stands there, and the input is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.dag.credit.options import check_units


def team_local(rewards: Tensor, mask: Tensor, *, team: float = 1.0, local: float = 1.0) -> Tensor:
    """`team` times the mean reward of the agents that moved in this turn, plus `local` times one's own (AT-GRPO,
    arXiv 2510.11062)."""
    own = _clean(rewards, mask)
    return torch.where(mask, team * _mean(own, mask, dim=2, keepdim=True) + local * own, 0.0)


def shared(rewards: Tensor, mask: Tensor) -> Tensor:
    """Every agent earns the sum of the turn (CORY, arXiv 2410.06101)."""
    return torch.where(mask, _clean(rewards, mask).sum(2, keepdim=True), 0.0)


def discounted(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """One's own reward and one's later ones, discounted by `gamma` per turn; a turn in which the agent did not move
    discounts, too, because time passed for its peers."""
    check_units(gamma=gamma)
    own, later = _clean(rewards, mask), torch.zeros_like(rewards[:, 0])
    out = torch.zeros_like(own)
    for t in range(rewards.shape[1] - 1, -1, -1):
        later = own[:, t] + gamma * later
        out[:, t] = later
    return torch.where(mask, out, 0.0)


def verifier_sum(scores: Tensor, mask: Tensor, *, gamma: float = 0.3) -> Tensor:
    """MAPoRL's reward (arXiv 2502.18439): one's own score and the discounted means over agents of the later turns,
    divided by the sum of the discounts, so that it stays a score. A turn in which nobody moved has no weight."""
    check_units(gamma=gamma)
    own = _clean(scores, mask)
    means, moved = _mean(own, mask, dim=2), mask.any(2).to(own.dtype)
    future, weight = torch.zeros_like(means[:, 0]), torch.zeros_like(means[:, 0])
    out = torch.zeros_like(own)
    for t in range(scores.shape[1] - 1, -1, -1):
        # what later turns add, seen from turn t
        future, weight = gamma * future, gamma * weight
        out[:, t] = (own[:, t] + future[:, None]) / (1.0 + weight[:, None])
        future, weight = future + means[:, t] * moved[:, t], weight + moved[:, t]
    return torch.where(mask, out, 0.0)


def margin(rewards: Tensor, mask: Tensor, *, alpha: float = 0.5) -> Tensor:
    """MARTI's margin: R + alpha (R - Q), where Q is the mean of the agent's own earlier rewards; R in its first
    turn."""
    own, earlier, started = _history(rewards, mask)
    return torch.where(mask, own + alpha * torch.where(started, own - earlier, 0.0), 0.0)


def quality(rewards: Tensor, mask: Tensor, *, alpha: float = 0.5) -> Tensor:
    """MARTI's quality, for rewards in [0, 1]: R + alpha (Q R - (1 - Q)(1 - R)), where Q is the mean of the agent's own
    earlier rewards; R in its first turn."""
    own, earlier, started = _history(rewards, mask)
    bonus = earlier * own - (1 - earlier) * (1 - own)
    return torch.where(mask, own + alpha * torch.where(started, bonus, 0.0), 0.0)


def conditional_quality(
    rewards: Tensor, mask: Tensor, verdicts: Tensor, judged: Tensor, *, threshold: float = 0.5
) -> Tensor:
    """MARTI's conditional quality, for who judges: 1 if the verdict (1: right, 0: wrong, nan: none) equals whether what
    it judges has a score of at least `threshold`, else 0. Moves without a verdict keep their reward. All [E, T, A]."""
    fits = (verdicts >= 0.5) == (judged >= threshold)
    return torch.where(mask, torch.where(verdicts.isnan(), _clean(rewards, mask), fits.to(rewards.dtype)), 0.0)


def with_outcome(rewards: Tensor, mask: Tensor, outcome: Tensor, *, beta: float = 0.5) -> Tensor:
    """Adds `beta` times the episode's outcome [E] to every move (MARTI's *_with_outcome)."""
    return torch.where(mask, _clean(rewards, mask) + beta * outcome[:, None, None], 0.0)


def influence(rewards: Tensor, mask: Tensor, *, bonus: float = 0.2) -> Tensor:
    """UMAD's influence (arXiv 2603.01221): in every turn but the last, `bonus` times the sign of the mean change of the
    others' rewards from this turn to the next. Others that did not move in both turns count in nothing. All changes are
    of the given rewards, so no agent sees another's bonus."""
    own = _clean(rewards, mask)
    out = own.clone()
    both = mask[:, :-1] & mask[:, 1:]
    change = torch.where(both, own[:, 1:] - own[:, :-1], 0.0)
    others = change.sum(2, keepdim=True) - change
    # equal and opposite changes of three or more others may leave rounding behind
    others = torch.where(others.abs() <= 1e-12 * (1 + change.abs().sum(2, keepdim=True)), 0.0, others)
    out[:, :-1] += bonus * torch.sign(others)
    return torch.where(mask, out, 0.0)


def _clean(rewards: Tensor, mask: Tensor) -> Tensor:
    if rewards.shape != mask.shape or rewards.dim() != 3:
        shapes = f"{tuple(rewards.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"rewards and mask must be [episodes, turns, agents] both, got {shapes}")
    return torch.where(mask, rewards, 0.0)


def _mean(values: Tensor, mask: Tensor, *, dim: int, keepdim: bool = False) -> Tensor:
    return values.sum(dim, keepdim=keepdim) / mask.sum(dim, keepdim=keepdim).clamp_min(1)


def _history(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, mean of the agent's own earlier ones, whether it has any)."""
    own = _clean(rewards, mask)
    count = mask.cumsum(1) - mask.long()
    earlier = (own.cumsum(1) - own) / count.clamp_min(1)
    return own, earlier, count > 0
