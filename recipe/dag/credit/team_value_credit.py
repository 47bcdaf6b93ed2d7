"""The credit that a team's value gives to calls.

Invariant: pure. Credit reads weights as they are: whoever asks for it before the step's fit (`mixer_fit`) has baselines
that never saw the returns they are compared with. All groups of siblings are credited at once; one that is smaller than
others has siblings who made no call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.dag.credit.mixer_credit import control_variate, counterfactual, sloped
from recipe.dag.credit.mixer_data import Encoded
from recipe.dag.credit.team_value import TeamValue, team_values
from recipe.dag.credit.threads import one_thread

AT_ONCE = 2**18
"""Pairs of siblings whose messages are swapped at the same time: what bounds the memory."""


def among_siblings(values: Tensor, data: Encoded) -> Tensor:
    """[P] float64: values [E, T] of the turns that were played, less the mean of those siblings' that played it."""
    episode, turn = data.points()
    found = values.double()[episode, turn]
    group = data.group[episode] * data.rewards.shape[1] + turn
    totals = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, found)
    return found - (totals / group.bincount())[group]


@one_thread()
def credit(
    model: TeamValue,
    data: Encoded,
    returns: Tensor,
    *,
    form: str = "control_variate",
    utilities: Tensor | None = None,
) -> Tensor:
    """[E, N] float64: what each call is credited with, 0 for one that was not made and, by control variate, for one
    that no sibling made. `returns` [E, T]: see `returns_of`; `utilities`: those of `team_values`, where at hand."""
    prepared = model.prepared(data)
    if utilities is None:
        utilities = team_values(model, data, prepared)[1]
    out = torch.zeros(data.message.shape, dtype=torch.float64)
    siblings, there = _families(data.group)
    for rows in torch.arange(len(siblings)).split(max(1, AT_ONCE // siblings.shape[1] ** 2)):
        members, real = siblings[rows], there[rows]
        for turn in range(data.rewards.shape[1]):
            calls = (model.turn == turn).nonzero().flatten()
            made = (data.message[members] >= 0) & (model.turn <= turn) & real.unsqueeze(-1)
            state = model.states(prepared, members[:, 0], torch.full((len(rows),), turn))
            found = _credit(model, utilities[members, turn], state, made, returns[members, turn], calls.tolist(), form)
            out[members[real].unsqueeze(1), calls] = found[real][:, calls]
    return out


def _credit(
    model: TeamValue, utilities: Tensor, state: Tensor, made: Tensor, returns: Tensor, calls: list[int], form: str
) -> Tensor:
    """[F, G, N] float64 of F families of G siblings at one turn, for its calls alone."""
    peers = model.layout.peers
    if form == "control_variate":
        return control_variate(model.value, utilities, state, peers, made, returns, calls)
    if form == "counterfactual":
        return counterfactual(model.value, utilities, state, peers, made, calls)
    found = torch.zeros(made.shape, dtype=torch.float64)
    for call in calls:  # a slope, too, must not depend on what comes after
        found[..., call] = sloped(model.value, utilities, state, made & model.layout.seen[call])[..., call].double()
    return found


def _families(group: Tensor) -> tuple[Tensor, Tensor]:
    """(members [F, G] int64, real [F, G] bool): the episodes of each group, in their order; one that is not real fills
    up a smaller group."""
    _, family = group.unique(return_inverse=True)
    counts, order = family.bincount(), family.argsort(stable=True)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    real = torch.arange(int(counts.max())) < counts.unsqueeze(1)
    members = order[counts.cumsum(0) - counts].unsqueeze(1).repeat(1, real.shape[1])
    members[family[order], place] = order
    return members, real
