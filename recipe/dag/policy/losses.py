"""Policy losses that verl lacks, in verl's registry, and the first update without old log-probs.

Invariant: `register` adds the losses to this process's registry, and `policy_loss.loss_mode` selects one. Each is per
token and aggregated by verl's `agg_loss`, so micro-batches and padding do not change gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.utils import losses as stock
from verl.workers.utils.losses import ppo_loss

from recipe.dag.policy.jagged import padded_responses, responses_of

SUM = "on_policy_sum/"
"""Prefix of the metrics that `recipe.dag.train.metrics.on_policy_metrics` reads."""
DRIFT_CLIP = 1.0
"""Upper bound of a token's weight in the drift's gradient; the lower bound is -1 by construction."""


def register() -> None:
    """Add the losses to verl's registry in this process, whose losses pad rows by this package."""
    register_policy_loss("cpgd")(cpgd)
    setattr(stock, "no_padding_2_padding", padded_responses)  # noqa: B010  # a name that verl imports


def actor_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None, *, config: ActorConfig
) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's loss, with current log-probs as `old_log_probs` if the rows have none.

    Such rows belong to the only update of a step, so old and current log-probs are equal: every ratio is 1 and the
    gradient is the policy gradient. The metrics then hold, as sums, what a separate pass over the old weights would
    have reported (`recipe.dag.train.metrics.on_policy_metrics`).
    """
    outputs, mask = model_output, data["response_mask"]
    if fresh := "old_log_probs" not in data:
        data["old_log_probs"] = responses_of(model_output["log_probs"].detach(), mask)
        # only the metric needs it; verl's loss would keep its graph for a term of weight 0
        if not config.entropy_coeff:
            outputs = {name: value for name, value in model_output.items() if name != "entropy"}
    loss, metrics = ppo_loss(config, outputs, data, dp_group)
    if fresh:  # last: they wait for the GPU, which by then has the loss to compute
        metrics |= _sums(data["old_log_probs"], data["rollout_log_probs"], model_output["entropy"], mask)
    return loss, metrics


@torch.no_grad()
def _sums(trainer: Tensor, server: Tensor, entropy: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return sums over the sampled tokens. All tensors are jagged; `entropy` covers prompts, too."""
    sampled = mask.values().nonzero().squeeze(1)
    columns = (trainer, server, responses_of(entropy, mask))
    x, y, entropies = (values.values().index_select(0, sampled) for values in columns)
    x, y = x.double(), y.double()  # the correlation is a small difference of large sums
    difference = (x - y).abs()
    sums = {"entropy": entropies.sum(), "difference": difference.sum(), "kl": low_variance_kl(x - y).sum()}
    sums |= {"x": x.sum(), "y": y.sum(), "xx": (x * x).sum(), "yy": (y * y).sum(), "xy": (x * y).sum()}
    most = difference.max() if len(difference) else difference.new_zeros(())
    *numbers, largest = torch.stack([*(value.double() for value in sums.values()), most]).tolist()  # read at once
    named = {"tokens": len(sampled)} | dict(zip(sums, numbers, strict=True))
    return {
        **{f"{SUM}{name}": Metric(AggregationType.SUM, value) for name, value in named.items()},
        f"{SUM}most": Metric(AggregationType.MAX, largest),
    }


def low_variance_kl(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - ln r for each ln r: at least 0, and its mean over samples of the denominator is their KL."""
    # above e^20, one token would be all of the sum
    return log_ratio.clamp(max=20.0).exp() - 1 - log_ratio


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

    The clip acts on the logarithm of the ratio, so a token's gradient is its advantage, not its advantage times the
    ratio as in PPO. The drift is KL(old || new), estimated per token by r - 1 - ln r; the weight r - 1 of its gradient
    is bounded by DRIFT_CLIP. Its coefficient is verl's `policy_loss.ppo_kl_coef`.
    """
    assert config is not None  # verl always passes the actor's
    # no ratio is below 0, so a lower clip of 1 or more means none; its logarithm must stay finite
    low, high = math.log1p(-min(config.clip_ratio_low, 1 - 1e-6)), math.log1p(config.clip_ratio_high)
    log_ratio = log_prob - old_log_prob
    plain, clipped = log_ratio * advantages, log_ratio.clamp(low, high) * advantages
    # (r - 1) * log_prob has the gradient of the drift; the clamp at 20 keeps exp finite
    weight = (log_ratio.detach().clamp(max=20.0).exp() - 1).clamp(max=DRIFT_CLIP)
    # the smaller one, as in PPO: the clip stops a move that goes on, and never one that comes back
    losses = -torch.minimum(plain, clipped) + config.policy_loss.ppo_kl_coef * weight * log_prob
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    # verl has stored the numbers of tokens and rows there: of the mini-batch, not of this micro-batch
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": masked_mean((clipped < plain).float(), response_mask).item(),
            "actor/ppo_kl": masked_mean(-log_ratio, response_mask).item(),
            "actor/policy_drift": masked_mean(low_variance_kl(log_ratio), response_mask).item(),
        }
    return loss, metrics
