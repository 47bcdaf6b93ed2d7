"""The nodes of a draft: each has an id and one kind, and a rollout node an agent that exists.

Invariant: a node that is returned is valid by itself; its references to other nodes are left to the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import closest, did_you_mean
from recipe.dag.workflow.draft import (
    Draft,
    collection,
    read_agents,
    read_mappings,
    read_settings,
    read_top_level,
    text_of,
)
from recipe.dag.workflow.node_kinds import KEYS
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.resolve_tools import resolve_tools
from recipe.dag.workflow.schema import Node
from recipe.dag.workflow.source import Source

_ESSENTIAL = frozenset({"id", "after", *KEYS})


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
        piece, problems = parse_piece(Node, data, source, path, essential=_ESSENTIAL)
        draft.node_ids.append(text_of(data, "id"))
        if isinstance(data, dict):
            kind_problems = [] if draft.unread(draft.node_ids[-1]) else list(_kind_problems(draft, data, path))
            problems += kind_problems
            piece = None if kind_problems or len(_kinds(data)) != 1 else piece
        draft.problems += problems
        draft.nodes.append(piece)


def _kinds(data: dict[str, Any]) -> list[str]:
    return [key for key in data if key in KEYS and data[key] is not None]


def _kind_problems(draft: Draft, data: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    """Check that the node has one kind, and that its agent exists."""
    problem, kinds = draft.source.problem, _kinds(data)
    misspelt = any(closest(key, Node.model_fields) in KEYS for key in data.keys() - Node.model_fields.keys())
    if not kinds and not misspelt:  # a misspelt key was reported; other mistakes would follow from it
        yield problem(path, "the node has no kind; add `agent:`, `reward:`, `vote:`, `compute:` or `workflow:`")
    for key in kinds[1:]:
        message = f"a node has one kind, but `{kinds[0]}` and `{key}` give it two; write two nodes"
        yield problem((*path, key), message, key=True)
    agent = data.get("agent")
    known = draft.agent_names and "" not in draft.agent_names  # an agent without a name was reported
    if isinstance(agent, str) and known and agent not in draft.agent_names:
        message = f"no agent `{agent}`{did_you_mean(agent, draft.agent_names)}"
        yield problem((*path, "agent"), message)
