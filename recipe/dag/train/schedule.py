"""The order in which the training nodes of a step run.

Invariant: a node starts only after its dependencies have finished, and what may run at the same time does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from graphlib import TopologicalSorter

from recipe.dag.core.tasks import Work, unfold
from recipe.dag.workflow.node import Node


async def run_nodes(nodes: Sequence[Node], execute: Callable[[Node], Awaitable[None]]) -> None:
    """Run each node as soon as its dependencies have finished. Dependencies that are not in `nodes` count as met; the
    first failure cancels the remaining nodes and is raised."""
    by_id = {node.id: node for node in nodes}
    sorter = TopologicalSorter({n.id: [d for d in n.after if d in by_id] for n in nodes})
    sorter.prepare()

    def ready() -> list[Work]:
        return [partial(run, node_id) for node_id in sorter.get_ready()]

    async def run(node_id: str) -> list[Work]:
        await execute(by_id[node_id])
        sorter.done(node_id)
        return ready()

    await unfold(ready())
