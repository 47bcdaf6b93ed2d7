"""What a team's value is fitted to: returns over turns, and their bootstrapped form.

Invariant: pure, and without gradient. A reward counts once, from its turn on backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.dag.credit.options import check_units


def td_targets(rewards: Tensor, values: Tensor, turns: Tensor, *, gamma_turn: float = 1.0, lam: float = 1.0) -> Tensor:
    """Targets [E, T] of the team value, without gradient. `rewards` [E, T]: the team's, per turn; `values` [E, T]: the
    target's team value of the calls of each turn; `turns` [E]: how many each episode had. The last turn's target is its
    reward; before it, r_t + gamma_turn ((1 - lam) Q'_{t+1} + lam y_{t+1}). lam = 1 is the Monte-Carlo return, which
    reads no values. 0 behind an episode's end."""
    check_units(gamma_turn=gamma_turn, lam=lam)
    values, out = values.detach(), torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        target = rewards[:, t]
        if t + 1 < rewards.shape[1]:
            following = lam * out[:, t + 1] + ((1.0 - lam) * values[:, t + 1] if lam < 1.0 else 0.0)
            target = target + gamma_turn * torch.where(turns > t + 1, following, 0.0)
        out[:, t] = torch.where(turns > t, target, 0.0)
    return out
