"""Checks of conditions: `when` of a node and `until` of a loop.

Invariant: a condition that passes has one subject and one test, or joins several; the nodes that it asks have run by
then, or ran in the round or turn before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import ancestors, graph_of, with_whole_loops
from recipe.dag.workflow.problem import KeyPath, Problem, listing
from recipe.dag.workflow.schema import EPISODE_ROLES, Condition, NodeRole

JOINS = ("all_of", "any_of", "none_of")
UNTESTED = ("agree", "phase", *JOINS)
SUBJECTS = ("node", "env", "sample", *UNTESTED)
TESTS = ("equals", "one_of", "at_least", "at_most", "matches", "exists")


def check_conditions(draft: Draft) -> Iterator[Problem]:
    for path, condition, _, _ in draft.each_condition():
        for place, part in parts(condition, path):
            yield from _check_form(draft, part, place)
            yield from _check_names(draft, part, place)


def check_condition_order(draft: Draft) -> Iterator[Problem]:
    """Needs a graph without cycles."""
    nodes = draft.by_id()
    graph = with_whole_loops(graph_of(nodes.values()), [loop.nodes for _, loop in draft.each_loop()])
    if draft.episode.max_turns > 1:
        return  # whoever comes later is seen as it was in the turn before
    for path, condition, guarded, loop_name in draft.each_condition():
        body = {n for name, loop in draft.each_loop() if name == loop_name or guarded in loop.nodes for n in loop.nodes}
        waiting = body if loop_name else {guarded}
        before = body.union(*(ancestors(graph, name) for name in waiting if name in graph))
        for place, part in parts(condition, path):
            for at, name in named(part, place):
                if name in nodes and nodes[name].node_role in EPISODE_ROLES and name not in before:
                    who = f"`{guarded}`" if guarded else f"loop `{loop_name}`"
                    message = f"`{name}` has not run when {who} asks for it; make it a dependency"
                    yield draft.source.problem(at, message)


def parts(condition: Condition, path: KeyPath) -> Iterator[tuple[KeyPath, Condition]]:
    """The condition and all inside it, each with its place."""
    yield path, condition
    for join in JOINS:
        for index, inner in enumerate(getattr(condition, join) or ()):
            yield from parts(inner, (*path, join, index))


def named(condition: Condition, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """The nodes that this one asks, not those inside it."""
    for key in ("node", "env"):
        if getattr(condition, key) is not None:
            yield (*path, key), getattr(condition, key)
    for index, name in enumerate(condition.agree or ()):
        yield (*path, "agree", index), name


def _check_form(draft: Draft, condition: Condition, path: KeyPath) -> Iterator[Problem]:
    say = draft.source.problem
    subjects = _given(draft, condition, path, SUBJECTS)
    tests = _given(draft, condition, path, TESTS)
    # What could not be read was reported; it may have been the subject or the test that seems to be missing.
    known = any(problem.where.startswith(say(path, "").where) for problem in draft.problems)
    if not subjects:
        if not known:
            yield say(path, f"a condition asks about one of {listing(SUBJECTS)}")
        return
    subject = subjects[0]
    for other in subjects[1:]:
        yield say((*path, other), f"a condition has one subject, here `{subject}`; join two with `all_of`", key=True)
    for test in tests if subject in UNTESTED else ():
        yield say((*path, test), f"`{subject}` needs no test; remove it", key=True)
    if subject in (*JOINS, "agree"):
        what, least = ("nodes", 2) if subject == "agree" else ("conditions", 1)
        if len(getattr(condition, subject)) < least:
            yield say((*path, subject), f"`{subject}` needs at least {least} {what if least > 1 else what[:-1]}")
    elif subject not in UNTESTED and not tests and not known:
        yield say(path, f"`{subject}` needs a test: one of {listing(TESTS)}")
    for test in () if subject in UNTESTED else tests[1:]:
        yield say((*path, test), f"a condition has one test, here `{tests[0]}`; join two with `all_of`", key=True)
    if condition.key is not None and subject not in ("node", "env", "agree"):
        yield say((*path, "key"), f"nobody reads `key` next to `{subject}`; remove it", key=True)
    if subject == "env" and condition.key is None:
        yield say(path, "`env` needs `key: name`, the entry of the env's info")
    if subject == "node" and condition.key is None and tests and tests[0] in ("at_least", "at_most"):
        yield say((*path, tests[0]), "a text has no size; name the entry of the node's result: `key: name`", key=True)
    if condition.sample is not None and not all(condition.sample.split(".")):
        yield say((*path, "sample"), "write a path into the sample, such as `extra_info.level`")
    if condition.matches is not None:
        try:
            re.compile(condition.matches)
        except re.error as error:
            yield say((*path, "matches"), f"no regular expression: {error}")
    if condition.one_of == ():
        yield say((*path, "one_of"), "an empty list is never met; name a value")


def _check_names(draft: Draft, condition: Condition, path: KeyPath) -> Iterator[Problem]:
    say, nodes = draft.source.problem, draft.by_id()
    seen: set[str] = set()
    for at, name in named(condition, path):
        if draft.missing(name):
            yield say(at, draft.no_node(at, name))
        elif name in nodes and nodes[name].node_role not in EPISODE_ROLES:
            yield say(at, f"`{name}` is a {nodes[name].node_role} node; it runs after the episode")
        elif name in nodes and at[-1] == "env" and not nodes[name].agent_options.env_path:
            owners = [n.node_id for n in nodes.values() if n.agent_options.env_path]
            hint = f"; {listing(owners)} does" if len(owners) == 1 else ""
            yield say(at, f"`{name}` steps no env{hint}")
        elif name in seen:
            yield say(at, f"`{name}` is listed twice")
        seen.add(name)
    if condition.agree is not None and NodeRole.VOTE in {nodes[n].node_role for n in condition.agree if n in nodes}:
        index = next(i for i, n in enumerate(condition.agree) if n in nodes and nodes[n].node_role is NodeRole.VOTE)
        yield say((*path, "agree", index), "a vote agrees with whom it counts; name the nodes that voted")


def _given(draft: Draft, condition: Condition, path: KeyPath, keys: tuple[str, ...]) -> list[str]:
    """Those of `keys` that are set, in the file's order."""
    given = [key for key in keys if getattr(condition, key) is not None]
    return sorted(given, key=lambda key: draft.source.at((*path, key), key=True))
