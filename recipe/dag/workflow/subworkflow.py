"""Sub-workflows: an entry `{id: sub, workflow: other.yaml, agents: {inner: outer}, after: ...}` of `nodes` is replaced
by the rollout, vote and compute nodes of the other file.

Invariant: an inlined node knows where it is written, so its mistakes are reported in its own file. Loops and envs are
inlined, too; rewards, training, agents and policies are those of the including file.

Names: `inner` is the included file, `outer` the including one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import find_source, resolve_path, split_ref
from recipe.dag.core.problem import KeyPath, Problem, WorkflowError
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.condition import renamed_condition
from recipe.dag.workflow.graph import sinks
from recipe.dag.workflow.node import KINDS, Stage, SubWorkflow
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.source import Origin, Source

Reader = Callable[[Path], Source]
"""Reads a file as a source whose references are resolved. Raises WorkflowError."""
LEFT_OUT = frozenset(kind.key for kind in KINDS.values() if kind.stage is not Stage.EPISODE)
"""Keys of nodes that are not inlined."""
DECIDED = ("episode", "algorithm")
"""Blocks in which the including file decides."""


def expand(source: Source, read: Reader, including: tuple[Path, ...] = ()) -> Source:
    """Return the source with every sub-workflow inlined, or the source itself if there is none. `including`: the chain
    of files that include this one."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not any(isinstance(node, dict) and "workflow" in node for node in nodes):
        return source
    return _Expansion(source, read, (*including, Path(source.file).resolve())).run(nodes)


@dataclass(slots=True)
class _Expansion:
    source: Source
    read: Reader
    including: tuple[Path, ...]
    result: Source = field(init=False)
    nodes: list[Any] = field(default_factory=list)
    members: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    """Sub-workflow -> (ids of all its nodes, ids of those on which no other depends)."""

    def run(self, nodes: list[Any]) -> Source:
        source = self.source
        self.result = Source(source.file, dict(source.data), problems=source.problems, warnings=source.warnings)
        self.result.unread |= source.unread
        self.result.origins[()] = Origin(source, ())
        for index, node in enumerate(nodes):
            if isinstance(node, dict) and "workflow" in node:
                self.include(node, ("nodes", index))
            else:
                self.add(node, Origin(source, ("nodes", index)))
        self.result.data["nodes"] = self.nodes
        for index, node in enumerate(self.nodes):
            if isinstance(node, dict) and (after := _as_list(node.get("after"))):
                self.relink(node, after, index)
        loops = self.result.data.get("loops")
        if isinstance(loops, dict):
            self.result.data["loops"] = {name: self.expand_loop(loop, ("loops", name)) for name, loop in loops.items()}
        return self.result

    def expand_loop(self, loop: Any, path: KeyPath) -> Any:
        """Return the loop at `path` with each sub-workflow in its `nodes` replaced by all nodes of the sub-workflow."""
        if not isinstance(loop, dict) or not isinstance(loop.get("nodes"), list):
            return loop
        members = [self.members.get(_key(name), ([name], []))[0] for name in loop["nodes"]]
        return {**loop, "nodes": self.flattened(members, (*path, "nodes"))}

    def flattened(self, entries: list[list[Any]], path: KeyPath) -> list[Any]:
        """Return one list of what replaces each entry of the list at `path`, where mistakes are placed."""
        origins = [self.result.origin((*path, position)) for position, new in enumerate(entries) for _ in new]
        self.result.origins |= {(*path, position): origin for position, origin in enumerate(origins)}
        return [name for new in entries for name in new]

    def add(self, node: Any, origin: Origin) -> int:
        """Append a copy of a node and return its index."""
        self.result.origins["nodes", len(self.nodes)] = origin
        self.nodes.append(dict(node) if isinstance(node, dict) else node)
        return len(self.nodes) - 1

    def report(self, path: KeyPath, message: str, *, key: bool = False) -> None:
        """Add a problem of a sub-workflow, whose path `path` starts with, and mark the sub-workflow as not read."""
        self.result.problems.append(self.source.problem(path, message, key=key))
        self.result.unread.add(_key(self.source.data["nodes"][path[1]].get("id")))

    def include(self, data: dict[str, Any], path: KeyPath) -> None:
        """Inline the sub-workflow at `path`."""
        names = frozenset(SubWorkflow.model_fields)
        piece, problems = parse_piece(SubWorkflow, data, self.source, path, essential=names)
        self.result.problems += problems
        if piece is None or problems:
            self.result.unread.add(_key(data.get("id")))
            self.members[_key(data.get("id"))] = ([], [])
            return
        inner = self.open(piece, path)
        kept = filter(named, inner.kept.values())
        graph = {node["id"]: [_key(name) for name in _as_list(node.get("after"))] for node in kept}
        self.members[piece.id] = (piece.renamed(list(graph)), piece.renamed(sinks(graph)))
        outer_agents = self.match_agents(piece, inner, path)
        if inner.source is not self.source:
            self.result.warnings += overruled(inner, self.source, outer_agents)
        for index, node in inner.kept.items():
            agent = inner.agent_of(node)
            if agent is None or agent in outer_agents:
                self.inline(piece, inner, index, outer_agents, path)
        self.merge("loops", {piece.renamed(n): (n, v) for n, v in inner.loops.items()}, inner, piece, path)
        self.merge("envs", {n: (n, v) for n, v in inner.envs.items()}, inner, piece, path)

    def open(self, piece: SubWorkflow, path: KeyPath) -> Inner:
        """Read the file of a sub-workflow. Without parts if it cannot be read, which is reported."""
        empty = Inner(self.source, {}, {}, {}, [])
        base = self.source.origin(path).source.file
        try:
            file = resolve_path(piece.workflow, base)
        except UserError as error:
            self.report((*path, "workflow"), str(error))
            return empty
        if file in self.including:
            names = [*(path.name for path in self.including[self.including.index(file) :]), file.name]
            self.report((*path, "workflow"), f"the file includes itself: {' -> '.join(names)}; remove this node")
            return empty
        beside = Path(base).parent / piece.workflow
        try:
            inner = self.read(beside if beside.is_file() else file)
        except WorkflowError as error:
            self.result.problems += error.problems
            self.result.unread.add(piece.id)
            return empty
        inner = expand(inner, self.read, self.including)
        self.result.problems += inner.problems
        self.result.warnings += inner.warnings
        if inner.unread or inner.problems:
            self.result.unread.add(piece.id)
        nodes = inner.data.get("nodes")
        kept = {i: n for i, n in enumerate(nodes if isinstance(nodes, list) else []) if not left_out(n)}
        if piece.id not in self.result.unread and not any(map(rolls_out, kept.values())):
            self.report((*path, "workflow"), f"`{piece.workflow}` has no rollout node to include; remove this node")
        agents = inner.data.get("agents")
        return Inner(
            source=inner,
            kept=kept,
            loops=_mapping(inner.data.get("loops")),
            envs=_mapping(inner.data.get("envs")),
            agents=agents if isinstance(agents, list) else [],
        )

    def match_agents(self, piece: SubWorkflow, inner: Inner, path: KeyPath) -> dict[str, str]:
        """Return inner agent -> outer agent, by name, and report those without a counterpart."""
        agents = self.source.data.get("agents")
        names = [a["name"] for a in agents if isinstance(a, dict) and "name" in a] if isinstance(agents, list) else []
        # a file without agents that is included itself: the file that includes it has the agents
        any_name = agents is None and len(self.including) > 1
        inner_names = list(dict.fromkeys(n for node in inner.kept.values() if (n := inner.agent_of(node)) is not None))
        for name, outer_name in piece.agents.items():
            if inner_names and name not in inner_names:
                hint = did_you_mean(name, inner_names)
                message = f"`{piece.workflow}` has no rollout node of an agent `{name}`{hint}"
                self.report((*path, "agents", name), message, key=True)
            elif outer_name not in names and not any_name:
                self.report((*path, "agents", name), f"no agent `{outer_name}`{did_you_mean(outer_name, names)}")
        matches = {}
        for name in inner_names:
            outer_name = piece.agents.get(name, name)
            if outer_name in names or any_name:
                matches[name] = outer_name
            elif name not in piece.agents:
                message = (
                    f"`{piece.workflow}` needs an agent `{name}`, which this file does not have; write "
                    f"`agents: {{{name}: NAME}}` with an agent of this file"
                )
                self.report(path, message)
        return matches

    def inline(self, piece: SubWorkflow, inner: Inner, index: int, outer_agents: dict[str, str], path: KeyPath) -> None:
        """Add a node of a sub-workflow, with the names that its parts have in the including file."""
        node = inner.kept[index]
        position = self.add(node, Origin(inner.source, ("nodes", index)))
        if not isinstance(node, dict):
            return
        new = self.nodes[position]
        if named(node):
            new["id"] = piece.renamed(node["id"])
        if (agent := inner.agent_of(node)) is not None:
            new["agent"] = outer_agents[agent]
        if "when" in node:
            new["when"] = renamed_condition(node["when"], piece.renamed)
        spec = node.get("candidates")
        if isinstance(spec, dict) and isinstance(judge := spec.get("by"), str) and ":" not in judge:
            new["candidates"] = {**spec, "by": piece.renamed(judge)}
        if after := _as_list(node.get("after")):
            new["after"] = piece.renamed(after)
        elif piece.after:
            new["after"] = list(piece.after)
            self.result.origins["nodes", position, "after"] = Origin(self.source, (*path, "after"))

    def merge(
        self, key: str, pieces: dict[str, tuple[str, Any]], inner: Inner, piece: SubWorkflow, path: KeyPath
    ) -> None:
        """Add the loops or envs of a sub-workflow. `pieces`: new name -> (name in its file, data)."""
        if not pieces:
            return
        block = self.result.data.get(key, {})
        if not isinstance(block, dict):
            return
        block = self.result.data[key] = dict(block)
        for new, (old, data) in pieces.items():
            if key == "loops" and isinstance(data, dict):
                data = {**data, "nodes": piece.renamed(data.get("nodes"))}
                if "until" in data:
                    data["until"] = renamed_condition(data["until"], piece.renamed)
            origin = Origin(inner.source, (key, old))
            if new in block and _code_of(block[new], self.result.origin((key, new))) != _code_of(data, origin):
                message = f"`{piece.workflow}` has another {key[:-1]} called `{new}`; rename one of them"
                self.report((*path, "workflow"), message)
            elif new not in block:
                block[new] = data
                self.result.origins[key, new] = origin

    def relink(self, node: dict[str, Any], after: list[Any], index: int) -> None:
        """Replace each sub-workflow in `after` of the node by the last nodes of the sub-workflow."""
        ends = [self.members.get(_key(name), ([], [name]))[1] for name in after]
        node["after"] = self.flattened(ends, ("nodes", index, "after"))


def _as_list(value: Any) -> list[Any]:
    """Return several names, or one without a list, as a list; an empty one for anything else."""
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _code_of(data: Any, origin: Origin) -> Any:
    """Return a loop or env with the file of its class by its absolute path: two workflows may mean different files by
    one text."""
    if not isinstance(data, dict) or not isinstance(data.get("path"), str):
        return data
    try:
        return {**data, "path": (find_source(data["path"], origin.source.file), split_ref(data["path"])[1])}
    except UserError:  # a missing file is reported where it is read
        return data


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ""


@dataclass(slots=True)
class Inner:
    """The parts of a sub-workflow that are inlined."""

    source: Source
    kept: dict[int, Any]
    """The nodes by index in their file."""
    loops: dict[str, Any]
    envs: dict[str, Any]
    agents: list[Any]

    def agent_of(self, node: Any) -> str | None:
        """Return the name of the node's agent in the included file, or None."""
        agent = node.get("agent") if isinstance(node, dict) else None
        return agent if isinstance(agent, str) else None


def overruled(inner: Inner, outer: Source, outer_agents: dict[str, str]) -> Iterator[Problem]:
    """Yield a warning for each setting of a sub-workflow that differs from the including file's, which applies.
    `outer_agents`: inner agent -> outer agent."""
    inner_data, file = inner.source.data, Path(outer.file).name
    for key in DECIDED:
        if key in inner_data and inner_data[key] != outer.data.get(key):
            message = f"this has no effect: `{key}` of `{file}` applies"
            yield inner.source.problem((key,), message, key=True)
    agents = outer.data.get("agents")
    outer_specs = [agent for agent in agents if isinstance(agent, dict)] if isinstance(agents, list) else []
    for index, agent in enumerate(inner.agents):
        name = agent.get("name") if isinstance(agent, dict) else None
        if not isinstance(name, str) or name not in outer_agents:
            continue
        outer_agent = next((spec for spec in outer_specs if spec.get("name") == outer_agents[name]), {})
        for key in sorted(agent.keys() & Agent.model_fields.keys() - {"name", "policy"}):
            if agent[key] != outer_agent.get(key):
                message = f"this has no effect: agent `{outer_agents[name]}` of `{file}` is used instead"
                yield inner.source.problem(("agents", index, key), message, key=True)


def rolls_out(node: Any) -> bool:
    return isinstance(node, dict) and "agent" in node


def left_out(node: Any) -> bool:
    return isinstance(node, dict) and bool(LEFT_OUT & node.keys())


def named(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("id"), str)
