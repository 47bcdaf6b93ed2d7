"""The nodes of a draft: agents' names resolved, enums in capitals, roles and agents valid.

Invariant: a node that is returned is valid by itself; its references to other pieces are left to the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import closest, did_you_mean, listing
from recipe.dag.workflow.draft import (
    Draft,
    collection,
    read_agents,
    read_mappings,
    read_settings,
    read_top_level,
    text_of,
)
from recipe.dag.workflow.node_kinds import KINDS, NodeRole, NodeType
from recipe.dag.workflow.parse_model import parse_piece, show_value
from recipe.dag.workflow.resolve_tools import resolve_tools
from recipe.dag.workflow.schema import Node
from recipe.dag.workflow.short_form import KEYS
from recipe.dag.workflow.short_form import ROLES as ROLE_KEYS
from recipe.dag.workflow.source import Source

ROLES = {kind: tuple(role for role in KINDS if KINDS[role].type is kind) for kind in NodeType}
_ESSENTIAL = frozenset({"node_id", "node_type", "node_role", "agent_group", "dependencies"})


def read_draft(source: Source) -> Draft:
    draft = Draft(source, problems=list(source.problems))
    read_top_level(draft)
    read_agents(draft)
    read_mappings(draft)
    resolve_tools(draft)
    _read_nodes(draft)
    read_settings(draft)
    return draft


def _read_nodes(draft: Draft) -> None:
    source = draft.source
    for index, data in enumerate(collection(draft, "nodes", list, "[{id: solve, agent: solver}]")):
        path = ("nodes", index)
        valid = True
        if isinstance(data, dict):
            data, problems = _normal_node(draft, data, path)
            draft.problems += problems
            valid = not problems
        piece, problems = parse_piece(Node, data, source, path, essential=_ESSENTIAL)
        draft.problems += problems
        if piece is not None and (placement_problems := list(_placement_problems(draft, piece, path))):
            draft.problems += placement_problems
            valid = False
        if isinstance(data, dict) and _misspells_its_kind(
            draft, data, path
        ):  # the one mistake; others would follow from it
            valid = False
        draft.nodes.append(piece if valid else None)
        draft.node_ids.append(text_of(data, "node_id"))


def _misspells_its_kind(draft: Draft, data: dict[str, Any], path: KeyPath) -> bool:
    """Return whether a node has no kind, and an unknown key that may be meant to give it one."""
    unknown = data.keys() - Node.model_fields.keys() - set(KEYS)
    has_kind = any(draft.has(*path, key) for key in (*ROLE_KEYS, "node_role", "node_type"))
    return not has_kind and any(closest(key, (*KEYS, *Node.model_fields)) in ROLE_KEYS for key in unknown)


def _normal_node(draft: Draft, data: dict[str, Any], path: tuple) -> tuple[dict[str, Any], list[Problem]]:
    """Return the node with `agent` as `agent_group` and enum names in capitals, and the problems found."""
    data, problems = dict(data), []
    for key in ("node_type", "node_role"):
        if isinstance(data.get(key), str):
            data[key] = data[key].upper()
    if "agent" in data:
        agent = data.pop("agent")
        if "agent_group" in data:
            message = "set `agent` or `agent_group`, not both; remove one"
            problems.append(draft.source.problem((*path, "agent"), message, key=True))
        elif agent in draft.agent_names:
            data["agent_group"] = draft.agent_names.index(agent)
        elif isinstance(agent, str):
            if draft.agent_names:
                message = f"no agent `{agent}`{did_you_mean(agent, filter(None, draft.agent_names))}"
                problems.append(draft.source.problem((*path, "agent"), message))
        else:
            message = f"expected an agent's name, got {show_value(agent)} (its index goes under `agent_group`)"
            problems.append(draft.source.problem((*path, "agent"), message))
    return data, problems


def _placement_problems(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """Check that the node's type has its role, and that its agent exists."""
    if node.node_role not in ROLES[node.node_type]:
        message = f"a {node.node_type} node cannot be {node.node_role}; its roles are {listing(ROLES[node.node_type])}"
        yield draft.source.problem((*path, "node_role" if draft.has(*path, "node_role") else "node_type"), message)
    named = any(draft.has(*path, key) for key in ("agent", "agent_group"))
    if node.node_role is NodeRole.ROLLOUT and len(draft.agents) > 1 and not named:
        names = listing(filter(None, draft.agent_names))
        message = f"with several agents, a ROLLOUT node must name its agent: add `agent: ...`, one of {names}"
        yield draft.source.problem(path, f"{message} (or its index, `agent_group: ...`)")
    if draft.agents and node.agent_group >= len(draft.agents):
        last = len(draft.agents) - 1
        message = f"no agent {node.agent_group}; agent_group is an index from 0 to {last}, or write `agent: name`"
        yield draft.source.problem((*path, "agent_group"), message)
