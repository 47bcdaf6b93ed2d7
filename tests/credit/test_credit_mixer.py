from __future__ import annotations

import pytest
import torch
from torch import nn

from recipe.dag.credit.mixer import QMIX, VDN, Target, Utility, value_loss

PAYOFF = torch.tensor([[0.0, 1.0], [1.0, 8.0]])


class Tabular(nn.Module):
    """One utility per agent and action, and a mixer."""

    def __init__(self, actions: int, mixer: nn.Module):
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(2, actions))
        self.mixer = mixer

    def forward(self) -> torch.Tensor:
        """Team value of every joint action [A, A]."""
        actions = self.table.shape[1]
        pairs = torch.cartesian_prod(torch.arange(actions), torch.arange(actions))
        utilities = torch.stack([self.table[0, pairs[:, 0]], self.table[1, pairs[:, 1]]], dim=-1)
        state, mask = torch.ones(len(pairs), 1), torch.ones(len(pairs), 2, dtype=torch.bool)
        return self.mixer(utilities, state, mask).view(actions, actions)


def fit(game: torch.Tensor, mixer: nn.Module, steps: int) -> torch.Tensor:
    model = Tabular(len(game), mixer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        value_loss(model(), game, binary=False).backward()
        optimizer.step()
    return model().detach()


def steepest_fall(mixer: QMIX, *, batch: int = 10_000) -> float:
    """The least slope of the team value in any utility, over random states and utilities."""
    state = 3 * torch.randn(batch, mixer.weight_in.in_features)
    utilities = (3 * torch.randn(batch, mixer.agents)).requires_grad_(True)
    mixer(utilities, state, torch.ones(batch, mixer.agents, dtype=torch.bool)).sum().backward()
    return utilities.grad.min().item()


def trained(mixer: QMIX, steps: int) -> QMIX:
    """On team values that fall in every utility: whatever can go negative, will."""
    optimizer = torch.optim.Adam(mixer.parameters(), lr=0.01)
    for _ in range(steps):
        state, utilities = torch.randn(32, mixer.weight_in.in_features), torch.randn(32, mixer.agents)
        optimizer.zero_grad()
        mask = torch.ones(32, mixer.agents, dtype=torch.bool)
        value_loss(mixer(utilities, state, mask), -utilities.sum(-1), binary=False).backward()
        optimizer.step()
    return mixer


def test_the_team_value_never_falls_when_a_utility_rises():
    torch.manual_seed(0)
    assert steepest_fall(QMIX(state=4, agents=3, hidden=32)) >= 0
    assert steepest_fall(trained(QMIX(state=4, agents=3, hidden=8), 1000)) >= 0


def test_vdn_and_qmix_in_the_two_step_game():
    """7 everywhere behind one first action, the payoff behind the other: no sum holds the 8, so VDN goes for the 7."""
    torch.manual_seed(0)
    sums, mixed = fit(PAYOFF, VDN(), 800), fit(PAYOFF, QMIX(state=1, agents=2, hidden=8), 1500)
    torch.testing.assert_close(sums, torch.tensor([[-1.5, 2.5], [2.5, 6.5]]), atol=1e-3, rtol=0)
    assert (mixed - PAYOFF).abs().max().item() < 1e-2
    assert sums.max().item() < 7 < mixed.max().item()


@pytest.mark.parametrize("mixer", [VDN(), QMIX(state=2, agents=3, hidden=4)])
def test_calls_that_did_not_take_place_add_nothing(mixer):
    utilities, state = torch.randn(5, 3), torch.randn(5, 2)
    mask = torch.tensor([True, False, True]).expand(5, 3)
    junk = torch.where(mask, utilities, float("nan"))
    value = mixer(utilities, state, mask)
    assert value.shape == (5,) and torch.equal(mixer(junk, state, mask), value)
    assert not torch.equal(mixer(utilities, state, torch.ones_like(mask)), value)


def test_target_equals_the_online_critic_and_mixer_at_first_and_does_not_follow_by_itself():
    online = nn.ModuleDict({"utility": Utility(1, 1, 4), "mixer": QMIX(state=2, agents=2, hidden=4)})
    target = Target(online)
    same = [torch.equal(a, b) for a, b in zip(target.module.parameters(), online.parameters(), strict=True)]
    assert all(same) and len(same) == 14
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(1.0)
    gap = next(target.module.parameters()) - next(online.parameters())
    torch.testing.assert_close(gap, torch.full_like(gap, -1.0))
    target.follow(online, 0.25)
    torch.testing.assert_close(
        next(target.module.parameters()) - next(online.parameters()), torch.full_like(gap, -0.75)
    )
    target.follow(online, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(target.module.parameters(), online.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in target.module.parameters())
    with pytest.raises(ValueError, match="tau: 1.5"):
        target.follow(online, 1.5)
