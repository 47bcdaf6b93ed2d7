"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over chains of sampled tokens.

Invariant: a chain is the sampled tokens of some calls, end to end; what lies between them (tool results, other agents'
words, padding) is not in it and discounts nothing. Behind its last token the value is 0. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.whiten import standardised_by


def gae(
    batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0. Each row is a chain of its own: what
    its calls earn reaches back to the row's first token and no further.

    `whiten` gives the advantages mean 0 and variance 1 over all sampled tokens of a policy; the returns, which are what
    the values should have been, stay as they are. Raises ValueError for a gamma or lam outside [0, 1].
    """
    calls = range(len(batch.row_of_call))
    return chained_gae(batch, calls, batch.row_of_call, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)


@dataclass(frozen=True)
class Chained:
    """What `chained_gae` found: T tokens, those that learn, chain by chain."""

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
    check_discounts(gamma, lam)
    if learns is None:
        learns, values = batch.mask & batch.valued, batch.values
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
    rewards = batch.penalties[tokens] if batch.penalised else torch.zeros(len(tokens), dtype=torch.float64)
    rewards.index_add_(0, landing[heard], batch.outcomes[calls][heard])
    if values is None:
        found = scan(rewards, torch.zeros(1, dtype=torch.float64).expand(len(tokens)), lengths, gamma=gamma, lam=lam)
        return Chained(tokens, batch.policy_of(calls, counts), found, found)
    known = values[tokens].double()
    found = scan(rewards, known, lengths, gamma=gamma, lam=lam)
    return Chained(tokens, batch.policy_of(calls, counts), found, known.add_(found))


def tokens_of(call_lengths: Tensor, calls: Tensor, learns: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the tokens that learn, call by call in the order of `calls`, and how many each call has."""
    tokens = learns.nonzero().squeeze(1)
    bounds = torch.searchsorted(tokens, torch.cat([call_lengths.new_zeros(1), call_lengths.cumsum(0)]))
    counts, first = bounds.diff(), bounds[:-1]
    if not torch.equal(calls, torch.arange(len(calls))):
        counts, first = counts[calls], first[calls]
        tokens = tokens[torch.arange(len(tokens)).add_((first - counts.cumsum(0) + counts).repeat_interleave(counts))]
    return tokens, counts


def check_discounts(gamma: float, lam: float) -> None:
    """Raises ValueError for one outside [0, 1]."""
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {value} is not between 0 and 1")


def scan(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Advantages [T] of chains that lie end to end: delta_t = r_t + gamma V_{t+1} - V_t and
    A_t = delta_t + gamma lam A_{t+1}. `rewards` and `values` are [T], `lengths` [K] sums to T.

    One pass from the last tokens backwards for all chains at once, in place: sorted by length, the chains that still go
    on at a token are the first ones, so nothing is padded and nothing is moved."""
    if not len(rewards):
        return torch.zeros_like(rewards)
    starts = lengths.cumsum(0) - lengths
    advantage = rewards - values
    advantage[:-1].add_(values[1:], alpha=gamma)
    last = (starts + lengths - 1)[(lengths > 0) & (starts + lengths < len(values))]
    advantage[last] -= gamma * values[last + 1]
    first = starts[lengths.argsort(descending=True)]
    going_on = (len(lengths) - torch.bincount(lengths).cumsum(0)).tolist()  # at t: chains longer than t
    following = advantage[1:]
    for t in range(len(going_on) - 3, -1, -1):
        here = first[: going_on[t + 1]] + t
        advantage.index_add_(0, here, following.index_select(0, here), alpha=gamma * lam)
    return advantage
