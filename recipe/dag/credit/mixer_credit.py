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
    """Form A [..., G, N] float64: the team value with the message, less the mean over all G siblings' messages in its
    place. utilities [..., G, N], state [..., S] of the common prompt, mask [..., G, N]: the call took place; `calls`:
    the only ones to give credit to, the others get 0."""
    mask, made = _only(mask, calls), mask
    grid = _swapped(mixer, utilities, state, peers, made, mask)
    there = made.unsqueeze(-3)
    mean = (grid * there).sum(-2) / there.sum(-2).clamp_min(1)
    return torch.where(mask, _own(grid) - mean, 0.0)


def sloped(mixer: Mixer, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
    """Form B [..., G, N]: the utility less the siblings' mean, times the slope of the team value in it (DOP, arXiv
    2007.12322). Reads no baseline, so it needs no `peers`, but it is a linearisation."""
    with torch.enable_grad():
        points = utilities.detach().requires_grad_(True)
        slopes = torch.autograd.grad(mixer(points, state.unsqueeze(-2), mask).sum(), points)[0]
    mean = torch.where(mask, utilities, 0.0).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True).clamp_min(1)
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
    """Form C [..., G, N] float64, the default: the true return [..., G] less the mean over the other siblings of the
    team value with their message in its place and of how far their return was from their own value, which corrects the
    value's level. Its expected gradient is the return's whatever the mixer learned, since a message has no part in its
    own baseline; to centre it among siblings would undo that. A value that says nothing leaves the return less the
    others' mean. 0 for a call that no sibling made. `calls`: as in `counterfactual`."""
    mask, made = _only(mask, calls), mask
    grid = _swapped(mixer, utilities, state, peers, made, mask)
    others = made.unsqueeze(-3) & ~torch.eye(made.shape[-2], dtype=torch.bool).unsqueeze(-1)
    count = others.sum(-2)
    returns = returns.double().unsqueeze(-1)
    missed = returns - _own(grid)
    mean = ((grid + missed.unsqueeze(-3)) * others).sum(-2) / count.clamp_min(1)
    return torch.where(mask & (count > 0), returns - mean, 0.0)


def _own(grid: Tensor) -> Tensor:
    """[..., G, N]: the value with a sibling's own message."""
    return grid.diagonal(dim1=-3, dim2=-2).transpose(-1, -2)


def _only(mask: Tensor, calls: Sequence[int] | None) -> Tensor:
    if calls is None:
        return mask
    kept = torch.zeros(mask.shape[-1], dtype=torch.bool)
    kept[list(calls)] = True
    return mask & kept


@torch.no_grad()
def _swapped(mixer: Mixer, utilities: Tensor, state: Tensor, peers: Tensor, made: Tensor, credited: Tensor) -> Tensor:
    """grid [..., G, G, N] float64: grid[g, h, i] is the team value of sibling g's calls, those after i left out, with
    i's message taken from sibling h as if h had made the call, and 0 for a call that nobody is to be credited with."""
    siblings, calls = utilities.shape[-2:]
    one = utilities.unsqueeze(-2).expand(*utilities.shape[:-1], siblings, calls)
    table = torch.zeros(one.shape, dtype=torch.float64)
    for call in credited.flatten(0, -2).any(0).nonzero().flatten().tolist():
        mixed, present = one.clone(), (made & peers[call]).unsqueeze(-2).expand(one.shape).clone()
        mixed[..., call] = utilities[..., call].unsqueeze(-2)
        present[..., call] = True
        table[..., call] = mixer(mixed, state[..., None, None, :], present).double()
    return table


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
