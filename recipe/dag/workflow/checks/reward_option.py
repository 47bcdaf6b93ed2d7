"""Checks of the options of the project's own reward nodes, by what the catalogue says that each may be.

Invariant: an option that passes is one that the function takes, with a value that it can use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.dag.entry import Kind, Option
from recipe.dag.rewards import CALLED, SHAPED, SHAPED_TAKES, SHAPINGS
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.reward import engine_function
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem, closest, did_you_mean, listing
from recipe.dag.workflow.schema import NodeRole


def check_reward_options(draft: Draft, references: References) -> Iterator[Problem]:
    say = draft.source.problem
    for index, node in draft.each_node():
        name, given = engine_function(references, node, index), node.executable_kwargs
        at: KeyPath = ("nodes", index, "executable_kwargs")
        takes: Mapping[str, Option] = CALLED[name].takes if name in CALLED else {}
        if name == SHAPED:
            shaping = given.get("shaping")
            entry = SHAPINGS.get(shaping) if isinstance(shaping, str) else None
            takes = SHAPED_TAKES | (entry.takes if entry is not None else {})
            for key in given if entry is not None else ():
                if key not in takes:
                    hint = did_you_mean(key, entry.takes) or "; it has none; remove this"
                    yield say((*at, key), f"shaping `{shaping}` takes no `{key}`{hint}", key=True)
        for key, option in takes.items():
            if key in given and not (given[key] is None and option.default is None):
                for inner, message in _mistakes(draft, (*at, key), option, given[key]):
                    yield say((*at, key, *inner), message)
        if name == "reward.credit:debate_incentives":
            weights = [key for key, option in takes.items() if option.default == 0.0]
            if not any(given.get(key, 0.0) for key in weights):
                message = f"all its weights are 0, so it pays nothing; set one of {listing(weights)}"
                yield say(("nodes", index, "executable_ref"), message)


def _mistakes(draft: Draft, at: KeyPath, option: Option, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """(where inside the value, what is wrong)"""
    match option.kind:
        case Kind.NUMBER:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not option.low <= value <= option.high:
                yield (), f"expected {_range(option)}, got {shown(value)}"
        case Kind.TEXT if not isinstance(value, str):
            yield (), f"expected text, got {shown(value)}"
        case Kind.CHOICE if value not in option.choices:
            near = closest(value, option.choices) if isinstance(value, str) else None
            hint = f"; did you mean `{near}`?" if near else ""
            yield (), f"expected one of {listing(option.choices)}, got {shown(value)}{hint}"
        case Kind.SCALAR if isinstance(value, list | dict):
            yield (), f"expected text, a number, true or false, got {shown(value)}"
        case Kind.NODE:
            yield from _no_speaker(draft, at, (), value)
        case Kind.NODES:
            yield from _names(draft, at, (), value, [], int(option.low))
        case Kind.PLAYERS:
            yield from _players(draft, at, value, int(option.low))
        case Kind.AGENTS:
            known = [agent.name for _, agent in draft.each_agent()]
            if not isinstance(value, list):
                yield (), f"expected a list of agents, got {shown(value)}"
            for place, name in enumerate(value if isinstance(value, list) and draft.whole else ()):
                if name not in known:
                    yield (place,), f"no agent `{name}`{did_you_mean(str(name), known)}"


def _range(option: Option) -> str:
    if math.isfinite(option.high):
        return f"a number from {option.low:g} to {option.high:g}"
    return f"a number of at least {option.low:g}" if math.isfinite(option.low) else "a number"


def _no_speaker(draft: Draft, at: KeyPath, inner: KeyPath, name: Any) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(name, str):
        yield inner, f"expected a node, got {shown(name)}"
    elif draft.missing(name):
        yield inner, draft.no_node((*at, *inner), name)
    elif (node := draft.by_id().get(name)) is not None and node.node_role is not NodeRole.ROLLOUT:
        yield inner, f"`{name}` is a {node.node_role} node, in which no agent speaks; name a rollout node"


def _names(
    draft: Draft, at: KeyPath, inner: KeyPath, value: Any, seen: list[str], least: int
) -> Iterator[tuple[KeyPath, str]]:
    """A list of different rollout nodes, none of them in `seen`, to which they are added."""
    if not isinstance(value, list) or len(value) < least:
        few = f"at least {least} nodes" if least > 1 else "nodes"
        yield inner, f"expected a list of {few}, got {_counted(value)}"
        return
    for place, name in enumerate(value):
        if name in seen:
            yield (*inner, place), f"`{name}` is listed twice"
        else:
            yield from _no_speaker(draft, at, (*inner, place), name)
        seen.append(name)


def _players(draft: Draft, at: KeyPath, value: Any, least: int) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(value, list) or len(value) < least:
        few = f"at least {least} lists" if least > 1 else "lists"
        yield (), f"expected {few} of nodes, a list for each player, got {_counted(value)}"
        return
    seen: list[str] = []
    for place, nodes in enumerate(value):
        yield from _names(draft, at, (place,), nodes, seen, 1)
        if isinstance(nodes, list) and nodes and isinstance(value[0], list) and len(nodes) != len(value[0]):
            yield (place,), "every player needs as many nodes as the first: the k-th ones of all are of one stage"


def _counted(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else shown(value)
