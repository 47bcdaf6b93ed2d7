"""Advantages of calls from a joint value, for the siblings of a sample: G episodes of up to A calls.

Invariant: the baseline of a call reads nothing that could have reacted to it. `baseline_inputs[i, j]` is True if the
baseline of call i may read call j; calls after i are False, because a baseline that knows how they reacted to i's
message knows the message, and biases the gradient. All three forms are functions of differences of joint values, so
moving a constant from one utility to another changes none of them. Everything here reads weights as they are: computed
before the step's fit (`mixer_fit`), the baselines never saw the returns that they are subtracted from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.causality import Graph, descendants
from recipe.dag.credit.group import group_relative
from recipe.dag.credit.joint_value import JointValueNet, one_thread
from recipe.dag.credit.mixer_batch import MixerBatch

Mixer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(utilities [..., A], state [..., Z], mask [..., A]) -> joint value [...]"""

PAIRS_AT_ONCE = 2**18
"""Pairs of siblings whose messages are exchanged at the same time, which bounds the memory."""


def baseline_inputs(graph: Graph, calls: Sequence[str]) -> Tensor:
    """Return [A, A] bool: the baseline of `calls[i]` may read `calls[j]`, another call that does not come after it.
    `graph`: call -> calls it depends on; a node's calls in later rounds and turns are calls of their own."""
    after = descendants(graph, calls)
    allowed = [[other != call and other not in after[call] for other in calls] for call in calls]
    return torch.tensor(allowed, dtype=torch.bool).reshape(len(calls), len(calls))


@dataclass(frozen=True)
class Siblings:
    """The encoded calls of the G episodes of a sample, up to A calls each."""

    utilities: Tensor
    """[..., G, A]"""
    state: Tensor
    """[..., Z], of the common prompt."""
    mask: Tensor
    """[..., G, A] bool: True where the call was made."""
    allowed: Tensor
    """[A, A] bool, see `baseline_inputs`; `linearized` does not read it."""

    def made(self, calls: Sequence[int] | None) -> Tensor:
        """Return the mask of the calls that were made and are among `calls` (all, if absent)."""
        if calls is None:
            return self.mask
        kept_A = torch.zeros(self.mask.shape[-1], dtype=torch.bool)
        kept_A[list(calls)] = True
        return self.mask & kept_A


def counterfactual(mixer: Mixer, siblings: Siblings, calls: Sequence[int] | None = None) -> Tensor:
    """Return [..., G, A] float64: the joint value with the call's message, less its mean over the messages of all G
    siblings in that place (COMA, arXiv 1705.08926, whose baseline is over the policy's actions). `calls`: compute these
    only, the other calls get 0."""
    wanted = siblings.made(calls)
    values_GGA = _exchanged_values(mixer, siblings, wanted)
    sibling_made = siblings.mask.unsqueeze(-3)  # [..., 1, H, A]: sibling h made call a
    mean = (values_GGA * sibling_made).sum(-2) / sibling_made.sum(-2).clamp_min(1)
    return torch.where(wanted, _with_own_message(values_GGA) - mean, 0.0)


def linearized(mixer: Mixer, siblings: Siblings) -> Tensor:
    """Return [..., G, A]: the derivative of the joint value in the call's utility, times the utility less the siblings'
    mean (DOP, arXiv 2007.12322). A linearization of `counterfactual` that needs no baseline inputs."""
    mask, utilities = siblings.mask, siblings.utilities.detach()
    with torch.enable_grad():
        points = utilities.detach().requires_grad_(True)
        slopes = torch.autograd.grad(mixer(points, siblings.state.unsqueeze(-2), mask).sum(), points)[0]
    mean = torch.where(mask, utilities, 0.0).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True).clamp_min(1)
    return torch.where(mask, slopes * (utilities - mean), 0.0)


def control_variate(mixer: Mixer, siblings: Siblings, returns: Tensor, calls: Sequence[int] | None = None) -> Tensor:
    """Return [..., G, A] float64: the true return R_g ([..., G]) less the mean over the other siblings h of

        Q(g's calls, with h's message in place of the call) + (R_h - Q(h's calls))

    where Q reads the call itself and those that its baseline may read. The second term corrects the level of the value
    by what it missed for h. A message is not part of its own baseline, so the expected gradient is the return's,
    whatever the mixer learned; centering the result among siblings would undo that. A constant value leaves the return
    less the mean of the other siblings'. 0 for a call that no other sibling made. `calls` as in `counterfactual`.
    """
    wanted = siblings.made(calls)
    values_GGA = _exchanged_values(mixer, siblings, wanted)
    not_itself = ~torch.eye(wanted.shape[-2], dtype=torch.bool).unsqueeze(-1)  # [G, H, 1]
    others = siblings.mask.unsqueeze(-3) & not_itself
    count = others.sum(-2)
    returns = returns.double().unsqueeze(-1)
    missed = returns - _with_own_message(values_GGA)
    mean = ((values_GGA + missed.unsqueeze(-3)) * others).sum(-2) / count.clamp_min(1)
    return torch.where(wanted & (count > 0), returns - mean, 0.0)


def _with_own_message(values_GGA: Tensor) -> Tensor:
    """Return [..., G, A]: the value with a sibling's own message."""
    return values_GGA.diagonal(dim1=-3, dim2=-2).transpose(-1, -2)


@torch.no_grad()
def _exchanged_values(mixer: Mixer, siblings: Siblings, wanted: Tensor) -> Tensor:
    """Return values [..., G, H, A] float64 (H = G): values[g, h, i] is the joint value of sibling g's calls that the
    baseline of call i may read, together with sibling h's message for call i, as if h had made the call. 0 for a call
    that is not `wanted` [..., G, A] of any sibling."""
    utilities, (count, calls) = siblings.utilities, siblings.utilities.shape[-2:]
    own = utilities.unsqueeze(-2).expand(*utilities.shape[:-1], count, calls)  # [..., G, H, A]
    values = torch.zeros(own.shape, dtype=torch.float64)
    for call in wanted.flatten(0, -2).any(0).nonzero().flatten().tolist():
        readable = siblings.mask & siblings.allowed[call]
        exchanged, present = own.clone(), readable.unsqueeze(-2).expand(own.shape).clone()
        exchanged[..., call] = utilities[..., call].unsqueeze(-2)
        present[..., call] = True
        values[..., call] = mixer(exchanged, siblings.state[..., None, None, :], present).double()
    return values


@one_thread()
def joint_advantages(
    model: JointValueNet, batch: MixerBatch, returns_ET: Tensor, utilities_ETA: Tensor, *, form: str
) -> Tensor:
    """Return [E, A] float64: the advantage of each call; 0 for a call that was not made and, with the control variate,
    for one that no sibling made. `returns_ET`: see `team_returns`; `utilities_ETA`: those of `joint_values`; `form`:
    control_variate, counterfactual or sloped (`linearized`).

    All groups of siblings are computed at once: a smaller group is filled up with siblings that made no call.
    """
    texts = model.standardize(batch)
    advantages_EA = torch.zeros(batch.message.shape, dtype=torch.float64)
    siblings_FG, real_FG = _families(batch.group)
    for families in torch.arange(len(siblings_FG)).split(max(1, PAIRS_AT_ONCE // siblings_FG.shape[1] ** 2)):
        members, real = siblings_FG[families], real_FG[families]
        for turn in range(batch.rewards.shape[1]):
            calls = (model.turns == turn).nonzero().flatten()
            mask = (batch.message[members] >= 0) & (model.turns <= turn) & real.unsqueeze(-1)
            # siblings share the question, so the first one's state is that of all
            state = model.states(texts, members[:, 0], torch.full((len(families),), turn))
            siblings = Siblings(utilities_ETA[members, turn], state, mask, model.layout.baseline_inputs)
            advantages_FGA = _turn_advantages(model, siblings, returns_ET[members, turn], calls.tolist(), form)
            advantages_EA[members[real].unsqueeze(1), calls] = advantages_FGA[real][:, calls]
    return advantages_EA


def _turn_advantages(model: JointValueNet, siblings: Siblings, returns: Tensor, calls: list[int], form: str) -> Tensor:
    """Return [F, G, A] float64 the advantages of one turn's `calls`, for F families of G siblings."""
    if form == "control_variate":
        return control_variate(model.value, siblings, returns, calls)
    if form == "counterfactual":
        return counterfactual(model.value, siblings, calls)
    advantages = torch.zeros(siblings.mask.shape, dtype=torch.float64)
    for call in calls:  # one by one: the slope in a call's utility must not depend on calls after it either
        visible = replace(siblings, mask=siblings.mask & model.layout.visible[call])
        advantages[..., call] = linearized(model.value, visible)[..., call].double()
    return advantages


def _families(group_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return (members [F, G] int64, real [F, G] bool): the episodes of each group, in their order. A smaller group is
    filled up with its first episode, which is not `real` there."""
    _, family_E = group_E.unique(return_inverse=True)
    counts_F, order_E = family_E.bincount(), family_E.argsort(stable=True)
    first_F = counts_F.cumsum(0) - counts_F
    index_in_family = torch.arange(len(order_E)) - first_F.repeat_interleave(counts_F)
    real_FG = torch.arange(int(counts_F.max())) < counts_F.unsqueeze(1)
    members_FG = order_E[first_F].unsqueeze(1).repeat(1, real_FG.shape[1])
    members_FG[family_E[order_E], index_in_family] = order_E
    return members_FG, real_FG


def center_among_siblings(values_ET: Tensor, batch: MixerBatch) -> Tensor:
    """Return [P] float64: the values of the played turns, each less the mean of the siblings that played the turn."""
    episode_P, turn_P = batch.points()
    values_P = values_ET.double()[episode_P, turn_P]
    key_P = batch.group[episode_P] * batch.rewards.shape[1] + turn_P  # equal for the same turn of siblings
    totals = torch.zeros(int(key_P.max()) + 1, dtype=torch.float64).index_add(0, key_P, values_P)
    return values_P - (totals / key_P.bincount())[key_P]


def mixer_advantages(
    batch: CreditBatch, *, group_by: Sequence[str], stat_unit: str, center: str, scale: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) of vdn and qmix.

    These are `group_relative` for rows whose rewards are the plain share of the team's return from each call's turn on.
    The batch's `mixer_credits` are added without centering, since a sibling's credit had this call's own message in its
    baseline. Without them it is grpo with the team's reward.
    """
    precentered = batch.mixer_credits.tolist() if batch.mixer_credits is not None else None
    return group_relative(
        batch,
        precentered,
        group_by=group_by,
        stat_unit=stat_unit,
        center=center,
        scale=scale,
        gamma_turn=None,  # the team's returns are discounted already
    )


def explained_variance(predicted: Tensor, actual: Tensor) -> float:
    """Return 1 - Var(actual - predicted) / Var(actual); 0 if the actual values do not vary."""
    variance = actual.double().var(correction=0).item()
    if variance == 0.0:
        return 0.0
    return 1.0 - (actual.double() - predicted.double()).var(correction=0).item() / variance


def mixer_weight(held_out: float, *, gate_at_explained_variance: float) -> float:
    """Return the mixer's share of the advantage: 0 for a held-out explained variance of 0 or below, rising linearly to
    1 at `gate_at_explained_variance`."""
    if not gate_at_explained_variance > 0.0:
        raise ValueError(f"gate_at_explained_variance: {gate_at_explained_variance} is not above 0")
    return min(max(held_out / gate_at_explained_variance, 0.0), 1.0)
