"""The order in which the training nodes of a step run.

Invariant: a node starts only after its dependencies have finished, and what may run at the same time does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from graphlib import TopologicalSorter

from recipe.dag.workflow.node import Node


async def run_nodes(nodes: Sequence[Node], execute: Callable[[Node], Awaitable[None]]) -> None:
    """Run each node as soon as its dependencies have finished. Dependencies that are not in `nodes` count as met; the
    first failure cancels the remaining nodes and is raised."""
    by_id = {node.id: node for node in nodes}
    sorter = TopologicalSorter({n.id: [d for d in n.after if d in by_id] for n in nodes})
    sorter.prepare()
    running: dict[asyncio.Task, str] = {}
    try:
        while sorter.is_active():
            for node_id in sorter.get_ready():
                running[asyncio.ensure_future(execute(by_id[node_id]))] = node_id
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                node_id = running.pop(task)
                task.result()
                sorter.done(node_id)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
