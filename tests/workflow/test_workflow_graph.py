from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.workflow.graph import (
    ancestors,
    find_cycle,
    find_cycles,
    levels,
    sinks,
    topological_order,
    with_whole_loops,
)

NAMES = [f"n{index}" for index in range(9)]


@st.composite
def acyclic(draw):
    """A graph whose file order is a shuffle of an order in which it can run."""
    hidden = draw(st.permutations(NAMES[: draw(st.integers(1, len(NAMES)))]))
    earlier = [hidden[:index] for index in range(len(hidden))]
    graph = {
        node: draw(st.lists(st.sampled_from(before), unique=True)) if before else []
        for node, before in zip(hidden, earlier, strict=True)
    }
    return {node: graph[node] for node in draw(st.permutations(hidden))}


@st.composite
def any_graph(draw):
    return {node: draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3)) for node in NAMES}


@given(acyclic())
def test_every_node_comes_once_and_after_its_dependencies(graph):
    order = topological_order(graph)
    assert sorted(order) == sorted(graph)
    assert all(order.index(d) < order.index(node) for node, depends in graph.items() for d in depends)


@given(acyclic())
def test_of_the_nodes_that_are_ready_the_first_in_the_file_comes_next(graph):
    done: list[str] = []
    for node in topological_order(graph):
        ready = [n for n in graph if n not in done and set(graph[n]) <= set(done)]
        assert node == ready[0]
        done.append(node)


@given(acyclic())
def test_levels_hold_every_node_once_and_each_right_after_its_last_dependency(graph):
    rows = levels(graph)
    depth = {node: index for index, row in enumerate(rows) for node in row}
    assert sorted(depth) == sorted(graph) and sum(map(len, rows)) == len(graph)
    assert all(depth[node] == 1 + max((depth[d] for d in depends), default=-1) for node, depends in graph.items())
    assert all(list(row) == [n for n in graph if n in row] for row in rows)


@given(any_graph())
def test_a_graph_has_a_cycle_or_an_order(graph):
    cycle = find_cycle(graph)
    if cycle is None:
        assert len(topological_order(graph)) == len(graph)
        return
    assert cycle[0] == cycle[-1] and len(set(cycle)) == len(cycle) - 1
    assert all(earlier in graph[later] for earlier, later in zip(cycle, cycle[1:], strict=False))
    assert cycle[0] == min(cycle, key=list(graph).index)
    with pytest.raises(ValueError, match="cycle"):
        topological_order(graph)


@given(any_graph())
def test_without_the_found_cycles_there_is_none(graph):
    inside = {node for cycle in find_cycles(graph) for node in cycle}
    assert find_cycle({node: d for node, d in graph.items() if node not in inside}) is None


@given(acyclic())
def test_ancestors_are_the_transitive_dependencies(graph):
    for node, depends in graph.items():
        assert ancestors(graph, node) == set(depends).union(*(ancestors(graph, d) for d in depends))


def test_a_cycle_is_told_in_the_direction_of_the_data():
    assert find_cycle({"c": ["b"], "a": ["c"], "b": ["a"], "x": []}) == ["c", "a", "b", "c"]
    assert find_cycles({"a": ["a"], "b": ["c"], "c": ["b"]}) == [["a", "a"], ["b", "c", "b"]]


def test_a_loop_is_waited_for_as_a_whole_from_outside():
    graph = {"a": [], "b": ["a"], "c": ["a", "b"], "d": ["b"], "e": ["d", "b"]}
    assert with_whole_loops(graph, [("b", "c")]) == {
        "a": (), "b": ("a",), "c": ("a", "b"), "d": ("b", "c"), "e": ("d", "b", "c"),
    }  # fmt: skip


def test_sinks_are_what_nothing_depends_on():
    assert sinks({"a": [], "b": ["a"], "c": ["a"]}) == ["b", "c"]


def test_deep_graphs_do_not_exhaust_the_stack():
    graph = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(5000)}
    assert find_cycle(graph) is None and topological_order(graph)[-1] == "n4999"
