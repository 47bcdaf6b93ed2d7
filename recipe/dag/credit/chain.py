"""GAE over tokens: the sequence is an agent's calls in an episode (`gae`), or all calls of it (`gae_chain`, MARFT).

Invariant: `gae` joins the calls of one agent in one episode in the order in which they were made, so what the agent
earns later reaches its earlier calls, whether they were merged into one row or not. For `gae_chain` an episode is one
sequence of sampled tokens: the last token of one call bootstraps from the first value of the next, even if that belongs
to another agent, policy or turn (MARFT, arXiv 2504.16129, whose sequence is over a fixed list of agents; siiRL's
`gae_marft`). Rewards therefore reach every earlier call once, and copying them to other agents would count them twice.
Statistics never mix policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import sequence_gae


def gae(batch: CreditBatch, *, gamma: float, lam: float, whiten: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0. The sampled tokens of an agent's
    calls in an episode are one sequence.

    `whiten` gives the advantages mean 0 and variance 1 over all sampled tokens of a policy; the returns, which are the
    critic's targets, stay as they are. Raises ValueError for a gamma or lam outside [0, 1], and for calls of an agent
    that share a position in the episode.
    """
    call_order, sequence_ids = sort_by_sequence(batch, list(batch.trajectories()))
    return sequence_gae(batch, call_order, sequence_ids, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)


def gae_chain(batch: CreditBatch, *, gamma: float, lam: float, whiten: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) of the rows of all policies: one float32 tensor per row, 0 where the mask is 0.

    Rows without values (of frozen policies, or without a sampled token) belong to the environment of the learning
    agents: their tokens are not in the sequence, and their rewards go where `sequence_gae` puts those of a call without
    tokens. `whiten` acts on each policy's sampled tokens by themselves. Raises ValueError as `gae` does.
    """
    call_order, sequence_ids = sort_by_sequence(batch, list(zip(batch.uid, batch.episode, strict=True)))
    return sequence_gae(batch, call_order, sequence_ids, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)


def sort_by_sequence(batch: CreditBatch, keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return (call_order, sequence_ids), each [C].

    `keys` [C]: equal for the calls of one sequence. `call_order` lists the calls of one sequence next to each other, in
    the order in which they were made; `sequence_ids` numbers the sequence of each call. Raises ValueError for calls of
    a sequence that share a position in the episode.
    """
    ids = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    sequence_ids = [ids[key] for key in keys]
    times = list(zip(sequence_ids, batch.position, strict=True))
    call_order = sorted(range(len(times)), key=times.__getitem__)
    # without an order the bootstrap of one call from the next is undefined
    for call, following in pairwise(call_order):
        if times[call] == times[following]:
            raise ValueError(f"{batch.describe(call)}: two calls are at position {batch.position[call]}")
    return call_order, sequence_ids
