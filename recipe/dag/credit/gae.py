"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over chains of sampled tokens.

Invariant: a chain is the sampled tokens of some calls, end to end; what lies between them (tool results, other agents'
words, padding) is not in it and discounts nothing. Behind its last token the value is 0. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_units
from recipe.dag.credit.whiten import standardised_by


@dataclass(frozen=True)
class Chained:
    """What `chained_gae` found of the T tokens that learn, in whatever order."""

    tokens: Tensor
    """[T] int64, their places among the batch's N tokens."""
    policies: Tensor | None
    """[T] int64, equal for tokens of one policy; None: there is one policy."""
    advantages: Tensor
    """[T] float64, as are the returns."""
    returns: Tensor

    def per_row(self, batch: CreditBatch, *, whiten: bool) -> tuple[list[Tensor], list[Tensor]]:
        """(advantages, returns), one float32 tensor per row of the batch; `whiten` each policy's advantages."""
        advantages = standardised_by(self.advantages, self.policies) if whiten else self.advantages
        return batch.place(self.tokens, advantages), batch.place(self.tokens, self.returns)


def chained_gae(
    batch: CreditBatch,
    order: Sequence[int],
    chain_of_call: Sequence[int],
    *,
    gamma: float,
    lam: float,
    learns: Tensor | None = None,
    values: Tensor | None = None,
) -> Chained:
    """GAE over the tokens that learn: the sampled ones that have values, or `learns` ([N] bool) with `values` ([N], 0
    throughout where absent).

    `order` names every call once, the calls of a chain next to each other in the order in which they were made;
    `chain_of_call` [C] says which chain is whose. The outcome of a call stands on its last token in the chain. A call
    that has none there (it sampled nothing, or its policy has no values) leaves its outcome to the chain's token before
    it, or to the chain's first token if none is before it; in a chain without tokens nobody is there to learn.
    """
    check_units(gamma=gamma, lam=lam)
    if learns is None:
        learns, values = batch.learns(), batch.values
    calls = torch.tensor(order, dtype=torch.int64)
    if not len(calls):
        nothing = torch.zeros(0, dtype=torch.float64)
        return Chained(calls, None, nothing, nothing)
    _, chain = torch.tensor(chain_of_call, dtype=torch.int64)[calls].unique_consecutive(return_inverse=True)
    tokens, counts = tokens_of(batch.call_lengths, calls, learns)
    lengths = torch.zeros(int(chain[-1]) + 1, dtype=torch.int64).index_add(0, chain, counts)
    first = lengths.cumsum(0) - lengths
    landing = torch.maximum(counts.cumsum(0) - 1, first[chain])
    heard = lengths[chain] > 0
    steps = Steps.of(lengths)
    members = batch.policy_of(calls, counts)
    tokens, members = tokens[steps.order], None if members is None else members[steps.order]
    known = None if values is None else values[tokens].double()
    found = torch.zeros(len(tokens), dtype=torch.float64) if known is None else known.neg()
    if batch.penalised:
        found += batch.penalties[tokens]
    found.index_add_(0, steps.place(chain[heard], (landing - first[chain])[heard]), batch.outcomes[calls][heard])
    steps.scan_(found, known, gamma=gamma, lam=lam)
    return Chained(tokens, members, found, found if known is None else known.add_(found))


def tokens_of(call_lengths: Tensor, calls: Tensor, learns: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the tokens that learn, call by call in the order of `calls`, and how many each call has."""
    tokens = learns.nonzero().squeeze(1)
    bounds = torch.searchsorted(tokens, torch.cat([call_lengths.new_zeros(1), call_lengths.cumsum(0)]))
    counts, first = bounds.diff(), bounds[:-1]
    if not torch.equal(calls, torch.arange(len(calls))):
        counts, first = counts[calls], first[calls]
        tokens = tokens[torch.arange(len(tokens)).add_((first - counts.cumsum(0) + counts).repeat_interleave(counts))]
    return tokens, counts


@dataclass(frozen=True)
class Steps:
    """Chains laid out step by step: first the first token of every chain, then the second ones, and so on; in a step
    the longest chains stand first, so those that go on are the first ones of the step. Nothing is padded."""

    order: Tensor
    """[T] int64: where the tokens stand if the chains lie end to end."""
    starts: Tensor
    """[S + 1] int64, where each step begins among the T tokens."""
    rank: Tensor
    """[K] int64, each chain's place in its steps."""

    @classmethod
    def of(cls, lengths: Tensor) -> Steps:
        """`lengths` [K] int64 of the chains."""
        ranked = lengths.argsort(descending=True, stable=True)
        first = (lengths.cumsum(0) - lengths)[ranked]
        going_on = (len(lengths) - torch.bincount(lengths).cumsum(0))[:-1]  # at t: chains longer than t
        starts = torch.cat([going_on.new_zeros(1), going_on.cumsum(0)])
        order, bounds = torch.empty(int(lengths.sum()), dtype=torch.int64), starts.tolist()
        for t, (begin, end) in enumerate(pairwise(bounds)):
            torch.add(first[: end - begin], t, out=order[begin:end])
        rank = torch.empty_like(ranked)
        rank[ranked] = torch.arange(len(ranked))
        return cls(order, starts, rank)

    def place(self, chain: Tensor, step: Tensor) -> Tensor:
        """Where the tokens stand that are number `step` of chain `chain`."""
        return self.starts[step] + self.rank[chain]

    def scan_(self, advantage: Tensor, values: Tensor | None, *, gamma: float, lam: float) -> None:
        """r_t - V_t becomes the advantage, in place: delta_t = r_t + gamma V_{t+1} - V_t and
        A_t = delta_t + gamma lam A_{t+1}. `advantage` and `values` (0 throughout where absent) are [T], in the order of
        the steps."""
        bounds = self.starts.tolist()
        for begin, middle, end in zip(bounds[-3::-1], bounds[-2:0:-1], bounds[:1:-1], strict=True):
            here = advantage[begin : begin + end - middle]
            if values is not None:
                here.add_(values[middle:end], alpha=gamma)
            here.add_(advantage[middle:end], alpha=gamma * lam)


def scan(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Advantages [T] of chains that lie end to end: `rewards` and `values` are [T], `lengths` [K] sums to T."""
    if not len(rewards):
        return torch.zeros_like(rewards)
    steps = Steps.of(lengths)
    found = (rewards - values)[steps.order]
    steps.scan_(found, values[steps.order], gamma=gamma, lam=lam)
    return torch.empty_like(found).index_copy_(0, steps.order, found)
