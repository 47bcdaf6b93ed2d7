"""MARFT's credit: one GAE chain per episode, over turns, agents and tokens in the order in which they were sampled.

Invariant: an episode is one stream of sampled tokens, whoever sampled them: the last token of one call bootstraps from
the first value of the next, be it another agent's, policy's or turn's (MARFT, arXiv 2504.16129, whose chain is over a
fixed list of agents; siiRL's `gae_marft`). Rewards therefore reach every earlier call once, and copying them to other
agents would count them twice. Statistics never mix policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import chained_gae


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
    order = sorted(range(len(chain)), key=lambda call: (chain[call], _position(batch, call)))
    for call, following in zip(order, order[1:], strict=False):
        if chain[call] == chain[following] and batch.position[call] == batch.position[following]:
            raise ValueError(f"{batch.where(call)}: two calls are at position {batch.position[call]}")
    return order, chain


def _position(batch: CreditBatch, call: int) -> int:
    position = batch.position[call]
    if position is None:
        raise ValueError(f"{batch.where(call)}: its calls do not say at which position they are (call_positions)")
    return position
