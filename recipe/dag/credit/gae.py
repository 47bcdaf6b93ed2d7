"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438) over sequences of sampled tokens.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

Invariant: a sequence is the sampled tokens of some calls, concatenated; what lies between them (tool results, messages
of other agents, padding) is not part of it and discounts nothing. The value after its last token is 0. Computed in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.options import check_units
from recipe.dag.credit.whiten import standardize_per_policy


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns of the L tokens that learn, in any order."""

    tokens: Tensor
    """[L] int64, their indices among the batch's N tokens."""
    policies: Tensor | None
    """[L] int64, equal for tokens of one policy; None if there is one policy."""
    advantages: Tensor
    """[L] float64."""
    returns: Tensor
    """[L] float64."""

    def per_row(self, batch: CreditBatch, *, whiten: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return (advantages, returns), one float32 tensor per row of the batch; `whiten` the advantages of each
        policy."""
        advantages_L = standardize_per_policy(self.advantages, self.policies) if whiten else self.advantages
        return batch.scatter_to_rows(self.tokens, advantages_L), batch.scatter_to_rows(self.tokens, self.returns)


def sequence_gae(
    batch: CreditBatch,
    call_order: Sequence[int],
    sequence_ids: Sequence[int],
    *,
    gamma: float,
    lam: float,
    learns: Tensor | None = None,
) -> TokenAdvantages:
    """Return the GAE of the tokens that learn: the sampled ones that have values, or those of `learns` ([N] bool),
    whose values are 0.

    `call_order` [C]: every call once, the calls of one sequence next to each other and in the order in which they were
    made. `sequence_ids` [C]: the sequence of each call. A call's outcome is paid on its last token in the sequence. If
    it has none (it sampled nothing, or its policy has no values), the outcome goes to the last token before the call,
    or to the sequence's first token if there is none before; the outcomes of a sequence without tokens are dropped.

    Where the outcome of a call is unknown (`unscored`), the reward of the token on which it would be paid is the one
    that the values expect, V_t - gamma V_{t+1}: its delta is 0, and what is earned later reaches the tokens before it.
    """
    check_units(gamma=gamma, lam=lam)
    values = batch.values if learns is None else None
    learns = batch.learns() if learns is None else learns
    calls_C = torch.tensor(call_order, dtype=torch.int64)
    if not len(calls_C):
        empty = torch.zeros(0, dtype=torch.float64)
        return TokenAdvantages(calls_C, None, empty, empty)
    # from here on, calls are in `call_order` and sequences are numbered in the order in which it visits them
    _, sequence_C = torch.tensor(sequence_ids, dtype=torch.int64)[calls_C].unique_consecutive(return_inverse=True)
    tokens_L, counts_C = tokens_of(batch.call_lengths, calls_C, learns)
    lengths_K = torch.zeros(int(sequence_C[-1]) + 1, dtype=torch.int64).index_add(0, sequence_C, counts_C)
    first_K = lengths_K.cumsum(0) - lengths_K
    # a call without tokens is paid at the token before it; the maximum keeps that inside its own sequence
    paid_token_C = torch.maximum(counts_C.cumsum(0) - 1, first_K[sequence_C])
    is_paid_C = lengths_K[sequence_C] > 0

    steps = StepMajor.of(lengths_K)
    policies_L = batch.policy_ids(calls_C, counts_C)
    tokens_L = tokens_L[steps.order]
    policies_L = None if policies_L is None else policies_L[steps.order]
    values_L = None if values is None else values[tokens_L].double()
    # one buffer holds r_t - V_t first and the advantages in the end: rows of many tokens make these tensors large
    advantages_L = torch.zeros(len(tokens_L), dtype=torch.float64) if values_L is None else values_L.neg()
    if batch.penalized:
        advantages_L += batch.penalties[tokens_L]
    paid_index = steps.index_of(sequence_C[is_paid_C], (paid_token_C - first_K[sequence_C])[is_paid_C])
    advantages_L.index_add_(0, paid_index, batch.outcomes[calls_C][is_paid_C])
    unknown_C = is_paid_C & torch.tensor(batch.unscored, dtype=torch.bool)[calls_C]
    # after all rewards: it replaces those of the tokens on which an unknown one would be paid
    if values_L is not None:
        steps.expect_(advantages_L, values_L, paid_token_C[unknown_C], gamma=gamma)
    steps.scan_(advantages_L, values_L, gamma=gamma, lam=lam)
    # R_t = A_t + V_t, in the buffer of the values, which are not needed any more
    returns_L = advantages_L if values_L is None else values_L.add_(advantages_L)
    return TokenAdvantages(tokens_L, policies_L, advantages_L, returns_L)


def tokens_of(lengths_C: Tensor, calls: Tensor, learns_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the indices of the tokens that learn, call by call in the order of `calls`; their number in each)."""
    tokens_L = learns_N.nonzero().squeeze(1)
    call_bounds = torch.cat([lengths_C.new_zeros(1), lengths_C.cumsum(0)])  # [C + 1], in tokens of the batch
    bounds = torch.searchsorted(tokens_L, call_bounds)  # [C + 1], in tokens that learn
    counts, first = bounds.diff(), bounds[:-1]
    if not torch.equal(calls, torch.arange(len(calls))):
        counts, first = counts[calls], first[calls]
        # the i-th token of the new order is token i of the old one, plus how far its call moved
        moved = (first - counts.cumsum(0) + counts).repeat_interleave(counts)
        tokens_L = tokens_L[torch.arange(len(tokens_L)).add_(moved)]
    return tokens_L, counts


@dataclass(frozen=True)
class StepMajor:
    """K sequences laid out step by step, as torch's PackedSequence does: the first tokens of all sequences, then all
    second tokens, and so on. Within a step the longest sequence comes first, so those that go on are always the first
    ones of the step, a backward scan is one vector operation per step, and nothing is padded."""

    lengths: Tensor
    """[K] int64."""
    order: Tensor
    """[L] int64: the index of each token if the sequences are concatenated."""
    starts: Tensor
    """[S + 1] int64: where each step begins among the L tokens."""
    rank: Tensor
    """[K] int64: the position of each sequence within its steps."""

    @classmethod
    def of(cls, lengths_K: Tensor) -> StepMajor:
        """Return the layout of sequences with these lengths (int64)."""
        ranked_K = lengths_K.argsort(descending=True, stable=True)
        first_K = (lengths_K.cumsum(0) - lengths_K)[ranked_K]
        # step t holds the sequences longer than t; the last count, of those longer than the longest, is 0
        sizes_S = (len(lengths_K) - torch.bincount(lengths_K).cumsum(0))[:-1]
        starts = torch.cat([sizes_S.new_zeros(1), sizes_S.cumsum(0)])
        order_L = torch.empty(int(lengths_K.sum()), dtype=torch.int64)
        for t, (begin, end) in enumerate(pairwise(starts.tolist())):
            torch.add(first_K[: end - begin], t, out=order_L[begin:end])
        rank_K = torch.empty_like(ranked_K)
        rank_K[ranked_K] = torch.arange(len(ranked_K))
        return cls(lengths_K, order_L, starts, rank_K)

    def index_of(self, sequence: Tensor, step: Tensor) -> Tensor:
        """Return the index of token number `step` of each `sequence`."""
        return self.starts[step] + self.rank[sequence]

    def expect_(self, td_L: Tensor, values_L: Tensor, unknown: Tensor, *, gamma: float) -> None:
        """Give these tokens the reward with which their delta is 0. `td_L` holds r_t - V_t and is changed in place;
        both tensors are in the order of the steps. `unknown`: indices if the sequences are concatenated."""
        if not len(unknown):
            return
        ends_K = self.lengths.cumsum(0)
        # right: an index that equals an end belongs to the next sequence, and not to an empty one
        sequence = torch.searchsorted(ends_K, unknown, right=True)
        step = unknown - (ends_K - self.lengths)[sequence]
        here, goes_on = self.index_of(sequence, step), step + 1 < self.lengths[sequence]
        # delta_t = r_t - V_t + gamma V_{t+1} is 0 if r_t - V_t is -gamma V_{t+1}, which is 0 at a sequence's end
        td_L[here] = 0.0
        td_L[here[goes_on]] = -gamma * values_L[self.index_of(sequence[goes_on], step[goes_on] + 1)].to(td_L.dtype)

    def scan_(self, advantages_L: Tensor, values_L: Tensor | None, *, gamma: float, lam: float) -> None:
        """Turn r_t - V_t into A_t in place, from the last step to the first. Both tensors are in the order of the
        steps; values are 0 throughout if absent."""
        starts = self.starts.tolist()
        # (begin of step t, begin of step t + 1, its end), for t = S - 2 down to 0
        for begin, middle, end in zip(starts[-3::-1], starts[-2:0:-1], starts[:1:-1], strict=True):
            going_on = advantages_L[begin : begin + end - middle]  # the sequences that have a step t + 1
            if values_L is not None:
                going_on.add_(values_L[middle:end], alpha=gamma)
            going_on.add_(advantages_L[middle:end], alpha=gamma * lam)


def scan(
    rewards_L: Tensor, values_L: Tensor, lengths_K: Tensor, unknown: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Return [L] the advantages of K concatenated sequences, whose lengths sum to L. `unknown`: the indices of steps
    whose reward is unknown, with a delta of 0."""
    if not len(rewards_L):
        return torch.zeros_like(rewards_L)
    steps = StepMajor.of(lengths_K)
    advantages_L, values_L = (rewards_L - values_L)[steps.order], values_L[steps.order]
    steps.expect_(advantages_L, values_L, unknown, gamma=gamma)
    steps.scan_(advantages_L, values_L, gamma=gamma, lam=lam)
    return torch.empty_like(advantages_L).index_copy_(0, steps.order, advantages_L)
