"""The computation of each model node on a policy's rows, through verl's worker calls.

Invariant: a kernel blocks its thread and uses one policy. Metadata is set before every call, because verl removes it
while it runs. A batch is a nested TensorDict of jagged tensors, so rows contain no padding tokens; a padding row is one
token with mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import response_from_nested

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.core.tensors import as_tensor
from recipe.dag.policy.jagged import make
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.train.metrics import on_policy_metrics
from recipe.dag.train.packing import PAD, end_to_end, layout, scatter_back
from recipe.dag.train.throughput import Pass, measured
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Critic

CRITIC_METRICS = {
    "critic/vf_loss": "loss",  # verl's own `loss` is the same number
    "critic/vf_clipfrac": "clip_fraction",
    "critic/vpred_mean": "prediction_mean",
}
"""verl's metric names -> ours."""


@dataclass(slots=True)
class PolicyBatch:
    """One policy's rows in one step, and what the training nodes compute for them."""

    rows: list[Row]
    order: list[int] = field(default_factory=list)
    """Layout of the rows in `data` (`packing.layout`)."""
    mini_batches: int = 1
    data: TensorDict | None = None
    """None until `prepare` or `prepare_critic` has built it."""
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Per-token tensors in row order: old_log_probs, ref_log_prob, entropy, values, advantages, returns, and
    rollout_is_weights, by which verl's losses multiply."""
    agent_weights: dict[str, float] | None = None
    """By which the advantages of each agent are multiplied, for `agent_weights: equal`."""
    metrics: dict[str, float] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    """Passes over the rows, in the order in which they ran."""

    def tensors(self) -> TensorDict:
        """Return `data` of a batch that is prepared."""
        assert self.data is not None  # a node prepares its batch before it runs a kernel
        return self.data


def prepare(policy: PolicyRuntime, batch: PolicyBatch, algorithm: Algorithm) -> None:
    """Lay the rows out for the actor and build the TensorDict."""
    _prepare(policy, batch, algorithm.mini_batches, policy.config.actor_rollout_ref.actor)


def prepare_critic(policy: PolicyRuntime, batch: PolicyBatch, critic: Critic) -> None:
    """Lay the rows out for the policy's critic and build the TensorDict."""
    _prepare(policy, batch, critic.mini_batches, policy.config.critic)


def _prepare(policy: PolicyRuntime, batch: PolicyBatch, mini_batches: int, model: DictConfig) -> None:
    members = range(len(batch.rows))
    batch.order, batch.mini_batches = _layout(policy, batch.rows, members, mini_batches, model)
    batch.data = to_tensordict(batch.rows, batch.order, pad_token_id=_pad(policy))


def _layout(
    policy: PolicyRuntime,
    rows: list[Row],
    members: Sequence[int],
    mini_batches: int,
    model: DictConfig,
    shuffle: str | None = None,
) -> tuple[list[int], int]:
    """Return `layout` of the rows at the indices `members`, as indices into `rows`."""
    order, mini_batches = layout(
        [len(rows[i].prompt_ids) + len(rows[i].response_ids) for i in members],
        ranks=policy.data_parallel_size,
        mini_batches=mini_batches,
        micro_batch=1 if model.use_dynamic_bsz else model.ppo_micro_batch_size_per_gpu,
        shuffle=shuffle,
    )
    return [PAD if i == PAD else members[i] for i in order], mini_batches


def _pad(policy: PolicyRuntime) -> int:
    pad = policy.tokenizer.pad_token_id
    return pad if pad is not None else 0


def _forward(batch: PolicyBatch, call, kind: str, *, entropy: bool) -> TensorDict:
    data = batch.tensors()
    tu.assign_non_tensor(data, calculate_entropy=entropy, compute_loss=False)
    with measured(batch.passes, kind, batch.rows):
        return call(data)


def _rows_of(batch: PolicyBatch, output: torch.Tensor) -> list[torch.Tensor]:
    nested = response_from_nested(output, batch.tensors()["response_mask"])
    return scatter_back([value.float() for value in nested.unbind()], batch.order, len(batch.rows))


def old_log_probs(policy: PolicyRuntime, batch: PolicyBatch) -> None:
    """Compute the policy's log-probs and entropies of its rows, before any update."""
    output = _forward(batch, policy.workers.compute_log_prob, "log_prob", entropy=True)
    batch.columns["old_log_probs"] = _rows_of(batch, output["log_probs"])
    batch.columns["entropy"] = _rows_of(batch, output["entropy"])


def log_probs(policy: PolicyRuntime, batch: PolicyBatch) -> list[torch.Tensor]:
    """Return the policy's current log-probs of its rows, one tensor per row."""
    return _rows_of(batch, _forward(batch, policy.workers.compute_log_prob, "log_prob", entropy=False)["log_probs"])


def reference_log_probs(policy: PolicyRuntime, batch: PolicyBatch) -> None:
    """Compute the log-probs of the policy's reference."""
    output = _forward(batch, policy.workers.compute_ref_log_prob, "reference", entropy=False)
    batch.columns["ref_log_prob"] = _rows_of(batch, output["log_probs"])


def values(policy: PolicyRuntime, batch: PolicyBatch) -> None:
    """Compute the values that the policy's critic predicts before each response token."""
    output = _forward(batch, policy.workers.compute_values, "values", entropy=False)
    batch.columns["values"] = _rows_of(batch, output["values"])


def update_critic(policy: PolicyRuntime, batch: PolicyBatch, critic: Critic, *, seed: int) -> None:
    """Update the critic in `epochs` passes over the rows of `mini_batches` optimizer steps each."""
    data = _passes(policy, batch, ("values", "returns"), policy.config.critic, epochs=critic.epochs, seed=seed)
    _assign_update(data, calculate_entropy=False)
    with measured(batch.passes, "critic_update", batch.rows, epochs=critic.epochs):
        output = policy.workers.update_critic(data)
        metrics = reduce_metrics(tu.get(output, "metrics"))
    batch.metrics |= {
        CRITIC_METRICS.get(name, name): float(value)
        for name, value in metrics.items()
        if name not in ("loss", "mfu") and not name.startswith("perf/")
    }


def update_actor(
    policy: PolicyRuntime, batch: PolicyBatch, algorithm: Algorithm, *, seed: int, more_follow: bool = False
) -> None:
    """Update the actor in `epochs` passes over the rows of `mini_batches` optimizer steps each, without the calls that
    the loss leaves out. If it leaves out all calls, do nothing. `more_follow`: other updates of the step come after
    this one, so that the learning rate stays."""
    calls = [call.learns for row in batch.rows for call in row.calls]
    if not all(calls):
        batch.metrics["outside_loss"] = 1.0 - sum(calls) / len(calls)
    if not any(calls):
        return
    names = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
    model = policy.config.actor_rollout_ref.actor
    data = _passes(policy, batch, names, model, epochs=algorithm.epochs, seed=seed, masked=not all(calls))
    _assign_update(data, calculate_entropy=algorithm.entropy_coef != 0 or "old_log_probs" not in batch.columns)
    if more_follow:
        tu.assign_non_tensor(data, more_follow=True)
    learned = [row for row in batch.rows if row.learns]
    with measured(batch.passes, "update", learned, epochs=algorithm.epochs):
        output = policy.workers.update_actor(data)
        metrics = reduce_metrics(tu.get(output, "metrics"))
    batch.metrics |= on_policy_metrics(metrics)
    for name, value in metrics.items():
        if name != "mfu":  # verl computes it per mini-batch and for any device; see throughput.py for ours
            batch.metrics[name.removeprefix("actor/")] = float(value)


def _passes(
    policy: PolicyRuntime,
    batch: PolicyBatch,
    names: Sequence[str],
    model: DictConfig,
    *,
    epochs: int,
    seed: int,
    masked: bool = False,
) -> TensorDict:
    """Return the rows with the columns `names`, and with verl's settings for passing over them.

    The first epoch has the mini-batches of the forward passes; each later epoch deals the rows out again, so that no
    two rows always share an optimizer step. verl can only repeat identical data, so the epochs are then concatenated,
    which sends `epochs` copies of the rows to the workers. With `masked`, calls that the loss leaves out have mask 0
    and count in no divisor, and rows that consist of such calls only are dropped."""
    rows, data, order, mini_batches = batch.rows, batch.tensors(), batch.order, batch.mini_batches
    members = [i for i, row in enumerate(rows) if not masked or row.learns]
    if masked:
        order, mini_batches = _layout(policy, rows, members, mini_batches, model)
    copies = epochs if mini_batches > 1 else 1  # a single mini-batch is the same in every epoch: verl may repeat it
    later_epochs = [_layout(policy, rows, members, mini_batches, model, f"{seed} {e}")[0] for e in range(1, copies)]
    if later_epochs:
        order = end_to_end([order, *later_epochs], policy.data_parallel_size)
    if masked or later_epochs:
        data = to_tensordict(rows, order, pad_token_id=_pad(policy), masked=masked)
    for name in names:
        if name in batch.columns:
            _add_column(data, name, batch.columns[name], order)
    calls = sum(call.learns or not masked for i in members for call in rows[i].calls)
    tu.assign_non_tensor(
        data,
        global_batch_size=calls / mini_batches,
        num_mini_batch=mini_batches * copies,
        epochs=epochs // copies,
        seed=seed,
    )
    return data


def _assign_update(data: TensorDict, *, calculate_entropy: bool) -> None:
    tu.assign_non_tensor(
        data,
        calculate_entropy=calculate_entropy,
        compute_loss=True,
        distillation_use_topk=False,
        distillation_only=False,
        dataloader_kwargs={"shuffle": False},
    )


def _nested(values: list[torch.Tensor]) -> torch.Tensor:
    # not torch's functions for lists: they check each row, and rows of equal length would become dense
    lengths = [len(value) for value in values]
    return make(torch.cat(values), torch.tensor([0, *accumulate(lengths)]), (min(lengths), max(lengths)))


def to_tensordict(rows: list[Row], order: list[int], *, pad_token_id: int, masked: bool = False) -> TensorDict:
    """Return response_mask, loss_mask, input_ids, position_ids and rollout_log_probs of the rows in `order`, where PAD
    is a padding row.

    With `masked`, both masks are 0 over calls that the loss leaves out."""
    columns: dict[str, list[torch.Tensor]] = {}
    temperatures = []
    for index in order:
        row = rows[index] if index != PAD else None
        prompt_ids, response_ids = (row.prompt_ids, row.response_ids) if row else ([pad_token_id], [pad_token_id])
        ids = as_tensor([*prompt_ids, *response_ids], np.int64)
        mask = as_tensor((row.loss_mask() if masked else row.response_mask) if row else [0], np.int64)
        fields = {
            "response_mask": mask,
            "loss_mask": mask,
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "rollout_log_probs": as_tensor(row.rollout_log_probs if row else [0.0], np.float32),
        }
        for name, value in fields.items():
            columns.setdefault(name, []).append(value)
        # greedy rows are trained at temperature 1, at which the server computed their log-probs
        temperatures.append((row.temperature or 1.0) if row else None)
    data = TensorDict({name: _nested(values) for name, values in columns.items()}, batch_size=[len(order)])
    different = {temperature for temperature in temperatures if temperature is not None}
    if len(different) == 1:
        tu.assign_non_tensor(data, temperature=float(different.pop()))  # fused kernels take one number for all rows
    else:
        data["temperature"] = torch.tensor([temperature or 1.0 for temperature in temperatures])
    return data


def _add_column(data: TensorDict, name: str, values: list[torch.Tensor], order: list[int]) -> None:
    """Add a per-token column, whose `values` are in row order; padding rows get zeros."""
    data[name] = _nested([values[i] if i != PAD else torch.zeros(1) for i in order])
