"""Checks of the options of the engine's reward functions, by their entries in the catalogue.

Invariant: an option that passes is one that the function takes, with a valid value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from recipe.dag.algorithms.reward_catalogue import SHAPED, OptionKind, RewardEntry, RewardOption, chosen_shaping
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean, listing
from recipe.dag.types.convention import Reference
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.node import Kind, Node, title
from recipe.dag.workflow.parse_model import choice, show_value


def check_reward_options(facts: DraftFacts, index: int, node: Node, entry: RewardEntry) -> Iterator[Problem]:
    """Check the `args` of a reward node whose function is in the catalogue."""
    problem, options, path = facts.problem, node.args, ("nodes", index, "args")
    takes = entry.takes
    if entry.where == SHAPED and (shaping := chosen_shaping(options)) is not None:
        takes = {**takes, **shaping.takes}
        for key in [key for key in options if key not in takes]:
            hint = did_you_mean(key, shaping.takes) or "; it has no options; remove this"
            yield problem((*path, key), f"shaping `{shaping.name}` takes no `{key}`{hint}", key=True)
    for key, option in takes.items():
        if key in options and not (options[key] is None and option.default is None):
            yield from _check_value(facts, (*path, key), option, options[key])
        elif key not in options and (message := _default_problem(facts.draft, key, option)) is not None:
            yield problem(("nodes", index, "reward"), message)
    if entry.where == "reward.credit:debate_incentives":
        weights = [key for key, option in takes.items() if option.default == 0.0]
        if not any(options.get(key, 0.0) for key in weights):
            message = f"all its weights are 0, so it pays nothing; set one of {listing(weights)}"
            yield problem(("nodes", index, "reward"), message)


def _check_value(facts: DraftFacts, path: KeyPath, option: RewardOption, value: Any) -> Iterator[Problem]:
    for inner, message in _mistakes(facts.draft, path, option, value):
        yield facts.problem((*path, *inner), message)
    if option.convention is not None and isinstance(value, str):
        yield from facts.check_function(Reference(value, path), option.convention)


def _default_problem(draft: Draft, key: str, option: RewardOption) -> str | None:
    """Return the error message if an option that is not given has a default that this workflow lacks, or None."""
    names = [agent.name for _, agent in draft.each_agent()]
    if option.kind is not OptionKind.AGENT or not draft.complete or option.default in names:
        return None
    return f"there is no agent `{option.default}`; write `args: {{{key}: {names[0]}}}`"


def _mistakes(draft: Draft, path: KeyPath, option: RewardOption, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path inside the value, error message) for each mistake in the value of an option at `path`."""
    least = int(max(1, option.low))
    match option.kind:
        case OptionKind.NODE:
            yield from _check_node(draft, path, (), value)
        case OptionKind.NODES:
            yield from _check_nodes(draft, path, (), value, [], least)
        case OptionKind.PLAYERS:
            yield from _check_players(draft, path, value, least)
        case OptionKind.AGENTS:
            yield from _check_agents(draft, value)
        case OptionKind.AGENT:
            yield from (((), message) for _, message in _check_agents(draft, [value]))
        case _:
            if (message := _scalar_problem(option, value)) is not None:
                yield (), message


def _scalar_problem(option: RewardOption, value: Any) -> str | None:
    """Return the error message for the value of an option that is not about nodes or agents, or None."""
    match option.kind:
        case OptionKind.FLOAT | OptionKind.INT:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not option.low <= value <= option.high:
                return f"expected {_range(option)}, got {show_value(value)}"
        case OptionKind.TEXT if not isinstance(value, str):
            return f"expected text, got {show_value(value)}"
        case OptionKind.FUNCTION if not isinstance(value, str):
            return f"expected file.py:function, got {show_value(value)}"
        case OptionKind.FLAG if not isinstance(value, bool):
            return f"expected true or false, got {show_value(value)}"
        case OptionKind.CHOICE if value not in option.choices:
            return choice(value, option.choices)
        case OptionKind.SCALAR if isinstance(value, list | dict):
            return f"expected text, a number, true or false, got {show_value(value)}"
    return None


def _check_agents(draft: Draft, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Check a list of agents' names."""
    if not isinstance(value, list):
        yield (), f"expected a list of agents, got {show_value(value)}"
        return
    names = [agent.name for _, agent in draft.each_agent()]
    for position, name in enumerate(value if draft.complete else ()):
        if name not in names:
            yield (position,), f"no agent `{name}`{did_you_mean(str(name), names)}"


def _range(option: RewardOption) -> str:
    if math.isfinite(option.high):
        return f"a number from {option.low:g} to {option.high:g}"
    return f"a number of at least {option.low:g}" if math.isfinite(option.low) else "a number"


def _check_node(draft: Draft, path: KeyPath, inner: KeyPath, name: Any) -> Iterator[tuple[KeyPath, str]]:
    """Check that the name, at `inner` below `path`, is that of a rollout node."""
    if not isinstance(name, str):
        yield inner, f"expected a node, got {show_value(name)}"
    elif draft.missing(name):
        yield inner, draft.no_node((*path, *inner), name)
    elif (node := draft.by_id().get(name)) is not None and node.kind is not Kind.ROLLOUT:
        yield inner, f"`{name}` is {title(node.kind)}, which has no agent; name a rollout node"


def _check_nodes(
    draft: Draft, path: KeyPath, inner: KeyPath, value: Any, seen: list[str], least: int
) -> Iterator[tuple[KeyPath, str]]:
    """Check a list of distinct rollout nodes, none of which is in `seen`, and add them to `seen`."""
    if not isinstance(value, list) or len(value) < least:
        expected = f"at least {least} nodes" if least > 1 else "nodes"
        yield inner, f"expected a list of {expected}, got {_count(value)}"
        return
    for position, name in enumerate(value):
        if name in seen:
            yield (*inner, position), f"`{name}` is listed twice; remove one"
        else:
            yield from _check_node(draft, path, (*inner, position), name)
        seen.append(name)


def _check_players(draft: Draft, path: KeyPath, value: Any, least: int) -> Iterator[tuple[KeyPath, str]]:
    """Check the lists of nodes of each player, which must have equal lengths."""
    if not isinstance(value, list) or len(value) < least:
        expected = f"at least {least} lists" if least > 1 else "lists"
        yield (), f"expected {expected} of nodes, one for each player, got {_count(value)}"
        return
    seen: list[str] = []
    for position, nodes in enumerate(value):
        yield from _check_nodes(draft, path, (position,), nodes, seen, 1)
        if isinstance(nodes, list) and nodes and isinstance(value[0], list) and len(nodes) != len(value[0]):
            yield (position,), "every player needs as many nodes as the first; the k-th node of each is one stage"


def _count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else show_value(value)
