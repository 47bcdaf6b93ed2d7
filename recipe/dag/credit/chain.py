"""MARFT's credit: one GAE chain per episode, over turns, agents and tokens in the order in which they were sampled.

Invariant: an episode is one stream of sampled tokens, whoever sampled them: the last token of one call bootstraps from
the first value of the next, be it another agent's, policy's or turn's (MARFT, arXiv 2504.16129, whose chain is over a
fixed list of agents; siiRL's `gae_marft`). Rewards therefore reach every earlier call once, and copying them to other
agents would count them twice. Statistics never mix policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import chained_gae
from recipe.dag.credit.whiten import whitened


def gae_chain(
    batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of the rows of all policies: one float32 tensor per row, 0 where the mask is 0.

    Rows without values (of frozen policies, or without a token) are what the others' world does: their tokens are not
    in the chain, their rewards go where `chained_gae` puts those of a call without tokens. `whiten` acts on each
    policy's sampled tokens by themselves. Raises ValueError for calls that do not know their position in the episode,
    or share one, and for a gamma or lam outside [0, 1].
    """
    learns, values = batch.mask & batch.valued, batch.values
    episodes = list(zip(batch.uid, batch.episode, strict=True))
    number = {episode: index for index, episode in enumerate(sorted(set(episodes)))}
    chain = [number[episode] for episode in episodes]
    order = sorted(range(len(chain)), key=lambda call: (chain[call], _position(batch, call)))
    for call, following in zip(order, order[1:], strict=False):
        if chain[call] == chain[following] and batch.position[call] == batch.position[following]:
            raise ValueError(f"{_where(batch, call)}: two calls are at position {batch.position[call]}")
    advantages, returns = chained_gae(batch, learns, values, order, chain, gamma=gamma, lam=lam)
    if whiten:
        raw, advantages = advantages, torch.zeros_like(advantages)
        for policy in set(batch.policy):
            advantages += whitened(raw, learns & batch.tokens_of(policy))
    return batch.per_row(advantages), batch.per_row(returns)


def _position(batch: CreditBatch, call: int) -> int:
    position = batch.position[call]
    if position is None:
        raise ValueError(f"{_where(batch, call)}: its calls do not say at which position they are (call_positions)")
    return position


def _where(batch: CreditBatch, call: int) -> str:
    return f"row of uid {batch.uid[call]}, episode {batch.episode[call]}, agent {batch.agent[call]}"
