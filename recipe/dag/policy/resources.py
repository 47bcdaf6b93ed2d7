"""Check that a run fits on its machines.

Invariant: Ray waits forever and silently for GPUs and CPUs that do not exist, so `check_resources` compares every
request with what is free before Ray sees it. Pure: nodes are passed in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recipe.dag.core.errors import UserError
from recipe.dag.settings.pools import PoolSpec

SERVICES = 1
"""CPUs needed besides the pools: verl's load balancers and SGLang's servers hold one while Ray places them."""


@dataclass(frozen=True, slots=True)
class Node:
    """The free resources of one machine of a Ray cluster."""

    cpus: float
    gpus: float = 0.0


def cpus_needed(pools: Sequence[PoolSpec], platform: str) -> int:
    """Return the number of CPUs that a run on one node requests from Ray."""
    return sum(sum(pool.groups(platform)) * pool.slots(platform) for pool in pools) + SERVICES


def check_resources(
    pools: Sequence[PoolSpec], nodes: Sequence[Node], platform: str, *, where: str, more_cpus: str
) -> None:
    """Raise UserError if Ray cannot place the pools of a run on `nodes`.

    `where` names the nodes in the message; `more_cpus` is the advice for too few CPUs.
    """
    groups = [
        Node(cpus=count * pool.slots(platform), gpus=0 if platform == "cpu" else count)
        for pool in pools
        for count in pool.groups(platform)
    ]
    if _fit(groups, list(nodes)):
        return
    if not _fit([Node(0, group.gpus) for group in groups], [Node(math.inf, node.gpus) for node in nodes]):
        raise UserError(
            f"the run needs {_needed([group.gpus for group in groups], 'GPU')}, and "
            f"{where} has {_listed(node.gpus for node in nodes)} free: lower trainer.n_gpus_per_node, "
            "trainer.nnodes or policies.*.gpus, or use a machine with more GPUs"
        )
    raise UserError(
        f"the run needs {_needed([group.cpus for group in groups], 'Ray CPU')} and "
        f"{SERVICES} more, and {where} has {_listed(node.cpus for node in nodes)} free: {more_cpus} (Ray only "
        "counts them; the processes share the real cores)"
    )


def _fit(groups: list[Node], nodes: list[Node]) -> bool:
    """Return True if each group fits on a node. Tries every assignment; there are few."""
    if not groups:
        # all nodes together: Ray may place the services anywhere
        return not nodes or sum(node.cpus for node in nodes) >= SERVICES
    first, rest = groups[0], groups[1:]
    for index, node in enumerate(nodes):
        # a node equal to an earlier one would only repeat its search
        if node in nodes[:index] or node.gpus < first.gpus or node.cpus < first.cpus:
            continue
        remaining = Node(node.cpus - first.cpus, node.gpus - first.gpus)
        if _fit(rest, [*nodes[:index], remaining, *nodes[index + 1 :]]):
            return True
    return False


def _listed(numbers: Iterable[float]) -> str:
    return " + ".join(f"{number:g}" for number in numbers) or "none"


def _needed(numbers: Sequence[float], noun: str) -> str:
    return f"{_listed(numbers)} {noun}{'s' * (numbers != [1])} (each number on one machine)"
