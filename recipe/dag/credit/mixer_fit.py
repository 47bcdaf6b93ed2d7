"""The fit of a team's value to returns.

Invariant: pure but for the weights that `fit` moves, and a function of them, the data and the seed. The value is fitted
to all calls together and, so that partial baselines mean something, to what each call's baseline may see of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recipe.dag.credit.mixer import Target, td_targets, team_loss
from recipe.dag.credit.team_value import Encoded, Layout, TeamValue, team_values


def views(layout: Layout, data: Encoded, episode: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """(point [S], mask [S, N]), each once and in the points' order: the calls made by each point's turn, and for each
    of that turn's calls, itself with what its baseline may see."""
    turn_of = torch.tensor(layout.turns)
    made = (data.message[episode] >= 0) & (turn_of <= turn.unsqueeze(1))
    own = made & (turn_of == turn.unsqueeze(1))
    point, call = own.nonzero(as_tuple=True)
    points = torch.cat([torch.arange(len(episode)), point])
    masks = torch.cat([made, made[point] & layout.seen[call]])
    unique = torch.cat([points.unsqueeze(1), masks.long()], dim=1).unique(dim=0)
    return unique[:, 0].contiguous(), unique[:, 1:].bool()


def fit(
    model: TeamValue,
    optimizer: torch.optim.Optimizer,
    data: Encoded,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    gamma_turn: float = 1.0,
    lam: float = 1.0,
    target: Target | None = None,
    tau: float = 0.01,
) -> float:
    """Regress the team value on the targets of `td_targets`, `batch_size` points per optimizer step; returns the mean
    squared error of the last epoch. `target`: whose values lam < 1 bootstraps from; it follows by `tau` after every
    optimizer step. Raises ValueError for a loss that is not finite."""
    shuffle = torch.Generator().manual_seed(seed)
    episode, turn = data.points()
    point, mask = views(model.layout, data, episode, turn)
    starts = torch.searchsorted(point, torch.arange(len(episode) + 1))
    total = count = 0.0
    for _ in range(epochs):
        values = team_values(target.module, data)[0].double() if target is not None else data.rewards
        goals = td_targets(data.rewards, values, data.turns, gamma_turn=gamma_turn, lam=lam)[episode, turn].float()
        total = count = 0.0
        for chosen in torch.randperm(len(episode), generator=shuffle).split(batch_size):
            utilities, state, _ = model.parts(data, episode[chosen], turn[chosen])
            within, sample = _samples(starts, chosen)
            loss = team_loss(model.value(utilities[within], state[within], mask[sample]), goals[chosen[within]])
            if not torch.isfinite(loss):
                raise ValueError(f"the loss of the team value is {loss.item()}, not finite")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if target is not None:
                target.follow(model, tau)
            total, count = total + loss.item() * len(sample), count + len(sample)
    return total / count


def _samples(starts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(index into `chosen`, index into the views) of the chosen points' views."""
    ranges = list(_ranges(starts, chosen))
    within = torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(part) for part in ranges]))
    return within, torch.cat(ranges)


def _ranges(starts: Tensor, chosen: Tensor) -> Iterator[Tensor]:
    for start, end in zip(starts[chosen].tolist(), starts[chosen + 1].tolist(), strict=True):
        yield torch.arange(start, end)
