"""Policy losses that verl does not have, in the form in which verl looks them up.

Invariant: `register` makes them known in this process, and `policy_loss.loss_mode` names them. Each is per token and
aggregated by verl's `agg_loss`, so micro-batches and padding change no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig

DRIFT_CLIP = 1.0
"""Bounds the weight of a token in the drift's gradient from above; from below it is -1 anyway."""


def register() -> None:
    register_policy_loss("cpgd")(cpgd)


def cpgd(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped policy gradient with policy drift (CPGD, arXiv 2505.12504); all tensors are [rows, tokens].

    The clip acts on the logarithm of the ratio, so a token's gradient is its advantage and not, as in PPO, its
    advantage times the ratio. The drift is KL(old || new), estimated per token by r - 1 - ln r; its gradient's weight
    r - 1 is bounded by DRIFT_CLIP. Its coefficient is verl's `policy_loss.ppo_kl_coef`."""
    low, high = math.log1p(-min(config.clip_ratio_low, 1 - 1e-6)), math.log1p(config.clip_ratio_high)
    log_ratio = log_prob - old_log_prob
    plain, clipped = log_ratio * advantages, log_ratio.clamp(low, high) * advantages
    weight = (log_ratio.detach().clamp(max=20.0).exp() - 1).clamp(max=DRIFT_CLIP)
    losses = -torch.minimum(plain, clipped) + config.policy_loss.ppo_kl_coef * weight * log_prob
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    with torch.no_grad():
        drift = log_ratio.clamp(max=20.0).exp() - 1 - log_ratio
        metrics = {
            "actor/pg_clipfrac": masked_mean((clipped < plain).float(), response_mask).item(),
            "actor/ppo_kl": masked_mean(-log_ratio, response_mask).item(),
            "actor/policy_drift": masked_mean(drift, response_mask).item(),
        }
    return loss, metrics
