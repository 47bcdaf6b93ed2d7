"""The assignment of policies to pools of devices.

Invariant: pure. Policies in one pool share its devices and take turns; policies in different pools may run at the same
time. `recipe.dag.policy.placement` reserves the devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The devices of one pool and the policies on it."""

    processes_on_nodes: tuple[int, ...]
    policies: tuple[str, ...]

    def slots(self, platform: str) -> int:
        """Return the number of CPUs that Ray reserves per device, which is also the number of parts of a cut GPU."""
        # a policy needs one part for its trainer or, if frozen, for its server's placeholder. Without GPUs nothing is
        # cut, and an actor holds a CPU only while Ray places it.
        return 1 if platform == "cpu" else 2 * len(self.policies) + 1

    def groups(self, platform: str) -> tuple[int, ...]:
        """Return the sizes of the process groups that Ray places on one node each: without GPUs, of one process."""
        return (1,) * len(self.processes_on_nodes) if platform == "cpu" else self.processes_on_nodes


def plan_pools(workflow: Workflow, *, nnodes: int, n_gpus_per_node: int) -> tuple[PoolSpec, ...]:
    """Give each policy with `gpus` its own pool, and the remaining GPUs to all other policies together, except those
    behind an API, which need none, and adapters, which are on those of their base.

    Raises UserError if there are too few GPUs, or if a policy has its own on a run of several nodes."""
    local = {name: workflow.policies[name] for name in workflow.local_policies()}
    own = {name: policy.gpus for name, policy in local.items() if policy.gpus}
    shared = tuple(name for name in local if name not in own)
    total, taken = nnodes * n_gpus_per_node, sum(own.values())
    if nnodes > 1 and own:
        raise UserError("policies.*.gpus: policies with their own GPUs need a run on one node (trainer.nnodes=1)")
    if taken > total or (shared and taken >= total):
        needed = taken + (1 if shared else 0)
        raise UserError(
            f"the policies need at least {needed} GPUs and the run has {total}: lower policies.*.gpus, "
            "or raise trainer.n_gpus_per_node"
        )
    pools = [PoolSpec((gpus,), (name,)) for name, gpus in own.items()]
    if shared:
        pools.append(PoolSpec((n_gpus_per_node,) * nnodes if not own else (total - taken,), shared))
    return tuple(pools)
