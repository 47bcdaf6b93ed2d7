"""Reward shaping: the reward of a move from its own score and those of other turns and agents.

Invariant: every function maps rewards [E, T, A] (episodes, turns, agents) and a mask of the same shape (True where the
agent moved) to shaped rewards of the same shape and dtype, 0 where the mask is 0. Entries outside the mask have no
effect, whatever they hold, and the input is not changed.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from recipe.dag.credit.options import check_units
from recipe.dag.types.reward import Catalogued


@Catalogued("AT-GRPO, arXiv 2510.11062", copies=True)
def team_local(rewards: Tensor, mask: Tensor, *, team: float = 1.0, local: float = 1.0) -> Tensor:
    """Return `team` times the mean reward of the agents that moved in the turn plus `local` times the agent's own
    (AT-GRPO, arXiv 2510.11062)."""
    own = _clean(rewards, mask)
    return torch.where(mask, team * _mean(own, mask, dim=2, keepdim=True) + local * own, 0.0)


@Catalogued("CORY, arXiv 2410.06101", copies=True)
def shared(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the turn's rewards for every agent (CORY, arXiv 2410.06101)."""
    return torch.where(mask, _clean(rewards, mask).sum(2, keepdim=True), 0.0)


@Catalogued("returns per turn", discounts=True)
def discounted(rewards: Tensor, mask: Tensor, *, gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0) -> Tensor:
    """Return the agent's reward plus its later ones, discounted by `gamma` per turn. A turn in which the agent did not
    move discounts too, because time passed for its peers."""
    check_units(gamma=gamma)
    own, later = _clean(rewards, mask), torch.zeros_like(rewards[:, 0])
    out = torch.zeros_like(own)
    for t in range(rewards.shape[1] - 1, -1, -1):
        later = own[:, t] + gamma * later
        out[:, t] = later
    return torch.where(mask, out, 0.0)


@Catalogued("MAPoRL, arXiv 2502.18439", "scores in [0, 1]", copies=True, discounts=True, peers=True)
def verifier_sum(scores: Tensor, mask: Tensor, *, gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3) -> Tensor:
    """Return MAPoRL's reward (arXiv 2502.18439), a weighted mean of scores:

    (s_t + sum_{u > t} gamma^(u - t) mean_u) / sum_{u >= t} gamma^(u - t)

    with the agent's own score s_t and the mean score of all agents in the later turns u. A turn in which no agent moved
    has no weight.
    """
    check_units(gamma=gamma)
    own = _clean(scores, mask)
    means, moved = _mean(own, mask, dim=2), mask.any(2).to(own.dtype)  # [E, T]
    future, weight = torch.zeros_like(means[:, 0]), torch.zeros_like(means[:, 0])  # [E]
    out = torch.zeros_like(own)
    for t in range(scores.shape[1] - 1, -1, -1):
        # both sums over the turns after t, seen from t
        future, weight = gamma * future, gamma * weight
        out[:, t] = (own[:, t] + future[:, None]) / (1.0 + weight[:, None])
        future, weight = future + means[:, t] * moved[:, t], weight + moved[:, t]
    return torch.where(mask, out, 0.0)


@Catalogued("MARTI")
def margin(rewards: Tensor, mask: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Return MARTI's margin: R + alpha (R - Q), where Q is the mean of the agent's own earlier rewards; R in its first
    turn."""
    own, earlier, has_earlier = _history(rewards, mask)
    return torch.where(mask, own + alpha * torch.where(has_earlier, own - earlier, 0.0), 0.0)


@Catalogued("MARTI", "rewards in [0, 1]")
def quality(rewards: Tensor, mask: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Return MARTI's quality, for rewards in [0, 1]: R + alpha (Q R - (1 - Q)(1 - R)), where Q is the mean of the
    agent's own earlier rewards; R in its first turn."""
    own, earlier, has_earlier = _history(rewards, mask)
    bonus = earlier * own - (1 - earlier) * (1 - own)
    return torch.where(mask, own + alpha * torch.where(has_earlier, bonus, 0.0), 0.0)


def conditional_quality(rewards: Tensor, mask: Tensor, verdicts: Tensor, judged: Tensor, *, threshold: float) -> Tensor:
    """Return MARTI's conditional quality, the reward of a judge: 1 if the verdict (1: right, 0: wrong, nan: none) is
    true of the judged score (right if at least `threshold`), else 0. Moves without a verdict keep their reward. All
    tensors are [E, T, A]."""
    is_true = (verdicts >= 0.5) == (judged >= threshold)
    return torch.where(mask, torch.where(verdicts.isnan(), _clean(rewards, mask), is_true.to(rewards.dtype)), 0.0)


@Catalogued("MARTI", "an outcome per episode", copies=True, discounts=True, graded=True)
def with_outcome(rewards: Tensor, mask: Tensor, outcome: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return the reward plus `beta` times the episode's outcome [E] (MARTI's *_with_outcome)."""
    return torch.where(mask, _clean(rewards, mask) + beta * outcome[:, None, None], 0.0)


@Catalogued("UMAD, arXiv 2603.01221", peers=True)
def influence(rewards: Tensor, mask: Tensor, *, bonus: float = 0.2) -> Tensor:
    """Return UMAD's influence (arXiv 2603.01221): in every turn except the last, the reward plus `bonus` times the sign
    of the mean change of the other agents' rewards from this turn to the next. Agents that did not move in both turns
    are not counted. All changes are computed from the given rewards, so no agent sees the bonus of another."""
    own = _clean(rewards, mask)
    out = own.clone()
    moved_twice = mask[:, :-1] & mask[:, 1:]
    change = torch.where(moved_twice, own[:, 1:] - own[:, :-1], 0.0)
    others = change.sum(2, keepdim=True) - change
    # changes of three or more agents that cancel exactly may leave a rounding error, whose sign would be noise
    others = torch.where(others.abs() <= 1e-12 * (1 + change.abs().sum(2, keepdim=True)), 0.0, others)
    out[:, :-1] += bonus * torch.sign(others)
    return torch.where(mask, out, 0.0)


def _clean(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the rewards with 0 outside the mask. Raises ValueError for other shapes than [E, T, A]."""
    if rewards.shape != mask.shape or rewards.dim() != 3:
        shapes = f"{tuple(rewards.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"rewards and mask must both be [episodes, turns, agents], got {shapes}")
    return torch.where(mask, rewards, 0.0)


def _mean(values: Tensor, mask: Tensor, *, dim: int, keepdim: bool = False) -> Tensor:
    return values.sum(dim, keepdim=keepdim) / mask.sum(dim, keepdim=keepdim).clamp_min(1)


def _history(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rewards, mean of the agent's own earlier rewards, whether it has any), each [E, T, A]."""
    own = _clean(rewards, mask)
    count = mask.cumsum(1) - mask.long()
    earlier = (own.cumsum(1) - own) / count.clamp_min(1)
    return own, earlier, count > 0
