"""Advantages out of a mixer's team value, for siblings: G answers of N calls each to one prompt.

Invariant: what a call is compared with contains nothing that could react to it. `peers[i, j]`: call j may stand in
call i's baseline. Calls that come after i in the graph are left out of it: a baseline that knows how they reacted
to i's message knows the message, and biases the gradient. All three forms are functions of differences of team
values, so moving a constant from one utility to another changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipe.dag.causality import Graph, descendants
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import group_relative

Mixer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(utilities [..., N], state [..., S], mask [..., N]) -> team value [...]"""


def peers_of(graph: Graph, calls: Sequence[str]) -> Tensor:
    """[N, N] bool: `calls[j]` may stand in the baseline of `calls[i]`, being another call that does not come after it.
    `graph`: call -> calls it depends on; calls of later rounds and turns are nodes of their own."""
    after = descendants(graph, calls)
    rows = [[other != call and other not in after[call] for other in calls] for call in calls]
    return torch.tensor(rows, dtype=torch.bool).reshape(len(calls), len(calls))


def counterfactual(
    mixer: Mixer, utilities: Tensor, state: Tensor, peers: Tensor, mask: Tensor, calls: Sequence[int] | None = None
) -> Tensor:
    """Form A [G, N]: the team value with the message, less the mean over all G siblings' messages in its place.
    utilities [G, N], state [S] of the common prompt, mask [G, N]: the call took place; `calls`: the only ones to give
    credit to, the others get 0."""
    mask, made = _only(mask, calls), mask
    grid, own, there = _swapped(mixer, utilities, state, peers, made, mask)
    mean = (grid.double() * there).sum(1) / there.sum(1).clamp_min(1)
    return torch.where(mask, own - mean, 0.0)


def sloped(mixer: Mixer, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
    """Form B [G, N]: the utility less the siblings' mean, times the slope of the team value in it (DOP, arXiv
    2007.12322). Reads no baseline, so it needs no `peers`, but it is a linearisation."""
    with torch.enable_grad():
        points = utilities.detach().requires_grad_(True)
        total = mixer(points, state.expand(len(points), -1), mask).sum()
        slopes = torch.autograd.grad(total, points)[0]
    mean = torch.where(mask, utilities, 0.0).sum(0) / mask.sum(0).clamp_min(1)
    return torch.where(mask, slopes * (utilities.detach() - mean.detach()), 0.0)


def control_variate(
    mixer: Mixer,
    utilities: Tensor,
    state: Tensor,
    peers: Tensor,
    mask: Tensor,
    returns: Tensor,
    calls: Sequence[int] | None = None,
) -> Tensor:
    """Form C [G, N], the default: the true return [G] less the mean team value over the other siblings' messages in its
    place. Unbiased whatever the mixer learned, since a message has no part in its own baseline. 0 for a call that no
    sibling made. `calls`: as in `counterfactual`."""
    mask, made = _only(mask, calls), mask
    grid, _, there = _swapped(mixer, utilities, state, peers, made, mask)
    others = there & ~torch.eye(len(utilities), dtype=torch.bool).unsqueeze(-1)
    count = others.sum(1)
    mean = (grid.double() * others).sum(1) / count.clamp_min(1)
    return torch.where(mask & (count > 0), returns.unsqueeze(-1) - mean, 0.0)


def _only(mask: Tensor, calls: Sequence[int] | None) -> Tensor:
    if calls is None:
        return mask
    kept = torch.zeros(mask.shape[-1], dtype=torch.bool)
    kept[list(calls)] = True
    return mask & kept


@torch.no_grad()
def _swapped(
    mixer: Mixer, utilities: Tensor, state: Tensor, peers: Tensor, made: Tensor, credited: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(grid [G, G, N], own [G, N], there [G, G, N]): grid[g, h, i] is the team value of sibling g's calls, those after
    i left out, with i's message taken from sibling h, and 0 for a call that nobody is to be credited with; own is its
    diagonal; there: h made call i."""
    siblings, calls = utilities.shape
    states = state.expand(siblings, siblings, -1)
    table = utilities.new_zeros(siblings, siblings, calls)
    for call in credited.any(0).nonzero().flatten().tolist():
        mixed = utilities.unsqueeze(1).repeat(1, siblings, 1)
        mixed[:, :, call] = utilities[:, call]
        present = (made & peers[call]).unsqueeze(1).repeat(1, siblings, 1)
        present[:, :, call] = made[:, call]
        table[:, :, call] = mixer(mixed, states, present)
    own = table.diagonal(dim1=0, dim2=1).T
    return table, own, made.unsqueeze(0).expand(siblings, -1, -1)


def compared(
    batch: CreditBatch,
    *,
    group_by: Sequence[str] = ("uid", "agent", "turn"),
    stat_unit: str = "call",
    center: str = "mean",
    scale: str = "std",
) -> tuple[list[Tensor], list[Tensor]]:
    """vdn and qmix: `group_relative` of rows whose rewards are the team's return from each call's turn on, discounts
    over turns included, and beside it the batch's credits, which are not centred: what a sibling was credited with had
    this call's own message in its baseline. Without credits it is grpo with the team's reward."""
    credits = batch.credits.tolist() if batch.credits is not None else None
    return group_relative(batch, credits, group_by=group_by, stat_unit=stat_unit, center=center, scale=scale)


def explained_variance(predicted: Tensor, actual: Tensor) -> float:
    """1 - Var(actual - predicted) / Var(actual), of held-out episodes; 0 if the actual values do not vary."""
    variance = actual.double().var(correction=0).item()
    if variance == 0.0:
        return 0.0
    return 1.0 - (actual.double() - predicted.double()).var(correction=0).item() / variance


def mixer_weight(held_out: float, *, full: float = 0.5) -> float:
    """How much of the advantage is the mixer's: 0 at a held-out explained variance of 0 or below, rising to 1 at
    `full`."""
    if not full > 0.0:
        raise ValueError(f"full: {full} is not above 0")
    return min(max(held_out / full, 0.0), 1.0)
