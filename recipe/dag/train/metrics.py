"""Metrics of one policy's rows that need the trainer's tensors.

Invariant: computed over sampled tokens only (mask 1), on the driver, from tensors that the step has computed already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from recipe.dag.core.tensors import as_tensor
from recipe.dag.policy.losses import SUM, low_variance_kl
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row


def token_metrics(rows: list[Row], columns: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Return counts, entropy, advantages, and the distance of the server's log-probs from the trainer's."""
    # what the data gave says nothing about the policy's samples
    mask = torch.cat([as_tensor(row.response_mask, bool) & (not row.given) for row in rows])
    metrics = {
        "rows": float(len(rows)),
        "trained_tokens": float(sum(sum(row.loss_mask()) for row in rows)),
        "total_tokens": float(sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)),
    }
    if "entropy" in columns:
        metrics["entropy"] = torch.cat(columns["entropy"])[mask].mean().item()
    if "advantages" in columns:
        advantages = torch.cat(columns["advantages"])[mask]
        metrics |= {"advantage/mean": advantages.mean().item(), "advantage/max": advantages.abs().max().item()}
    if "old_log_probs" in columns and "entropy" in columns:  # log-probs without entropy are the server's own
        trainer = torch.cat(columns["old_log_probs"])[mask].double()
        server = torch.cat([as_tensor(row.rollout_log_probs, np.float32) for row in rows])[mask].double()
        metrics |= mismatch(trainer, server)
    if {"ref_log_prob", "old_log_probs"} <= columns.keys():
        log_ratio = torch.cat(columns["ref_log_prob"])[mask] - torch.cat(columns["old_log_probs"])[mask]
        metrics["reference_kl"] = (log_ratio.exp() - 1 - log_ratio).mean().item()
    return metrics


def call_advantages(rows: list[Row], advantages: list[torch.Tensor]) -> dict[tuple[str, int, int], float]:
    """Return the mean advantage of each call's sampled tokens, by (uid, episode, position in `all_calls`).

    `advantages` has one tensor of the response's length per row."""
    means = {}
    for row, values in zip(rows, advantages, strict=True):
        mask = as_tensor(row.response_mask, bool)
        for call, (start, end) in zip(row.calls, row.spans(), strict=True):
            sampled = values[start:end][mask[start:end]]
            if len(sampled):
                means[row.uid, row.episode, call.position] = sampled.double().mean().item()
    return means


TOKEN_COLUMNS = {
    "advantages": "advantage",
    "old_log_probs": "trainer_log_prob",
    "entropy": "entropy",
    "ref_log_prob": "reference_log_prob",
    "values": "value",
    "rollout_is_weights": "importance",
}
"""Columns of a batch that records of calls have on request, and their names there."""


def token_columns(
    rows: list[Row], columns: Mapping[str, list[torch.Tensor]]
) -> Iterator[tuple[tuple[str, int, int], dict[str, torch.Tensor]]]:
    """Yield (uid, episode, position in `all_calls`) of each call, and its part of each of `TOKEN_COLUMNS` that was
    computed, which ends with its response. Log-probs without entropy are the server's own, and left out."""
    names = {column: name for column, name in TOKEN_COLUMNS.items() if column in columns}
    if "entropy" not in columns:
        names.pop("old_log_probs", None)
    for index, row in enumerate(rows):
        for call, (start, end) in zip(row.calls, row.spans(), strict=True):
            parts = {name: columns[column][index][start:end] for column, name in names.items()}
            yield (row.uid, row.episode, call.position), parts


def record_tokens(
    rows: list[Row], columns: Mapping[str, list[torch.Tensor]], episodes: Mapping[tuple[str, int], Episode]
) -> None:
    """Write `token_columns` into the calls of the episodes."""
    for (uid, index, position), parts in token_columns(rows, columns):
        if (episode := episodes.get((uid, index))) is not None:
            call = episode.all_calls[position]
            # a merged call's part of the row begins with what its prompt adds to the calls before
            tail = -len(call.response_ids) or None
            call.token_columns = {
                name: [round(value, 6) for value in part[tail:].tolist()] for name, part in parts.items()
            }


def mismatch(trainer: torch.Tensor, server: torch.Tensor) -> dict[str, float]:
    """Return the distance between two log-prob vectors [N] of the same tokens.

    `server_kl`, in nats per token, estimates KL(server || trainer) on the server's samples by r - 1 - ln r >= 0 (k3,
    joschu.net/blog/kl-approx.html), r = pi_trainer / pi_server."""
    difference = (trainer - server).abs()
    metrics = {"logprob_diff/mean": difference.mean().item(), "logprob_diff/max": difference.max().item()}
    metrics["server_kl"] = low_variance_kl(trainer - server).mean().item()
    if trainer.std() > 0 and server.std() > 0:
        metrics["logprob_pearson"] = torch.corrcoef(torch.stack([trainer, server]))[0, 1].item()
    return metrics


def on_policy_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Remove the sums under the prefix SUM from `metrics`, and return the entropy and the `mismatch` that they encode;
    {} if there are none."""
    sums = {name.removeprefix(SUM): metrics.pop(name) for name in list(metrics) if name.startswith(SUM)}
    if not sums or not sums["tokens"]:
        return {}
    # ranks average their sums, so only ratios of sums are meaningful
    entropy, difference, kl, x, y, xx, yy, xy = (
        sums[name] / sums["tokens"] for name in ("entropy", "difference", "kl", "x", "y", "xx", "yy", "xy")
    )
    values = {"entropy": entropy, "logprob_diff/mean": difference, "logprob_diff/max": sums["most"], "server_kl": kl}
    spread = (xx - x * x) * (yy - y * y)
    if xx - x * x > 0 and yy - y * y > 0:
        values["logprob_pearson"] = (xy - x * y) / spread**0.5
    return values
