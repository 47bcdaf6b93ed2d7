"""The fit of a team's value to returns.

Invariant: pure but for the weights that `fit` moves, and a function of them, the data and the seed. The value is fitted
to all calls together and, so that partial baselines mean something, to what each call's baseline may see of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipe.dag.credit.mixer import Target
from recipe.dag.credit.mixer_data import Encoded, Layout
from recipe.dag.credit.td import td_targets
from recipe.dag.credit.team_value import TeamValue, team_values
from recipe.dag.credit.threads import one_thread

PIECE = 8
"""Points of siblings that are drawn together: their question meets the weights once, and a batch holds many questions.
"""
BITS = 62
"""Of a number that a mask is packed into."""


def views(layout: Layout, data: Encoded, episode: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """(point [S], mask [S, N]), each once and in the points' order: the calls made by each point's turn, and for each
    of that turn's calls, itself with what its baseline may see."""
    turn_of = torch.tensor(layout.turns)
    made = (data.message[episode] >= 0) & (turn_of <= turn.unsqueeze(1))
    own = made & (turn_of == turn.unsqueeze(1))
    point, call = own.nonzero(as_tuple=True)
    points = torch.cat([torch.arange(len(episode)), point])
    masks = torch.cat([made, made[point] & layout.seen[call]])
    key = points
    for part in masks.split(BITS, dim=1):
        packed = (part.long() << torch.arange(part.shape[1])).sum(1).unique(return_inverse=True)[1]
        _, key = (key * (packed.max() + 1) + packed).unique(return_inverse=True)
    first = torch.empty(int(key.max()) + 1, dtype=torch.int64)
    first[key] = torch.arange(len(key))  # whichever is left: they are equal
    return points[first], masks[first]


@one_thread()
def fit(
    model: TeamValue,
    optimizer: torch.optim.Optimizer,
    data: Encoded,
    *,
    epochs: int,
    batch_size: int,
    steps: int | None = None,
    seed: int,
    gamma_turn: float = 1.0,
    lam: float = 1.0,
    target: Target | None = None,
    tau: float = 0.01,
) -> float:
    """Regress the team value on the targets of `td_targets`, `batch_size` points per optimizer step, or more where an
    epoch would take more than `steps`; returns the mean loss of the last epoch. `target`: whose values lam < 1
    bootstraps from; it follows by `tau` after every optimizer step. Raises ValueError for a loss that is not finite."""
    shuffle = torch.Generator().manual_seed(seed)
    episode, turn = data.points()
    prepared, piece = model.prepared(data), _pieces(data.group[episode])
    point, mask = views(model.layout, data, episode, turn)
    starts = torch.searchsorted(point, torch.arange(len(episode) + 1))
    size = max(batch_size, math.ceil(len(episode) / steps)) if steps is not None else batch_size
    total = count = 0.0
    for _ in range(epochs):
        values = team_values(target.module, data, prepared)[0].double() if target is not None else data.rewards
        goals = td_targets(data.rewards, values, data.turns, gamma_turn=gamma_turn, lam=lam)[episode, turn].float()
        total = count = 0.0
        order = torch.randperm(int(piece.max()) + 1, generator=shuffle)[piece].argsort(stable=True)
        for chosen in order.split(size):
            parts = model.parts(prepared, episode[chosen], turn[chosen])
            within, sample = _samples(starts, chosen)
            utilities = parts.utilities.index_select(0, within)
            mixed = model.mixer(utilities, parts.state, mask[sample], parts.where[within])
            loss = model.loss(mixed, goals[chosen[within]])
            found = loss.item()
            if not math.isfinite(found):
                raise ValueError(f"the loss of the team value is {found}, not finite")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if target is not None:
                target.follow(model, tau)
            total, count = total + found * len(sample), count + len(sample)
    return total / count


def _pieces(group: Tensor) -> Tensor:
    """[P] int64: the piece of each point, of at most `PIECE` points of one group [P]."""
    order = group.argsort(stable=True)
    counts = group.bincount()
    place = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[order]]
    piece = torch.empty_like(order)
    piece[order] = (place % PIECE == 0).cumsum(0) - 1
    return piece


def _samples(starts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(index into `chosen`, index into the views) of the chosen points' views."""
    counts = starts[chosen + 1] - starts[chosen]
    within = torch.arange(len(chosen)).repeat_interleave(counts)
    return within, torch.arange(len(within)) + (starts[chosen] - counts.cumsum(0) + counts)[within]
