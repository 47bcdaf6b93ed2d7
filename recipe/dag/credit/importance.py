"""Importance weights of the trainer's policy against the inference server's, which sampled (truncated importance
sampling, Yao et al., fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv 2510.18855; geometric mean
and veto: MARTI v2).

Server and trainer hold the same weights but differ in kernels and precision, so samples are slightly off-policy.
Invariant: a weight is at least 0 and at most the cap, so it never changes a sign; where both agree it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from recipe.dag.credit.options import check_choice

LARGEST = 20.0
"""Bound on the logarithm of a ratio, so that it stays finite in float32."""


def importance_weights(
    trainer: Sequence[Tensor],
    server: Sequence[Tensor],
    mask: Sequence[Tensor],
    call_ends: Sequence[Sequence[int]],
    *,
    cap: float,
    level: str,
    mode: str,
    veto: float | None,
) -> tuple[list[Tensor], dict[str, float]]:
    """Return (weights, metrics): per row a float32 tensor of pi_trainer / pi_server, 0 where the mask is 0.

    `trainer` and `server`: log-probs (nats) of the same tokens, one tensor per row; `mask`: True where sampled;
    `call_ends`: the end (exclusive) of each merged call of a row. `level="token"`: one ratio per token; `"sequence"`:
    one per call, the product over its sampled tokens; `"geometric"`: one per call, their geometric mean.
    `mode="truncate"`: ratios above `cap` become `cap`; `"mask"`: ratios outside [1 / cap, cap] become 0. `veto`: a call
    with a token whose ratio is below this has the weight 0; None: no call is vetoed. Raises ValueError for a log-prob
    that is not finite, naming the row.

    Metrics, over tokens or over calls: `mean` of the weights; `min` and `max` of the ratios before the cap; `capped`,
    the share that was truncated or masked; `ess`, the effective sample size (sum w)^2 / (n sum w^2), 0 if all weights
    are 0. With a veto, `vetoed` is the share of calls.
    """
    check_choice("importance level", level, ("token", "sequence", "geometric"))
    check_choice("importance mode", mode, ("truncate", "mask"))
    if not cap > 1.0:
        raise ValueError(f"importance cap: {cap} is not above 1")
    sampled_N = torch.cat([row_mask.bool() for row_mask in mask])
    # float64: the sum over a call's tokens may have thousands of terms
    log_ratio = torch.cat([t.double() - s.double() for t, s in zip(trainer, server, strict=True)])
    log_ratio = torch.where(sampled_N, log_ratio, 0.0)
    sizes = [len(log_probs) for log_probs in trainer]
    if not torch.isfinite(log_ratio).all():
        row = next(i for i, part in enumerate(log_ratio.split(sizes)) if not torch.isfinite(part).all())
        raise ValueError(f"row {row}: a log-prob is not finite")
    lengths_C = torch.tensor([end - start for ends in call_ends for start, end in pairwise((0, *ends))])
    call_of_token_N = torch.arange(len(lengths_C)).repeat_interleave(lengths_C)
    sampled_C = torch.zeros(len(lengths_C), dtype=torch.int64).index_add(0, call_of_token_N, sampled_N.long())
    vetoed_C = torch.zeros(len(lengths_C), dtype=torch.bool)
    if veto is not None:
        vetoed_C[call_of_token_N[log_ratio < math.log(veto)]] = True
    unit_of_token_N, counted = torch.arange(len(log_ratio)), sampled_N
    if level != "token":
        unit_of_token_N, counted = call_of_token_N, sampled_C > 0
        log_ratio = torch.zeros(len(lengths_C), dtype=torch.float64).index_add(0, call_of_token_N, log_ratio)
        if level == "geometric":
            log_ratio = log_ratio / sampled_C.clamp(min=1)
    ratio = log_ratio.clamp(-LARGEST, LARGEST).exp()
    log_cap = math.log(cap)
    capped = log_ratio > log_cap if mode == "truncate" else log_ratio.abs() > log_cap
    weights = torch.where(capped, cap if mode == "truncate" else 0.0, ratio)
    # last: a veto also removes what is within the cap
    weights = torch.where(vetoed_C[call_of_token_N] if level == "token" else vetoed_C, 0.0, weights)
    weights_N = (weights[unit_of_token_N] * sampled_N).float()
    metrics = _metrics(ratio[counted], weights[counted], capped[counted])
    if veto is not None and metrics:
        metrics["importance/vetoed"] = vetoed_C[sampled_C > 0].double().mean().item()
    return list(weights_N.split(sizes)), metrics


def _metrics(ratio: Tensor, weights: Tensor, capped: Tensor) -> dict[str, float]:
    if not len(ratio):
        return {}
    squares = (weights**2).sum()
    return {
        "importance/mean": weights.mean().item(),
        "importance/min": ratio.min().item(),
        "importance/max": ratio.max().item(),
        "importance/capped": capped.double().mean().item(),
        "importance/ess": (weights.sum() ** 2 / (len(weights) * squares)).item() if squares > 0 else 0.0,
    }
