"""A workflow file whose pieces are read, but not yet checked against each other.

Invariant: a piece with a mistake that leaves nothing sound is None in its place, so indices are the file's; its name is
kept, so that others may refer to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipe.dag.algorithms.grpo import Grpo
from recipe.dag.workflow.pieces import parse_algorithm, parse_piece, shown
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean
from recipe.dag.workflow.schema import Agent, Algorithm, Condition, EnvSpec, EpisodeSpec, Loop, Node, Policy, ToolSpec
from recipe.dag.workflow.source import Source

TOP_LEVEL = (
    *(
        "dag_id",
        "description",
        "global_config",
        "agents",
        "policies",
        "tools",
        "envs",
        "episode",
        "loops",
        "algorithm",
        "nodes",
    ),
)


@dataclass(slots=True)
class Draft:
    source: Source
    dag_id: str = ""
    description: str = ""
    agents: list[Agent | None] = field(default_factory=list)
    agent_names: list[str] = field(default_factory=list)
    policies: dict[str, Policy | None] = field(default_factory=dict)
    tools: dict[str, ToolSpec | None] = field(default_factory=dict)
    envs: dict[str, EnvSpec | None] = field(default_factory=dict)
    loops: dict[str, Loop | None] = field(default_factory=dict)
    nodes: list[Node | None] = field(default_factory=list)
    node_ids: list[str] = field(default_factory=list)
    episode: EpisodeSpec = EpisodeSpec()
    algorithm: Algorithm = Grpo()
    problems: list[Problem] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Every piece could be read, and no two share a name."""
        pieces = (
            *(*self.agents, *self.policies.values(), *self.nodes),
            *(*self.tools.values(), *self.envs.values(), *self.loops.values()),
        )
        unique = all(len(set(names)) == len(names) for names in (self.agent_names, self.node_ids))
        there = self.agents and self.policies and self.nodes and not self.source.unread
        return bool(there) and None not in pieces and unique

    def has(self, *path: str | int) -> bool:
        """The user wrote this key (or this list item)."""
        return self.source.has(path)

    def missing(self, node: str) -> bool:
        """There is no such node; nor could it be one whose name could not be read, or stand in such a sub-workflow."""
        inside = any(node.startswith(f"{sub}__") for sub in self.source.unread)
        return not inside and not {node, ""} & set(self.node_ids)

    def no_node(self, path: KeyPath, name: str, *, but: str = "") -> str:
        """What to say of `name`, which stands at `path` and names no node; `but`: a node that is not meant."""
        home = self.source.origin(path)
        old: Any = home.source.data
        for part in home.path:
            old = old[part] if isinstance(old, list) or isinstance(old, dict) and part in old else name
        written = old if isinstance(old, str) else name
        places = [self.source.origin(("nodes", index)) for index in range(len(self.node_ids))]
        near = [
            text_of(raw := place.source.data["nodes"][place.path[1]], "node_id") or text_of(raw, "id")
            for place in places
            if place.source is home.source
        ]
        return f"no node `{written}`{did_you_mean(written, [n for n in near if n and n != but])}"

    def each_node(self) -> Iterator[tuple[int, Node]]:
        return ((index, node) for index, node in enumerate(self.nodes) if node is not None)

    def each_agent(self) -> Iterator[tuple[int, Agent]]:
        return ((index, agent) for index, agent in enumerate(self.agents) if agent is not None)

    def each_policy(self) -> Iterator[tuple[str, Policy]]:
        return ((name, policy) for name, policy in self.policies.items() if policy is not None)

    def each_loop(self) -> Iterator[tuple[str, Loop]]:
        return ((name, loop) for name, loop in self.loops.items() if loop is not None)

    def by_id(self) -> dict[str, Node]:
        return {node.node_id: node for _, node in self.each_node()}

    def each_condition(self) -> Iterator[tuple[KeyPath, Condition, str | None, str | None]]:
        """(place, condition, the node that it guards, the loop that it ends) of every `when` and `until`."""
        for index, node in self.each_node():
            if node.when is not None:
                yield ("nodes", index, "when"), node.when, node.node_id, None
        for name, loop in self.each_loop():
            if loop.until is not None:
                yield ("loops", name, "until"), loop.until, None, name


def read_top_level(draft: Draft) -> None:
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


def collection(draft: Draft, key: str, kind: type, example: str | None) -> Any:
    """The top-level list or mapping `key`; an empty one where it is missing or wrong, which is reported. Without an
    `example` it may be missing."""
    data = draft.source.data
    if key not in data:
        if example is not None:
            draft.problems.append(draft.source.problem((), f"`{key}` is missing; write `{key}: {example}`"))
        return kind()
    if not isinstance(data[key], kind):
        expected = "a list" if kind is list else "a mapping"
        draft.problems.append(draft.source.problem((key,), f"expected {expected}, got {shown(data[key])}"))
        return kind()
    if not data[key]:
        hint = f"write `{key}: {example}`" if example is not None else "remove it"
        draft.problems.append(draft.source.problem((key,), f"must not be empty; {hint}"))
    return data[key]


def text_of(data: Any, key: str) -> str:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""


def read_agents(draft: Draft) -> None:
    source = draft.source
    if "agents" not in source.data and (at := _first_agent_group(source)) is not None:
        message = "declare `agents:` (agent_group is the index in it); a group alone has no policy and no sampling"
        draft.problems.append(source.problem(at, message, key=True))
        return
    for index, data in enumerate(collection(draft, "agents", list, "[{name: solver, policy: main}]")):
        piece, problems = parse_piece(Agent, data, source, ("agents", index), essential=frozenset({"name", "policy"}))
        draft.agents.append(piece)
        draft.agent_names.append(text_of(data, "name"))
        draft.problems += problems


def _first_agent_group(source: Source) -> tuple | None:
    nodes = source.data.get("nodes")
    for index, node in enumerate(nodes if isinstance(nodes, list) else []):
        if isinstance(node, dict) and "agent_group" in node:
            return ("nodes", index, "agent_group")
    return None


def read_mappings(draft: Draft) -> None:
    """policies, tools, envs and loops: named pieces."""
    example = '{main: {model: {path: "${oc.env:MODEL_PATH}"}}}'
    kinds = (("policies", Policy, example, ()), ("tools", ToolSpec, None, ()), ("envs", EnvSpec, None, ("path",)))
    for key, model, wanted, essential in (*kinds, ("loops", Loop, None, ("nodes", "max_rounds"))):
        pieces = getattr(draft, key)
        for name, data in collection(draft, key, dict, wanted).items():
            pieces[name], problems = parse_piece(model, data, draft.source, (key, name), essential=frozenset(essential))
            draft.problems += problems


def read_settings(draft: Draft) -> None:
    """episode and algorithm: one piece each."""
    source = draft.source
    for name, read in (("episode", partial(parse_piece, EpisodeSpec)), ("algorithm", parse_algorithm)):
        if name in source.data:
            piece, problems = read(source.data[name], source, (name,))
            draft.problems += problems
            if piece is not None:
                setattr(draft, name, piece)


def resolve_tools(draft: Draft) -> None:
    """Put what stands under `tools` in the place of its name; a name that means nothing stays, for the checks."""
    for index, agent in draft.each_agent():
        tools = tuple(_resolved(draft, tool) for tool in agent.tools)
        if tools != agent.tools:
            draft.agents[index] = agent.model_copy(update={"tools": tools})


def _resolved(draft: Draft, tool: ToolSpec) -> ToolSpec:
    spec = draft.tools.get(tool.name or "") if tool.path is None else None
    if spec is None or tool.kwargs:
        return tool
    return spec if spec.path or spec.name else spec.model_copy(update={"name": tool.name})
