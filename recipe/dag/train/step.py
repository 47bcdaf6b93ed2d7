"""The training half of a step: rows in, updated policies out.

Invariant: nodes run in the workflow's order, policies of one pool in turn, policies of different pools at the same
time. All forward passes over old weights precede the first update of any policy (the workflow's dependencies say so).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import torch

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.estimator import estimate
from recipe.dag.credit.group import zero_variance
from recipe.dag.episode.row import Row
from recipe.dag.errors import UserError
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.metrics import token_metrics
from recipe.dag.train.schedule import run_nodes
from recipe.dag.workflow.schema import Algorithm, Node, NodeRole, Workflow


def split_by_policy(rows: list[Row], workflow: Workflow) -> dict[str, list[Row]]:
    """Rows of each trained policy, in order; frozen policies' rows are not trained on."""
    split: dict[str, list[Row]] = {name: [] for name in workflow.trained_policies()}
    for row in rows:
        if row.policy in split:
            split[row.policy].append(row)
    return split


def keep_informative(rows: list[Row], algorithm: Algorithm) -> list[Row]:
    """Without the rows whose group has one reward only, where the algorithm says so."""
    if not algorithm.drop_zero_variance or not rows:
        return rows
    flat = zero_variance(CreditBatch.from_rows(rows), group_by=algorithm.group_by, stat_unit=algorithm.stat_unit)
    return [row for row, is_flat in zip(rows, flat, strict=True) if not is_flat]


class TrainingStep:
    """Runs the training nodes of one step. Policies without rows in this step are left as they are."""

    def __init__(self, workflow: Workflow, policies: dict[str, PolicyRuntime], rows: list[Row], *, seed: int):
        self.workflow, self.policies, self.seed = workflow, policies, seed
        split = {
            name: keep_informative(mine, workflow.algorithm) for name, mine in split_by_policy(rows, workflow).items()
        }
        self.batches = {name: PolicyBatch(mine) for name, mine in split.items() if mine}
        self.timing: dict[str, float] = {}

    async def run(self) -> None:
        nodes = [node for node in self.workflow.training_nodes if self._policy_of(node) in self.batches]
        await run_nodes(nodes, self._execute)

    def _policy_of(self, node: Node) -> str:
        return node.policy or self.workflow.agent_of(node).policy

    async def _execute(self, node: Node) -> None:
        name = self._policy_of(node)
        policy, batch = self.policies[name], self.batches[name]
        async with policy.pool.lock:
            started = time.monotonic()
            await asyncio.to_thread(self._kernel(node), policy, batch)
            self.timing[node.node_id] = time.monotonic() - started

    def _kernel(self, node: Node) -> Callable[[PolicyRuntime, PolicyBatch], None]:
        if node.node_role == NodeRole.ADVANTAGE:
            return self._advantage
        if node.node_role == NodeRole.REFERENCE:
            return self._reference
        if node.node_role == NodeRole.ACTOR:
            return self._old_log_probs if node.only_forward_compute else self._update
        raise UserError(f"node {node.node_id}: {node.node_role} nodes cannot be trained")

    def _prepare(self, policy: PolicyRuntime, batch: PolicyBatch) -> None:
        if batch.data is None:
            kernels.prepare(policy, batch, self.workflow.algorithm)

    def _old_log_probs(self, policy: PolicyRuntime, batch: PolicyBatch) -> None:
        self._prepare(policy, batch)
        kernels.old_log_probs(policy, batch)

    def _reference(self, policy: PolicyRuntime, batch: PolicyBatch) -> None:
        self._prepare(policy, batch)
        kernels.reference_log_probs(policy, batch)

    def _advantage(self, policy: PolicyRuntime, batch: PolicyBatch) -> None:
        algorithm = self.workflow.algorithm
        advantages, returns = estimate(algorithm.estimator, batch.rows, algorithm)
        batch.columns |= {"advantages": advantages, "returns": returns}

    def _update(self, policy: PolicyRuntime, batch: PolicyBatch) -> None:
        self._prepare(policy, batch)
        if "old_log_probs" not in batch.columns:
            batch.columns["old_log_probs"] = [torch.tensor(row.rollout_log_probs) for row in batch.rows]
        kernels.update_actor(policy, batch, self.workflow.algorithm, seed=self.seed)

    def metrics(self) -> dict[str, float]:
        metrics = {f"timing/{node_id}": seconds for node_id, seconds in self.timing.items()}
        for name, batch in self.batches.items():
            values = batch.metrics | token_metrics(batch.rows, batch.columns)
            metrics |= {f"policy/{name}/{key}": value for key, value in values.items()}
        return metrics
