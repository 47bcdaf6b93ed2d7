"""Policies that learn one after the other, each from what the updates before it did (HAPPO, credit/happo.py).

Invariant: the order is a function of the workflow, the seed and the step. All behaviour log-probs are known before the
first update; an episode's factor changes only by the update of a policy that said something in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from recipe.dag.credit.happo import advance, log_ratio, sampled_mask, update_order, weigh
from recipe.dag.episode.row import Row
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.workflow.graph import agents_heard
from recipe.dag.workflow.schema import Happo, Node, NodeRole, Workflow


def in_sequence(
    workflow: Workflow, nodes: Sequence[Node], policy_of: Callable[[Node], str], *, seed: int, step: int
) -> tuple[list[Node], list[str]]:
    """(`nodes` with every actor update but the first also waiting for the one before it, the policies in that
    order)."""
    updates = {
        policy_of(node): node for node in nodes if node.node_role is NodeRole.ACTOR and not node.only_forward_compute
    }
    agents, heard = workflow.agents, agents_heard(workflow.episode_nodes)
    depends = {agents[one].policy: [agents[other].policy for other in others] for one, others in heard.items()}
    order = update_order(list(updates), workflow.algorithm.happo.order, seed=seed, step=step, depends=depends)
    before = {
        updates[later].node_id: updates[earlier].node_id for earlier, later in zip(order, order[1:], strict=False)
    }
    waiting = [
        node.model_copy(update={"dependencies": (*node.dependencies, before[node.node_id])})
        if node.node_id in before
        else node
        for node in nodes
    ]
    return waiting, order


class CompoundFactor:
    """What the updates so far did to the probability of what was said in each episode, but for calls that a hook took
    out of training."""

    def __init__(self, happo: Happo, order: Sequence[str]):
        self.happo, self.last = happo, order[-1] if order else None
        self.log_factor: dict[Hashable, float] = {}

    def weigh(self, batch: PolicyBatch) -> None:
        """Multiply the policy's advantages, before its update."""
        episodes = [_episode(row) for row in batch.rows]
        batch.columns["advantages"] = weigh(batch.columns["advantages"], episodes, self.log_factor)
        factors = torch.tensor([self.log_factor.get(name, 0.0) for name in set(episodes)], dtype=torch.float64).exp()
        batch.metrics |= {
            "happo_factor/mean": factors.mean().item(),
            "happo_factor/min": factors.min().item(),
            "happo_factor/max": factors.max().item(),
        }

    def follow(self, batch: PolicyBatch, log_probs: Sequence[torch.Tensor]) -> None:
        """Take in what the policy's update did; `log_probs` are those after it, one tensor per row."""
        ratios = log_ratio(
            log_probs,
            batch.columns["old_log_probs"],
            [sampled_mask(row.response_mask) for row in batch.rows],
            [_episode(row) for row in batch.rows],
            level=self.happo.ratio,
            bound=self.happo.bound,
        )
        self.log_factor = advance(self.log_factor, ratios)


def _episode(row: Row) -> Hashable:
    return row.uid, row.episode
