"""A workflow file whose pieces are read, but not yet checked against each other.

Invariant: a piece with a mistake that leaves nothing sound is None in its place, so indices are the file's; its name is
kept, so that others may refer to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.workflow.pieces import parse_piece, shown
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean, listing
from recipe.dag.workflow.schema import Agent, Algorithm, EpisodeSpec, Node, NodeRole, NodeType, Policy
from recipe.dag.workflow.source import Ref, Source

TOP_LEVEL = ("dag_id", "description", "global_config", "agents", "policies", "episode", "algorithm", "nodes")

ROLES = {
    NodeType.MODEL_INFERENCE: (NodeRole.ROLLOUT,),
    NodeType.MODEL_TRAIN: (NodeRole.ACTOR, NodeRole.CRITIC, NodeRole.REFERENCE),
    NodeType.COMPUTE: (NodeRole.REWARD, NodeRole.ADVANTAGE, NodeRole.DEFAULT),
}


@dataclass(slots=True)
class Draft:
    source: Source
    dag_id: str = ""
    description: str = ""
    agents: list[Agent | None] = field(default_factory=list)
    agent_names: list[str] = field(default_factory=list)
    policies: dict[str, Policy | None] = field(default_factory=dict)
    nodes: list[Node | None] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    episode: EpisodeSpec = EpisodeSpec()
    algorithm: Algorithm = Algorithm()
    problems: list[Problem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Every agent, policy and node could be read, and no two share a name."""
        pieces = (*self.agents, *self.policies.values(), *self.nodes)
        unique = all(len(set(names)) == len(names) for names in (self.agent_names, self.node_ids))
        return bool(self.agents and self.policies and self.nodes) and None not in pieces and unique

    def has(self, *path: str | int) -> bool:
        """The user wrote this key (or this list item)."""
        return path in self.source.values

    def each_node(self) -> Iterator[tuple[int, Node]]:
        return ((index, node) for index, node in enumerate(self.nodes) if node is not None)

    def each_agent(self) -> Iterator[tuple[int, Agent]]:
        return ((index, agent) for index, agent in enumerate(self.agents) if agent is not None)


def read_draft(source: Source) -> Draft:
    draft = Draft(source, problems=list(source.problems))
    _resolve_refs(draft)
    _read_top_level(draft)
    _read_agents(draft)
    _read_policies(draft)
    _read_nodes(draft)
    for name, model in (("episode", EpisodeSpec), ("algorithm", Algorithm)):
        if name in source.data:
            piece, problems = parse_piece(model, source.data[name], source, (name,))
            draft.problems += problems
            if piece is not None:
                setattr(draft, name, piece)
    return draft


def _resolve_refs(draft: Draft) -> None:
    """Put the values of global_config where `!Ref` names them. Legal inside a node's config only."""
    source = draft.source
    known = source.data.get("global_config")

    def visit(value: Any, path: tuple) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, Ref):
            return value
        if not (path[0] == "nodes" and len(path) > 3 and path[2] == "config"):
            draft.problems.append(source.problem(path, "`!Ref` may stand only inside a node's `config`"))
        found = {"global_config": known}
        for part in value.target.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None or isinstance(found, Ref) or not value.target.startswith("global_config."):
            message = f"`!Ref {value.target}` names nothing; write `!Ref global_config.name` of a value that is set"
            draft.problems.append(source.problem(path, message))
            return None
        return found

    source.data = visit(source.data, ())


def _read_top_level(draft: Draft) -> None:
    source, data = draft.source, draft.source.data
    for key in data:
        if key not in TOP_LEVEL and not key.startswith("x-"):
            hint = did_you_mean(key, TOP_LEVEL)
            message = f"unknown key{hint} (keys that start with `x-` may hold anchors)"
            draft.problems.append(source.problem((key,), message, key=True))
    if "dag_id" not in data:
        draft.problems.append(source.problem((), "`dag_id` is missing; give the workflow a name"))
    for key in ("dag_id", "description"):
        value = data.get(key, "")
        if not isinstance(value, str) or (key == "dag_id" and key in data and not value.strip()):
            draft.problems.append(source.problem((key,), f"expected text, got {shown(value)}"))
        else:
            setattr(draft, key, value)
    if not isinstance(data.get("global_config", {}), dict):
        message = f"expected a mapping, got {shown(data['global_config'])}"
        draft.problems.append(source.problem(("global_config",), message))


def _collection(draft: Draft, key: str, kind: type, example: str) -> Any:
    """The top-level list or mapping `key`; an empty one where it is missing or wrong, which is reported."""
    data = draft.source.data
    if key not in data:
        message = f"`{key}` is missing; write `{key}: {example}`"
        draft.problems.append(draft.source.problem((), message))
        return kind()
    if not isinstance(data[key], kind):
        expected = "a list" if kind is list else "a mapping"
        draft.problems.append(draft.source.problem((key,), f"expected {expected}, got {shown(data[key])}"))
        return kind()
    if not data[key]:
        draft.problems.append(draft.source.problem((key,), f"must not be empty; write `{key}: {example}`"))
    return data[key]


def _read_agents(draft: Draft) -> None:
    source = draft.source
    if "agents" not in source.data and (at := _first_agent_group(source)) is not None:
        message = "declare `agents:` (agent_group is the index in it) and `policies:`; a group alone has no weights"
        draft.problems.append(source.problem(at, message, key=True))
        return
    for index, data in enumerate(_collection(draft, "agents", list, "[{name: solver, policy: main}]")):
        piece, problems = parse_piece(Agent, data, source, ("agents", index), essential=frozenset({"name", "policy"}))
        draft.agents.append(piece)
        draft.agent_names.append(_text(data, "name"))
        draft.problems += problems


def _first_agent_group(source: Source) -> tuple | None:
    nodes = source.data.get("nodes")
    for index, node in enumerate(nodes if isinstance(nodes, list) else []):
        if isinstance(node, dict) and "agent_group" in node:
            return ("nodes", index, "agent_group")
    return None


def _read_policies(draft: Draft) -> None:
    example = '{main: {model: {path: "${oc.env:MODEL_PATH}"}}}'
    for name, data in _collection(draft, "policies", dict, example).items():
        draft.policies[name], problems = parse_piece(Policy, data, draft.source, ("policies", name))
        draft.problems += problems


def _read_nodes(draft: Draft) -> None:
    source = draft.source
    essential = frozenset({"node_id", "node_type", "node_role", "agent_group", "dependencies"})
    for index, data in enumerate(_collection(draft, "nodes", list, "[{node_id: ..., node_type: ..., node_role: ...}]")):
        path = ("nodes", index)
        sound = True
        if isinstance(data, dict):
            data, problems = _normal_node(draft, data, path)
            draft.problems += problems
            sound = not problems
        piece, problems = parse_piece(Node, data, source, path, essential=essential)
        draft.problems += problems
        if piece is not None and (misplaced := list(_misplaced(draft, piece, path))):
            draft.problems += misplaced
            sound = False
        draft.nodes.append(piece if sound else None)
        draft.node_ids.append(_text(data, "node_id"))


def _normal_node(draft: Draft, data: dict[str, Any], path: tuple) -> tuple[dict[str, Any], list[Problem]]:
    """`agent` as agent_group, enum names in capitals."""
    data, problems = dict(data), []
    for key in ("node_type", "node_role"):
        if isinstance(data.get(key), str):
            data[key] = data[key].upper()
    if "agent" in data:
        agent = data.pop("agent")
        if "agent_group" in data:
            problems.append(draft.source.problem((*path, "agent"), "give `agent` or `agent_group`, not both", key=True))
        elif agent in draft.agent_names:
            data["agent_group"] = draft.agent_names.index(agent)
        elif isinstance(agent, str):
            if draft.agent_names:
                message = f"no agent `{agent}`{did_you_mean(agent, filter(None, draft.agent_names))}"
                problems.append(draft.source.problem((*path, "agent"), message))
        else:
            message = f"expected an agent's name, got {shown(agent)} (its index goes under `agent_group`)"
            problems.append(draft.source.problem((*path, "agent"), message))
    return data, problems


def _misplaced(draft: Draft, node: Node, path: KeyPath) -> Iterator[Problem]:
    """What keeps a node out of every graph: a role that its type has not, a role for later, an unknown agent."""
    if node.node_role not in ROLES[node.node_type]:
        message = f"a {node.node_type} node cannot be {node.node_role}; its roles are {listing(ROLES[node.node_type])}"
        yield draft.source.problem((*path, "node_role" if draft.has(*path, "node_role") else "node_type"), message)
    elif node.node_role is NodeRole.CRITIC:
        message = "critic nodes come with the critic methods; remove it or use a critic-free estimator"
        yield draft.source.problem((*path, "node_role"), message)
    elif node.node_role is NodeRole.DEFAULT:
        key = "node_role" if draft.has(*path, "node_role") else "node_type"
        message = "DEFAULT nodes are not run yet; give it `node_role: REWARD` or do its work in a hook"
        yield draft.source.problem((*path, key), message)
    if draft.agents and node.agent_group >= len(draft.agents):
        last = len(draft.agents) - 1
        message = f"no agent {node.agent_group}; agent_group is an index from 0 to {last}, or write `agent: name`"
        yield draft.source.problem((*path, "agent_group"), message)


def _text(data: Any, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""
