from __future__ import annotations

import asyncio
from graphlib import CycleError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.train.schedule import run_nodes
from recipe.dag.workflow.node import Node


def node(node_id: str, *dependencies: str) -> Node:
    return Node(id=node_id, compute="f.py:f", after=dependencies)


@given(st.lists(st.sets(st.integers(0, 9), max_size=4), min_size=1, max_size=10), st.randoms())
def test_a_node_runs_once_after_all_it_depends_on(edges, random):
    nodes = [node(str(i), *(str(j) for j in sorted(before) if j < i)) for i, before in enumerate(edges)]
    random.shuffle(nodes)
    ended: list[str] = []

    async def execute(one: Node) -> None:
        assert set(one.after) <= set(ended)
        for _ in range(random.randrange(3)):
            await asyncio.sleep(0)
        ended.append(one.id)

    asyncio.run(run_nodes(nodes, execute))
    assert sorted(ended) == sorted(one.id for one in nodes)


def test_nodes_that_do_not_need_each_other_run_at_the_same_time():
    async def main() -> None:
        together = asyncio.Barrier(3)  # passes only if all three run at the same time

        async def execute(one: Node) -> None:
            if one.id in ("slow", "other", "after_quick"):
                await asyncio.wait_for(together.wait(), 30)

        await run_nodes([node("quick"), node("slow"), node("other"), node("after_quick", "quick")], execute)

    asyncio.run(main())


def test_dependencies_outside_the_list_count_as_met():
    ran = []

    async def execute(one: Node) -> None:
        ran.append(one.id)

    asyncio.run(run_nodes([node("update", "reward", "old")], execute))
    assert ran == ["update"]


def test_a_failure_cancels_the_rest_and_is_raised():
    seen: list[str] = []

    async def main() -> None:
        started = asyncio.Event()

        async def execute(one: Node) -> None:
            if one.id == "bad":
                await started.wait()
                raise RuntimeError("out of memory")
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(f"{one.id} cancelled")
                raise

        with pytest.raises(RuntimeError, match="out of memory"):
            await run_nodes([node("bad"), node("long"), node("later", "bad")], execute)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert seen == ["long cancelled"]


def test_cancelling_the_run_cancels_its_nodes():
    async def main() -> None:
        started = asyncio.Event()

        async def execute(one: Node) -> None:
            started.set()
            await asyncio.Event().wait()

        run = asyncio.create_task(run_nodes([node("a")], execute))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_cycle_is_refused_and_no_nodes_are_no_work():
    async def execute(one: Node) -> None:
        raise AssertionError

    asyncio.run(run_nodes([], execute))
    with pytest.raises(CycleError):
        asyncio.run(run_nodes([node("a", "b"), node("b", "a")], execute))
