"""Importance weights of the trainer's policy against the server's, which sampled (truncated importance sampling, Yao et
al., fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv 2510.18855).

Server and trainer hold the same weights, but differ in kernels and precision, so that samples are slightly off-policy.
Invariant: a weight is 0 or positive and never above the cap, so it turns no sign; where both agree it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.options import check_choice

LARGEST = 20.0
"""Bound on the logarithm of a ratio: it stays finite in float32."""


def importance_weights(
    trainer: Sequence[Tensor],
    server: Sequence[Tensor],
    mask: Sequence[Tensor],
    call_ends: Sequence[Sequence[int]],
    *,
    cap: float = 2.0,
    level: str = "token",
    mode: str = "truncate",
) -> tuple[list[Tensor], dict[str, float]]:
    """Return (weights, metrics): per row a float32 tensor of pi_trainer / pi_server, 0 where the mask is 0.

    `trainer` and `server`: log-probs (nats) of the same tokens, one tensor per row; `mask`: True where sampled;
    `call_ends`: where each merged call of a row ends (exclusive). `level` token: a ratio per token. sequence: one per
    call, the product over its sampled tokens. `mode` truncate: ratios above `cap` count as `cap`. mask: those outside
    of [1 / cap, cap] count as 0. Raises ValueError for a log-prob that is not finite, naming the row.

    Metrics, over tokens or over calls: `mean` of the weights; `min` and `max` of the ratios before the cap; `capped`,
    the share that was truncated or masked; `ess`, the effective sample size (sum w)^2 / (n sum w^2), 0 where all
    weights are 0.
    """
    check_choice("importance level", level, ("token", "sequence"))
    check_choice("importance mode", mode, ("truncate", "mask"))
    if not cap > 1.0:
        raise ValueError(f"importance cap: {cap} is not above 1")
    sampled = torch.cat([one.bool() for one in mask])
    difference = torch.cat([t.double() - s.double() for t, s in zip(trainer, server, strict=True)])
    difference = torch.where(sampled, difference, 0.0)
    sizes = [len(one) for one in trainer]
    if not torch.isfinite(difference).all():
        row = next(i for i, part in enumerate(difference.split(sizes)) if not torch.isfinite(part).all())
        raise ValueError(f"row {row}: a log-prob is not finite")
    unit, counted = torch.arange(len(difference)), sampled
    if level == "sequence":
        lengths = torch.tensor([b - a for ends in call_ends for a, b in zip((0, *ends), ends, strict=False)])
        unit = torch.arange(len(lengths)).repeat_interleave(lengths)
        difference = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, unit, difference)
        counted = torch.zeros(len(lengths), dtype=torch.int64).index_add(0, unit, sampled.long()) > 0
    ratio = difference.clamp(-LARGEST, LARGEST).exp()
    log_cap = math.log(cap)
    capped = difference > log_cap if mode == "truncate" else difference.abs() > log_cap
    weight = torch.where(capped, cap if mode == "truncate" else 0.0, ratio)
    tokens = (weight[unit] * sampled).float()
    return list(tokens.split(sizes)), _metrics(ratio[counted], weight[counted], capped[counted])


def _metrics(ratio: Tensor, weight: Tensor, capped: Tensor) -> dict[str, float]:
    if not len(ratio):
        return {}
    squares = (weight**2).sum()
    return {
        "importance/mean": weight.mean().item(),
        "importance/min": ratio.min().item(),
        "importance/max": ratio.max().item(),
        "importance/capped": capped.double().mean().item(),
        "importance/ess": (weight.sum() ** 2 / (len(weight) * squares)).item() if squares > 0 else 0.0,
    }
