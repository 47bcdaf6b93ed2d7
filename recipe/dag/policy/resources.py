"""Whether a run fits the machines that it is to run on.

Invariant: Ray waits without end and without a word for GPUs and CPUs that do not exist, so nothing is asked of it that
`check_resources` has not compared with what there is. Pure: nodes come in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recipe.dag.errors import UserError
from recipe.dag.policy.placement import Share

SERVICES = 1
"""CPUs on a node beside the pools: verl's load balancers and SGLang's servers hold one while Ray places them."""


@dataclass(frozen=True, slots=True)
class Node:
    """The free resources of one machine of a Ray cluster."""

    cpus: float
    gpus: float = 0.0


def cpus_needed(shares: Sequence[Share], platform: str) -> int:
    """Return the CPUs that a run asks of Ray where all of it is on one node."""
    return sum(sum(share.groups(platform)) * share.slots(platform) for share in shares) + SERVICES


def check_resources(
    shares: Sequence[Share], nodes: Sequence[Node], platform: str, *, where: str, more_cpus: str
) -> None:
    """Raise UserError where Ray could not place the pools of a run on `nodes`.

    `where` names the nodes in the message; `more_cpus` says how to give Ray more CPUs.
    """
    groups = [
        Node(cpus=count * share.slots(platform), gpus=0 if platform == "cpu" else count)
        for share in shares
        for count in share.groups(platform)
    ]
    if _fit(groups, list(nodes)):
        return
    if not _fit([Node(0, group.gpus) for group in groups], [Node(math.inf, node.gpus) for node in nodes]):
        raise UserError(
            f"the run asks for {_listed(group.gpus for group in groups)} GPUs (each number on one machine), and "
            f"{where} has {_listed(node.gpus for node in nodes)} free: lower trainer.n_gpus_per_node, "
            "trainer.nnodes or policies.*.gpus, or run it where there are more"
        )
    raise UserError(
        f"the run asks Ray for {_listed(group.cpus for group in groups)} CPUs (each number on one machine) and "
        f"{SERVICES} more, and {where} has {_listed(node.cpus for node in nodes)} free: {more_cpus} (the number is for "
        "Ray's bookkeeping; the processes take turns on the cores)"
    )


def _fit(groups: list[Node], nodes: list[Node]) -> bool:
    """Whether each group finds a node; tries all ways, of which there are few."""
    if not groups:
        # of all nodes together, since services go where there is room
        return not nodes or sum(node.cpus for node in nodes) >= SERVICES
    first, rest = groups[0], groups[1:]
    for index, node in enumerate(nodes):
        if node in nodes[:index] or node.gpus < first.gpus or node.cpus < first.cpus:
            continue
        left = Node(node.cpus - first.cpus, node.gpus - first.gpus)
        if _fit(rest, [*nodes[:index], left, *nodes[index + 1 :]]):
            return True
    return False


def _listed(numbers: Iterable[float]) -> str:
    return " + ".join(f"{number:g}" for number in numbers) or "none"
