"""Sub-workflows: `{node_id: sub, workflow: other.yaml, agents: {theirs: ours}, dependencies: [...]}` in the place of a
node stands for the rollout, vote and compute nodes of that file.

Invariant: a node that was inlined still knows where it is written, so its mistakes are reported in its own file. Loops
and envs come along; rewards, training, agents and policies are this file's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.workflow.graph import sinks
from recipe.dag.workflow.inner import Inner, left_out, named, overruled, rolls_out
from recipe.dag.workflow.paths import resolve_path
from recipe.dag.workflow.pieces import parse_piece
from recipe.dag.workflow.problem import KeyPath, WorkflowError, did_you_mean
from recipe.dag.workflow.refs import resolve_refs
from recipe.dag.workflow.rename import renamed_condition, renamed_list
from recipe.dag.workflow.schema import SubWorkflow
from recipe.dag.workflow.short_form import in_long_form
from recipe.dag.workflow.source import Origin, Source, read_source


def expand(source: Source, including: tuple[Path, ...] = ()) -> Source:
    """The source with every sub-workflow inlined; itself where there is none. `including`: the files that led here."""
    nodes = source.data.get("nodes")
    if not isinstance(nodes, list) or not any(isinstance(node, dict) and "workflow" in node for node in nodes):
        return source
    return _Expansion(source, (*including, Path(source.file).resolve())).run(nodes)


@dataclass(slots=True)
class _Expansion:
    source: Source
    including: tuple[Path, ...]
    result: Source = field(init=False)
    nodes: list[Any] = field(default_factory=list)
    stands_for: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    """Sub-workflow -> (ids of all its nodes, those that nothing in it depends on)."""

    def run(self, nodes: list[Any]) -> Source:
        source = self.source
        self.result = Source(source.file, dict(source.data), problems=source.problems, warnings=source.warnings)
        self.result.unread |= source.unread
        self.result.origins[()] = Origin(source, ())
        for index, node in enumerate(nodes):
            if isinstance(node, dict) and "workflow" in node:
                self.take_in(node, ("nodes", index))
            else:
                self.add(node, Origin(source, ("nodes", index)))
        self.result.data["nodes"] = self.nodes
        for index, node in enumerate(self.nodes):
            if isinstance(node, dict) and isinstance(node.get("dependencies"), list):
                self.relink(node, index)
        loops = self.result.data.get("loops")
        if isinstance(loops, dict):
            self.result.data["loops"] = {name: self.repeated(loop) for name, loop in loops.items()}
        return self.result

    def repeated(self, loop: Any) -> Any:
        """A loop over a sub-workflow repeats all its nodes."""
        if not isinstance(loop, dict) or not isinstance(loop.get("nodes"), list):
            return loop
        names = (self.stands_for.get(_key(name), ([name], []))[0] for name in loop["nodes"])
        return {**loop, "nodes": [name for several in names for name in several]}

    def add(self, node: Any, origin: Origin) -> int:
        self.result.origins["nodes", len(self.nodes)] = origin
        self.nodes.append(dict(node) if isinstance(node, dict) else node)
        return len(self.nodes) - 1

    def say(self, path: KeyPath, message: str, *, key: bool = False) -> None:
        """`path` starts with the sub-workflow's place."""
        self.result.problems.append(self.source.problem(path, message, key=key))
        self.result.unread.add(_key(self.source.data["nodes"][path[1]].get("node_id")))

    def take_in(self, data: dict[str, Any], path: KeyPath) -> None:
        names = frozenset(SubWorkflow.model_fields)
        piece, problems = parse_piece(SubWorkflow, data, self.source, path, essential=names)
        self.result.problems += problems
        if piece is None or problems:
            self.result.unread.add(_key(data.get("node_id")))
            self.stands_for[_key(data.get("node_id"))] = ([], [])
            return
        inner = self.open(piece, path)
        graph = {node["node_id"]: _listed(node, "dependencies") for node in inner.kept.values() if named(node)}
        ends = [f"{piece.node_id}__{name}" for name in sinks(graph)]
        self.stands_for[piece.node_id] = ([f"{piece.node_id}__{name}" for name in graph], ends)
        ours = self.counterparts(piece, inner, path)
        if inner.source is not self.source:
            self.result.warnings += overruled(inner, self.source, ours)
        for index, node in inner.kept.items():
            agent = inner.agent_of(node)
            if agent is None and rolls_out(node) and "agent" not in node:
                message = "say whose node this is by name (`agent: name`); its group names no agent of this file"
                self.result.problems.append(inner.source.problem(("nodes", index), message))
                self.result.unread.add(piece.node_id)
            elif agent is None or agent in ours:
                self.inline(piece, inner, index, node, ours, path)
        self.bring("loops", {f"{piece.node_id}__{n}": (n, v) for n, v in inner.loops.items()}, inner, piece, path)
        self.bring("envs", {n: (n, v) for n, v in inner.envs.items()}, inner, piece, path)

    def open(self, piece: SubWorkflow, path: KeyPath) -> Inner:
        """Its parts; none where the file cannot be read, which is reported."""
        nothing = Inner(self.source, {}, {}, {}, [])
        base = self.source.origin(path).source.file
        try:
            file = resolve_path(piece.workflow, base)
        except UserError as error:
            self.say((*path, "workflow"), str(error))
            return nothing
        if file in self.including:
            names = [*(known.name for known in self.including[self.including.index(file) :]), file.name]
            self.say((*path, "workflow"), f"the file includes itself: {' -> '.join(names)}")
            return nothing
        beside = Path(base).parent / piece.workflow
        try:
            inner = read_source(beside if beside.is_file() else file)
        except WorkflowError as error:
            self.result.problems += error.problems
            self.result.unread.add(piece.node_id)
            return nothing
        resolve_refs(inner)
        inner = expand(in_long_form(inner), self.including)
        self.result.problems += inner.problems
        self.result.warnings += inner.warnings
        if inner.unread or inner.problems:
            self.result.unread.add(piece.node_id)
        nodes = inner.data.get("nodes")
        kept = {i: n for i, n in enumerate(nodes if isinstance(nodes, list) else []) if not left_out(n)}
        if piece.node_id not in self.result.unread and not any(map(rolls_out, kept.values())):
            self.say((*path, "workflow"), f"`{piece.workflow}` has no rollout node to take over")
        parts = {key: inner.data.get(key) for key in ("loops", "envs")}
        agents = inner.data.get("agents")
        found = {key: value if isinstance(value, dict) else {} for key, value in parts.items()}
        return Inner(inner, kept, found["loops"], found["envs"], agents if isinstance(agents, list) else [])

    def counterparts(self, piece: SubWorkflow, inner: Inner, path: KeyPath) -> dict[str, str]:
        """Their agent -> ours."""
        agents = self.source.data.get("agents")
        known = [a["name"] for a in agents if isinstance(a, dict) and "name" in a] if isinstance(agents, list) else []
        anybody = agents is None and len(self.including) > 1  # whoever includes this file has the agents
        theirs = list(dict.fromkeys(n for node in inner.kept.values() if (n := inner.agent_of(node)) is not None))
        for name, mine in piece.agents.items():
            if theirs and name not in theirs:
                message = f"`{piece.workflow}` has no rollout node of an agent `{name}`{did_you_mean(name, theirs)}"
                self.say((*path, "agents", name), message, key=True)
            elif mine not in known and not anybody:
                self.say((*path, "agents", name), f"no agent `{mine}`{did_you_mean(mine, known)}")
        ours = {}
        for name in theirs:
            mine = piece.agents.get(name, name)
            if mine in known or anybody:
                ours[name] = mine
            elif name not in piece.agents:
                message = f"no agent `{name}` here, and `{piece.workflow}` needs it; write `agents: {{{name}: <ours>}}`"
                self.say(path, message)
        return ours

    def inline(
        self, piece: SubWorkflow, inner: Inner, index: int, node: Any, ours: dict[str, str], path: KeyPath
    ) -> None:
        place = self.add(node, Origin(inner.source, ("nodes", index)))
        if not isinstance(node, dict):
            return
        new = self.nodes[place]
        names = {name: f"{piece.node_id}__{name}" for name in inner.ids}
        if named(node):
            new["node_id"] = names[node["node_id"]]
        if (agent := inner.agent_of(node)) is not None:
            new.pop("agent_group", None)
            new["agent"] = ours[agent]
        if "when" in node:
            new["when"] = renamed_condition(node["when"], names)
        if "dependencies" in node:
            new["dependencies"] = renamed_list(node["dependencies"], names)
        if not node.get("dependencies") and piece.dependencies:
            new["dependencies"] = list(piece.dependencies)
            self.result.origins["nodes", place, "dependencies"] = Origin(self.source, (*path, "dependencies"))

    def bring(
        self, key: str, pieces: dict[str, tuple[str, Any]], inner: Inner, piece: SubWorkflow, path: KeyPath
    ) -> None:
        """Its loops or envs: `pieces` is new name -> (name there, data)."""
        if not pieces:
            return
        known = self.result.data.get(key, {})
        if not isinstance(known, dict):
            return
        known = self.result.data[key] = dict(known)
        names = {name: f"{piece.node_id}__{name}" for name in inner.ids}
        for new, (old, data) in pieces.items():
            if key == "loops" and isinstance(data, dict):
                data = {**data, "nodes": renamed_list(data.get("nodes"), names)}
                if "until" in data:
                    data["until"] = renamed_condition(data["until"], names)
            if new in known and known[new] != data:
                message = f"`{piece.workflow}` has another {key[:-1]} called `{new}`; call one of them differently"
                self.say((*path, "workflow"), message)
            elif new not in known:
                known[new] = data
                self.result.origins[key, new] = Origin(inner.source, (key, old))

    def relink(self, node: dict[str, Any], index: int) -> None:
        """Put in the ends of a sub-workflow where the node depends on it."""
        path = ("nodes", index, "dependencies")
        new: list[Any] = []
        origins: dict[KeyPath, Origin] = {}
        for position, name in enumerate(node["dependencies"]):
            origin = self.result.origin((*path, position))
            for end in self.stands_for.get(_key(name), ([], [name]))[1]:
                origins[(*path, len(new))] = origin
                new.append(end)
        node["dependencies"] = new
        self.result.origins |= origins


def _listed(node: dict[str, Any], key: str) -> list[str]:
    value = node.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ""
