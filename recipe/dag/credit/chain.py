"""GAE over chains of calls: an agent's own (`gae`), or all of an episode (`gae_chain`, MARFT's credit).

Invariant: `gae` chains the calls of one agent in one episode, in the order in which they were made, so what the agent
earns later reaches its earlier calls, whether they were merged into one row or not. For `gae_chain` an episode is one
stream of sampled tokens: the last token of one call bootstraps from the first value of the next, even if that belongs
to another agent, policy or turn (MARFT, arXiv 2504.16129, whose chain is over a fixed list of agents; siiRL's
`gae_marft`). Rewards therefore reach every earlier call once, and copying them to other agents would count them twice.
Statistics never mix policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import chained_gae


def gae(
    batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns): one float32 tensor per row, 0 where the mask is 0. The sampled tokens of an agent's
    calls in an episode are one chain.

    `whiten` gives the advantages mean 0 and variance 1 over all sampled tokens of a policy; the returns, which are what
    the values should have been, stay as they are. Raises ValueError for a gamma or lam outside [0, 1], and where an
    agent's calls do not know their position in the episode, or share one.
    """
    order, chain = in_order(batch, list(batch.trajectories()))
    return chained_gae(batch, order, chain, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)


def gae_chain(
    batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of the rows of all policies: one float32 tensor per row, 0 where the mask is 0.

    Rows without values (of frozen policies, or without a token) are what the others' world does: their tokens are not
    in the chain, their rewards go where `chained_gae` puts those of a call without tokens. `whiten` acts on each
    policy's sampled tokens by themselves. Raises ValueError for calls that do not know their position in the episode,
    or share one, and for a gamma or lam outside [0, 1].
    """
    order, chain = in_order(batch, list(zip(batch.uid, batch.episode, strict=True)))
    return chained_gae(batch, order, chain, gamma=gamma, lam=lam).per_row(batch, whiten=whiten)


def in_order(batch: CreditBatch, keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """(the calls, those with one key next to each other in the order in which they were made; which chain is whose).
    `keys` [C]. Raises ValueError for calls that do not know their position in the episode, or share one."""
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    chain = [number[key] for key in keys]
    if len(number) == len(chain):
        return list(range(len(chain))), chain
    rows: dict[int, set[int]] = {}
    for number, row in zip(chain, batch.row_of_call, strict=True):
        rows.setdefault(number, set()).add(row)

    def place(call: int) -> tuple[int, int]:
        position = batch.position[call]
        if position is None and len(rows[chain[call]]) > 1:  # the calls of one row are in order
            message = "its calls do not say at which position they are (call_positions)"
            raise ValueError(f"{batch.where(call)}: {message}")
        return chain[call], call if position is None else position

    order = sorted(range(len(chain)), key=place)
    for call, following in zip(order, order[1:], strict=False):
        if place(call) == place(following):
            raise ValueError(f"{batch.where(call)}: two calls are at position {batch.position[call]}")
    return order, chain
