"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over chains of sampled tokens.

Invariant: a chain is the sampled tokens of some calls, end to end; what lies between them (tool results, other agents'
words, padding) is not in it and discounts nothing. Behind its last token the value is 0. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.whiten import whitened


def gae(
    batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0. Each row is a chain of its own: what
    its calls earn reaches back to the row's first token and no further.

    `whiten` gives the advantages mean 0 and variance 1 over all sampled tokens; the returns, which are what the values
    should have been, stay as they are. Raises ValueError for a gamma or lam outside [0, 1].
    """
    learns, values = batch.mask & batch.valued, batch.values
    calls = range(len(batch.row_of_call))
    advantages, returns = chained_gae(batch, learns, values, calls, batch.row_of_call, gamma=gamma, lam=lam)
    return batch.per_row(whitened(advantages, learns) if whiten else advantages), batch.per_row(returns)


def chained_gae(
    batch: CreditBatch,
    learns: Tensor,
    values: Tensor,
    order: Sequence[int],
    chain_of_call: Sequence[int],
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [N] float64 each, 0 where `learns` ([N] bool) is False; `values` is [N] float64.

    `order` names every call once, the calls of a chain next to each other in the order in which they were made;
    `chain_of_call` [C] says which chain is whose. The outcome of a call stands on its last token in the chain. A call
    that has none there (it sampled nothing, or its policy has no values) leaves its outcome to the chain's token before
    it, or to the chain's first token if none is before it; in a chain without tokens nobody is there to learn.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: {value} is not between 0 and 1")
    if not batch.row_of_call:
        return torch.zeros_like(values), torch.zeros_like(values)
    calls = torch.tensor(order, dtype=torch.int64)
    _, chain = torch.tensor(chain_of_call, dtype=torch.int64)[calls].unique_consecutive(return_inverse=True)
    tokens, counts = _tokens_of(batch.call_lengths, calls, learns)
    lengths = torch.zeros(int(chain[-1]) + 1, dtype=torch.int64).index_add(0, chain, counts)
    first = lengths.cumsum(0) - lengths
    landing = torch.maximum(counts.cumsum(0) - 1, first[chain])
    heard = lengths[chain] > 0
    rewards = batch.penalties[tokens].index_add_(0, landing[heard], batch.outcomes[calls][heard])
    known = values[tokens]
    found = scan(rewards, known, lengths, gamma=gamma, lam=lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[tokens] = found
    returns[tokens] = found.add_(known)
    return advantages, returns


def _tokens_of(call_lengths: Tensor, calls: Tensor, learns: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the tokens that learn, call by call in the order of `calls`, and how many each call has."""
    ends = call_lengths.cumsum(0)
    so_far = torch.cat([torch.zeros(1, dtype=torch.int64), learns.cumsum(0)])
    counts = so_far[ends] - so_far[ends - call_lengths]
    tokens = learns.nonzero().squeeze(1)
    if not torch.equal(calls, torch.arange(len(calls))):
        first = counts.cumsum(0) - counts
        counts, first = counts[calls], first[calls]
        tokens = tokens[torch.arange(len(tokens)) + (first - counts.cumsum(0) + counts).repeat_interleave(counts)]
    return tokens, counts


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
