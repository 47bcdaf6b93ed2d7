"""Checks of conditions: their form (by `workflow/condition.py`) and the nodes that they name.

Invariant: the nodes that a condition asks about have run when it is evaluated, or ran in the round or turn before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import listing
from recipe.dag.workflow.condition import SUBJECTS, TESTS, Condition, asked_nodes, form_problems, needs_a_test, parts
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, graph_of, with_whole_loops
from recipe.dag.workflow.node import EPISODE_KINDS, Kind, title


def check_condition(draft: Draft, condition: Condition, path: KeyPath) -> Iterator[Problem]:
    for part_path, part in parts(condition, path):
        yield from _check_form(draft, part, part_path)
        yield from _check_names(draft, part, part_path)


def check_condition_order(draft: Draft) -> Iterator[Problem]:
    """Check that conditions ask about nodes that run before them. The graph must not contain a cycle."""
    nodes = draft.by_id()
    graph = with_whole_loops(graph_of(nodes.values()), [loop.nodes for _, loop in draft.each_loop()])
    if draft.episode.max_turns > 1:
        return  # a node that runs later has its result of the turn before
    for path, condition, guarded, loop_name in draft.each_condition():
        body: set[str] = set()
        for name, loop in draft.each_loop():
            if name == loop_name or guarded in loop.nodes:
                body |= set(loop.nodes)
        waiting = body if loop_name else {guarded}
        before = body.union(*(ancestors(graph, name) for name in waiting if name in graph))
        for part_path, part in parts(condition, path):
            for name_path, name, _ in asked_nodes(part, part_path):
                if name in nodes and nodes[name].kind in EPISODE_KINDS and name not in before:
                    owner = f"`{guarded}`" if guarded else f"loop `{loop_name}`"
                    message = f"`{name}` has not run when {owner} asks about it; make it a dependency"
                    yield draft.source.problem(name_path, message)


def _check_form(draft: Draft, condition: Condition, path: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    subjects = _keys_set(draft, condition, path, SUBJECTS)
    tests = _keys_set(draft, condition, path, TESTS)
    # A key that could not be read was reported; it may have been the subject or the test that seems to be missing.
    reported = draft.reported(*path)
    if not subjects:
        if not reported:
            yield problem(path, f"a condition asks about one of {listing(SUBJECTS)}")
        return
    for key, message, about_key in form_problems(condition, subjects, tests):
        yield problem(path if key is None else (*path, key), message, key=about_key)
    if not tests and not reported and (message := needs_a_test(subjects[0])) is not None:
        yield problem(path, message)


def _check_names(draft: Draft, condition: Condition, path: KeyPath) -> Iterator[Problem]:
    problem, nodes = draft.source.problem, draft.by_id()
    seen: set[str] = set()
    for name_path, name, subject in asked_nodes(condition, path):
        if draft.missing(name):
            yield problem(name_path, draft.no_node(name_path, name))
        elif name in nodes and nodes[name].kind not in EPISODE_KINDS:
            message = f"`{name}` is {title(nodes[name].kind)}, which runs after the episode; name another node"
            yield problem(name_path, message)
        elif name in nodes and subject.names == "envs" and not nodes[name].env:
            owners = [n.id for n in nodes.values() if n.env]
            hint = f"; {listing(owners)} does" if len(owners) == 1 else ""
            yield problem(name_path, f"`{name}` does not step an env{hint}")
        elif name in nodes and subject.names == "votes" and nodes[name].kind is Kind.VOTE:
            yield problem(
                name_path, "a vote node always agrees with the nodes that it counts; name those nodes instead"
            )
        elif name in seen:
            yield problem(name_path, f"`{name}` is listed twice; remove one")
        seen.add(name)


def _keys_set(draft: Draft, condition: Condition, path: KeyPath, keys: Iterable[str]) -> list[str]:
    """Return those of `keys` that are set, in the file's order."""
    set_keys = [key for key in keys if getattr(condition, key) is not None]
    return sorted(set_keys, key=lambda key: draft.source.at((*path, key), key=True))
