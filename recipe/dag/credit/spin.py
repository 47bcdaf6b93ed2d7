"""Preference losses over pairs of calls as advantages (DPO, arXiv 2305.18290; SPIN, arXiv 2401.01335; IPO, arXiv
2310.12036; SPPO, arXiv 2405.00675).

Invariant: let s be a call's log-ratio, the sum of log pi - log pi_ref over its sampled tokens. The loss of a pair is
l(h), h = s(chosen) - s(rejected), and its gradient l'(h) (grad log pi(chosen) - grad log pi(rejected)). At the weights
that s belongs to, the policy gradient with the advantages -l'(h) and l'(h) is therefore that of the loss, however rows
are ordered, merged, padded or distributed. Calls that answer different prompts, calls outside the loss, and calls of
equal returns form no pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import SAME
from recipe.dag.credit.options import check_choice

LOSSES = ("sigmoid", "hinge", "ipo", "sppo")


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of calls."""

    chosen: Tensor
    """[P] int64, index of the call. So is `rejected`."""
    rejected: Tensor
    weight: Tensor
    """[P] float64; the pairs of a group add up to 1."""
    wins: Mapping[int, float]
    """Call -> its win rate over the other calls of its group, where a tie is half a win, for groups that have a
    pair."""

    def calls(self, loss: str) -> list[int]:
        """Return the calls that a loss reads: all of `wins` under sppo, which has no pairs, else those in a pair."""
        return sorted(self.wins if loss == "sppo" else {*self.chosen.tolist(), *self.rejected.tolist()})


def form_pairs(
    batch: CreditBatch, returns: Sequence[float | None], *, group_by: Sequence[str], pairs: str, margin: float
) -> Pairs:
    """Return the pairs of calls whose `returns` [C] differ by more than `margin`. A call without a return is in none.

    pairs: `best_worst`, one pair of each group, of equally good calls the first in the order of the episodes; `all`,
        every two calls of a group
    """
    check_choice("pairs", pairs, ("best_worst", "all"))
    found: list[tuple[int, int, float]] = []
    wins: dict[int, float] = {}
    for group in _groups(batch, returns, group_by):
        worth = {call: value for call in group if (value := returns[call]) is not None}
        two = list(combinations(group, 2))
        if pairs == "best_worst":
            two = [(max(group, key=worth.__getitem__), min(group, key=worth.__getitem__))]
        ordered = [(a, b) if worth[a] > worth[b] else (b, a) for a, b in two]
        apart = [(a, b) for a, b in ordered if _beats(worth[a], worth[b], margin)]
        found += [(a, b, 1 / len(apart)) for a, b in apart]
        if apart:
            wins |= {call: _win_rate(call, worth, margin) for call in group}
    chosen, rejected, weight = zip(*found, strict=True) if found else ((), (), ())
    index = torch.tensor([chosen, rejected], dtype=torch.int64)
    return Pairs(index[0], index[1], torch.tensor(weight, dtype=torch.float64), wins)


def loss_and_slope(h: Tensor, *, loss: str, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (l(h), -l'(h)) for each h, both [P]."""
    match loss:
        case "sigmoid":
            right, wrong = 1 - label_smoothing, label_smoothing
            value = -right * logsigmoid(beta * h) - wrong * logsigmoid(-beta * h)
            return value, beta * (right * torch.sigmoid(-beta * h) - wrong * torch.sigmoid(beta * h))
        case "hinge":
            return torch.relu(1 - beta * h), beta * (beta * h < 1).to(h.dtype)
        case "ipo":
            distance = 1 / (2 * beta) - h
            return distance.square(), 2 * distance
    raise ValueError(f"loss: {loss!r} is not one of {', '.join(LOSSES[:3])}")


def spin(
    batch: CreditBatch, pairs: Pairs, *, loss: str, beta: float, label_smoothing: float, sft_coef: float
) -> Tensor:
    """Return [C] float64: the advantage of each call, 0 for those that the loss does not read.

    They are scaled so that the sum over the tokens, divided by the number of calls that are read (`loss_agg:
    seq-mean-token-sum`), is the mean loss of the groups, or for `sppo` that of the calls. `sft_coef` adds the mean
    negative log-prob per token of the chosen calls.
    """
    check_choice("loss", loss, LOSSES)
    advantages, read = torch.zeros(len(batch.uid), dtype=torch.float64), pairs.calls(loss)
    if not read:
        return advantages
    ratios = log_ratios(batch)
    if loss == "sppo":
        index, rates = torch.tensor(read), torch.tensor([pairs.wins[call] for call in read], dtype=torch.float64)
        advantages[index] = 2 * ((rates - 0.5) / beta - ratios[index])
    else:
        h = ratios[pairs.chosen] - ratios[pairs.rejected]
        _, slope = loss_and_slope(h, loss=loss, beta=beta, label_smoothing=label_smoothing)
        slope = slope * pairs.weight * len(read) / pairs.weight.sum()
        advantages.index_add_(0, pairs.chosen, slope).index_add_(0, pairs.rejected, -slope)
    if sft_coef:
        chosen = pairs.chosen.unique()
        advantages[chosen] += sft_coef * len(read) / (len(chosen) * batch.sampled()[chosen])
    return advantages


def pair_metrics(
    batch: CreditBatch, pairs: Pairs, *, loss: str, beta: float, label_smoothing: float
) -> dict[str, float]:
    """Return the mean loss, and how pairs compare under the policy; {} without a pair."""
    if not len(pairs.chosen):
        return {}
    ratios, lengths = log_ratios(batch), batch.sampled().double()
    h, weight = ratios[pairs.chosen] - ratios[pairs.rejected], pairs.weight / pairs.weight.sum()
    if loss == "sppo":
        target = torch.tensor([(rate - 0.5) / beta for rate in pairs.wins.values()], dtype=torch.float64)
        value = (ratios[list(pairs.wins)] - target).square().mean()
    else:
        value = (weight * loss_and_slope(h, loss=loss, beta=beta, label_smoothing=label_smoothing)[0]).sum()
    means = {
        "accuracy": (h > 0).double(),
        "margin": h,
        "chosen_log_ratio": ratios[pairs.chosen],
        "rejected_log_ratio": ratios[pairs.rejected],
        "chosen_length": lengths[pairs.chosen],
        "rejected_length": lengths[pairs.rejected],
    }
    metrics = {"loss": value, "pairs": torch.tensor(float(len(h)))}
    metrics |= {name: (weight * values).sum() for name, values in means.items()}
    return {f"spin/{name}": metric.item() for name, metric in metrics.items()}


def log_ratios(batch: CreditBatch) -> Tensor:
    """Return [C] float64, the log-ratio of each call. Without log-probs in the batch the policy is its own reference,
    as before the first update, so all are 0."""
    if batch.log_ratios is None:
        return torch.zeros(len(batch.uid), dtype=torch.float64)
    return batch.log_ratios


def _beats(value: float, other: float, margin: float) -> bool:
    return value - other > margin and not math.isclose(value, other, rel_tol=SAME, abs_tol=SAME)


def _win_rate(call: int, worth: Mapping[int, float], margin: float) -> float:
    own, others = worth[call], [value for other, value in worth.items() if other != call]
    wins = sum(_beats(own, value, margin) - _beats(value, own, margin) for value in others)
    return 0.5 + 0.5 * wins / len(others)


def _groups(batch: CreditBatch, returns: Sequence[float | None], group_by: Sequence[str]) -> Iterator[list[int]]:
    """Yield the calls of each group that are in the loss and have a return, at least two, in the order of the
    episodes."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    columns = [getattr(batch, key) for key in group_by]
    sampled = batch.sampled().tolist()
    for call, value in enumerate(returns):
        if value is not None and batch.in_loss[call] and sampled[call]:
            # a candidate's score is compared with scores alone
            is_candidate = batch.candidate[call] is not None
            groups[is_candidate, *(column[call] for column in columns)].append(call)
    for calls in groups.values():
        if len(calls) > 1:
            yield sorted(calls, key=lambda call: (batch.episode[call], batch.position[call]))
