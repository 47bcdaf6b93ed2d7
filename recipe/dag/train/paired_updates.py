"""Several optimizer steps of a step that learns from pairs of calls.

Invariant: a pair's weight is a function of log-probs of the weights that its optimizer step starts from, so they are
computed anew before each step but the first. The rows of a sample stay together, so no pair is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.packing import PAD, layout
from recipe.dag.types.row import Row

Credit = Callable[[Sequence[Row], Sequence[Tensor]], Sequence[Tensor]]
"""(rows, log-ratios of their tokens) -> the advantages of their tokens."""


def update_in_steps(
    policy: PolicyRuntime, batch: PolicyBatch, algorithm: Algorithm, credit: Credit, *, seed: int
) -> None:
    """Update the actor in `epochs` passes over the samples of `mini_batches` optimizer steps each; the learning rate
    changes after the last one."""
    once = algorithm.model_copy(update={"epochs": 1, "mini_batches": 1})
    steps = list(deal(batch.rows, algorithm, seed=seed))
    reported: dict[str, Metric | list[Any]] = {}
    for number, members in enumerate(steps):
        columns = {name: [values[i] for i in members] for name, values in batch.columns.items() if name != "entropy"}
        part = PolicyBatch([batch.rows[i] for i in members], columns=columns)
        kernels.prepare(policy, part, once)
        if number:
            columns["old_log_probs"] = kernels.log_probs(policy, part)
        log_probs = zip(columns["old_log_probs"], columns["ref_log_prob"], strict=True)
        columns["advantages"] = list(credit(part.rows, [old - reference for old, reference in log_probs]))
        kernels.update_actor(policy, part, once, seed=seed, more_follow=number + 1 < len(steps))
        batch.passes += part.passes
        append_to_dict(reported, part.metrics)
    batch.metrics |= reduce_metrics(reported)


def deal(rows: Sequence[Row], algorithm: Algorithm, *, seed: int) -> Iterator[list[int]]:
    """Yield the indices of the rows of each optimizer step. Later epochs deal the samples out anew."""
    samples: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        samples.setdefault(row.uid, []).append(index)
    members = list(samples.values())
    lengths = [sum(len(rows[i].prompt_ids) + len(rows[i].response_ids) for i in indices) for indices in members]
    for epoch in range(algorithm.epochs):
        shuffle = f"{seed} {epoch}" if epoch else None
        order, count = layout(lengths, ranks=1, mini_batches=algorithm.mini_batches, shuffle=shuffle)
        size = len(order) // count
        for start in range(0, len(order), size):
            yield sorted(i for sample in order[start : start + size] if sample != PAD for i in members[sample])
