"""REINFORCE++: discounted returns per token, whitened once over all sampled tokens of the policy's batch.

Invariant: no group and no baseline model, so one episode per sample is enough; statistics never mix policies, because a
batch holds one policy's rows. A call's reward stands on its last sampled token, the penalty of a token on the token,
and both reach that call's tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.gae import chained_gae
from recipe.dag.credit.whiten import whitened


def reinforce_pp(batch: CreditBatch, *, gamma: float = 1.0, eps: float = 1e-8) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns): one float32 tensor per row, 0 where the mask is 0.

    The return of a sampled token is gamma^k times its call's reward, k being the sampled tokens of the call after it
    (tool results in between do not discount), less the penalties from it on, discounted likewise. Advantage =
    (return - mean) / sqrt(var + eps), sample variance; exactly 0 if all returns are equal. A call without sampled
    tokens has no token to learn from and counts in nothing. Raises ValueError for a gamma outside [0, 1].
    """
    calls = range(len(batch.row_of_call))
    nothing = torch.zeros(len(batch.mask), dtype=torch.float64)
    # without values and with lam 1, an advantage is the discounted sum of the rewards to come
    returns, _ = chained_gae(batch, batch.mask, nothing, calls, calls, gamma=gamma, lam=1.0)
    return batch.per_row(whitened(returns, batch.mask, eps)), batch.per_row(returns)
