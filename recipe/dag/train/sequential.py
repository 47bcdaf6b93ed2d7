"""Sequential updates: each policy's advantages are weighted by the effect of the updates before it (HAPPO,
credit/happo.py).

Invariant: the order of updates is a function of the workflow, the seed and the step. All behaviour log-probs are known
before the first update. The factor of a unit (an episode, or one of its turns if advantages differ by turn) changes
only with the update of a policy that acted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.credit.happo import advance, log_ratio, sampled_mask, update_order, weigh
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.types.row import Row
from recipe.dag.workflow.graph import agents_heard
from recipe.dag.workflow.node import Kind, Node
from recipe.dag.workflow.schema import Workflow


def in_sequence(
    workflow: Workflow, nodes: Sequence[Node], policy_of: Callable[[Node], str], *, seed: int, step: int
) -> tuple[list[Node], list[str]]:
    """Return (the nodes, where each actor update except the first also depends on the previous one; the policies in
    that order). The workflow's algorithm must have `happo`."""
    assert workflow.algorithm.happo is not None  # TrainingStep calls this for HAPPO only
    updates = {policy_of(node): node for node in nodes if node.kind is Kind.UPDATE}
    policies = {agent.name: agent.policy for agent in workflow.agents}
    depends = {
        policies[listener]: [policies[speaker] for speaker in speakers]
        for listener, speakers in agents_heard(workflow.episode_nodes).items()
    }
    order = update_order(list(updates), workflow.algorithm.happo.order, seed=seed, step=step, depends=depends)
    before = {updates[later].id: updates[earlier].id for earlier, later in zip(order, order[1:], strict=False)}
    waiting = [
        node.model_copy(update={"after": (*node.after, before[node.id])}) if node.id in before else node
        for node in nodes
    ]
    return waiting, order


class CompoundFactor:
    """The factor by which the updates so far changed the probability of the messages of each unit.

    Calls that a hook excluded from training do not count. All rounds of a loop belong to their turn."""

    def __init__(self, algorithm: Algorithm, order: Sequence[str]):
        assert algorithm.happo is not None  # TrainingStep makes a factor for HAPPO only
        self.happo, self.last = algorithm.happo, order[-1] if order else None
        self.per_turn = algorithm.advantages_per_turn
        self.log_factor: dict[Hashable, float] = {}

    def weigh(self, batch: PolicyBatch) -> None:
        """Multiply the policy's advantages by the factors, before its update."""
        units = [unit for row in batch.rows for unit in self._units(row)]
        pieces = weigh(self._cut(batch.rows, batch.columns["advantages"]), units, self.log_factor)
        batch.columns["advantages"] = self._join(batch.rows, pieces)
        logs = [self.log_factor.get(unit, 0.0) for unit in dict.fromkeys(units)]
        factors = torch.tensor(logs, dtype=torch.float64).exp()
        batch.metrics |= {
            "happo_factor/mean": factors.mean().item(),
            "happo_factor/std": factors.std(correction=0).item(),
            "happo_factor/min": factors.min().item(),
            "happo_factor/max": factors.max().item(),
        }

    def follow(self, batch: PolicyBatch, log_probs: Sequence[Tensor]) -> None:
        """Multiply the factors by the ratios of the policy's update. `log_probs` are those after the update, one tensor
        per row."""
        ratios = log_ratio(
            self._cut(batch.rows, log_probs),
            self._cut(batch.rows, batch.columns["old_log_probs"]),
            self._cut(batch.rows, [sampled_mask(row.response_mask) for row in batch.rows]),
            [unit for row in batch.rows for unit in self._units(row)],
            level=self.happo.ratio,
            bound=self.happo.bound,
        )
        self.log_factor = advance(self.log_factor, ratios)

    def _units(self, row: Row) -> list[Hashable]:
        """Return the unit of each piece of the row: one per merged call if factors are per turn, else one."""
        if not self.per_turn:
            return [(row.uid, row.episode)]
        return [(row.uid, row.episode, call.turn) for call in row.calls]

    def _cut(self, rows: Sequence[Row], columns: Sequence[Tensor]) -> list[Tensor]:
        """Cut per-token columns into the pieces of their rows, in row order."""
        cuts = [tuple(call.end for call in row.calls[:-1]) if self.per_turn else () for row in rows]
        return [piece for column, at in zip(columns, cuts, strict=True) for piece in column.tensor_split(at)]

    def _join(self, rows: Sequence[Row], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Undo `_cut`."""
        remaining = iter(pieces)
        return [torch.cat([next(remaining) for _ in self._units(row)]) for row in rows]
