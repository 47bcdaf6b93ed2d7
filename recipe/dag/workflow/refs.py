"""Resolution of `!Ref global_config.a.b`, which is replaced by the value at that path.

Invariant: afterwards the data contains no `Ref`. References are allowed inside a node's `config` and in
`global_config`; in a key that is not read (one that holds anchors) they are ignored.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.core.problem import KeyPath, Problem, WorkflowError, render_path
from recipe.dag.workflow.draft import TOP_LEVEL
from recipe.dag.workflow.source import MAX_VALUES, Ref, Source

MAX_CHAIN = 50
"""Maximum length of a chain of references to references."""


def resolve_refs(source: Source) -> None:
    """Replace all references. Errors are appended to `source.problems`; an unresolved reference becomes None. Raises
    WorkflowError if references to references expand a small file into too many values."""
    source.data = _Resolver(source).value(source.data, (), ())


class _Resolver:
    def __init__(self, source: Source):
        self.source = source
        self.root = {"global_config": source.data.get("global_config")}
        self.count = self.failed = 0
        self.cycles: list[set[str]] = []
        """Reported cycles. Each is reported once."""

    def value(self, value: Any, path: KeyPath, trail: tuple[str, ...]) -> Any:
        """Return the value at `path` without references. `trail`: the references that led to it."""
        if trail:
            self._count(path)
        if isinstance(value, dict):
            return {key: self.value(item, (*path, key), trail) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, (*path, index), trail) for index, item in enumerate(value)]
        if not isinstance(value, Ref) or path[0] not in TOP_LEVEL:
            return None if isinstance(value, Ref) else value
        if path[0] != "global_config" and not (path[0] == "nodes" and len(path) > 2 and path[2] == "config"):
            self._report(path, "`!Ref` is allowed only inside a node's `config`; write the value itself")
        return self.target(value, path, trail)

    def target(self, ref: Ref, path: KeyPath, trail: tuple[str, ...]) -> Any:
        """Return the value that a reference at `path` names, or None."""
        if ref.target in trail:
            self.failed += 1
            cycle = trail[trail.index(ref.target) :]
            if set(cycle) not in self.cycles:
                self.cycles.append(set(cycle))
                chain = " -> ".join((*cycle, ref.target))
                self._report(path, f"`!Ref {ref.target}` refers to itself ({chain}); write a value in one of these")
            return None
        if len(trail) == MAX_CHAIN:
            self._report(path, f"a chain of more than {MAX_CHAIN} references ends here; write the value itself")
            return None
        failed_before = self.failed
        value: Any = self.root
        value_path: KeyPath = ()
        for part in ref.target.split("."):
            if isinstance(value, Ref):
                value = self.target(value, value_path, (*trail, ref.target))
            value = value.get(part) if isinstance(value, dict) else None
            value_path = (*value_path, part)
        if value is not None and ref.target.startswith("global_config."):
            return self.value(value, value_path, (*trail, ref.target))
        if self.failed == failed_before:
            message = (
                f"`!Ref {ref.target}` does not name a value; write `!Ref global_config.NAME` with a NAME that is set"
            )
            self._report(path, message)
        return None

    def _count(self, path: KeyPath) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            message = f"the references expand into more than {MAX_VALUES} values"
            raise WorkflowError([Problem(self.source.file, *self.source.at(path), render_path(path), message)])

    def _report(self, path: KeyPath, message: str) -> None:
        self.failed += 1
        self.source.problems.append(self.source.problem(path, message))
