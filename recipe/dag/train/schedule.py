"""Run a DAG of nodes: each starts as soon as what it depends on is done.

Invariant: no node starts before all its dependencies have finished; the first failure cancels the rest and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from graphlib import TopologicalSorter

from recipe.dag.workflow.schema import Node


async def run_nodes(nodes: Sequence[Node], execute: Callable[[Node], Awaitable[None]]) -> None:
    """Dependencies on nodes that are not in `nodes` count as met."""
    by_id = {node.node_id: node for node in nodes}
    sorter = TopologicalSorter({n.node_id: [d for d in n.dependencies if d in by_id] for n in nodes})
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
