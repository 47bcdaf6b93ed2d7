"""`!Ref global_config.a.b`: the value that stands there, put where the tag is.

Invariant: afterwards no `Ref` is left in the data. Legal inside a node's `config` and in what that refers to
(`global_config`); in a key that nothing reads (a parked anchor) it is ignored, as in siiRL.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.draft import TOP_LEVEL
from recipe.dag.workflow.problem import KeyPath, Problem, WorkflowError, render_path
from recipe.dag.workflow.source import MAX_VALUES, Ref, Source

MAX_CHAIN = 50
"""References to references; more are refused."""


def resolve_refs(source: Source) -> None:
    """Mistakes go to `source.problems`; what a wrong one stands for is None. Raises WorkflowError where references to
    references unfold a small file into too many values."""
    source.data = _Resolver(source).value(source.data, (), ())


class _Resolver:
    def __init__(self, source: Source):
        self.source = source
        self.known = {"global_config": source.data.get("global_config")}
        self.count = self.failed = 0
        self.circles: list[set[str]] = []
        """Each is told once, wherever one enters it."""

    def value(self, value: Any, path: KeyPath, trail: tuple[str, ...]) -> Any:
        """`value`, which stands at `path`, without references; `trail`: those that led here."""
        if trail:
            self._count(path)
        if isinstance(value, dict):
            return {key: self.value(item, (*path, key), trail) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, (*path, index), trail) for index, item in enumerate(value)]
        if not isinstance(value, Ref) or path[0] not in TOP_LEVEL:
            return None if isinstance(value, Ref) else value
        if path[0] != "global_config" and not (path[0] == "nodes" and len(path) > 2 and path[2] == "config"):
            self._say(path, "`!Ref` may stand only inside a node's `config`")
        return self.target(value, path, trail)

    def target(self, ref: Ref, path: KeyPath, trail: tuple[str, ...]) -> Any:
        if ref.target in trail:
            self.failed += 1
            circle = trail[trail.index(ref.target) :]
            if set(circle) not in self.circles:
                self.circles.append(set(circle))
                shown = " -> ".join((*circle, ref.target))
                self._say(path, f"`!Ref {ref.target}` leads back to itself ({shown}); write a value in one of these")
            return None
        if len(trail) == MAX_CHAIN:
            self._say(path, f"more than {MAX_CHAIN} references lead here one after the other; write the value itself")
            return None
        before = self.failed
        found: Any = self.known
        at: KeyPath = ()
        for part in ref.target.split("."):
            if isinstance(found, Ref):
                found = self.target(found, at, (*trail, ref.target))
            found = found.get(part) if isinstance(found, dict) else None
            at = (*at, part)
        if found is not None and ref.target.startswith("global_config."):
            return self.value(found, at, (*trail, ref.target))
        if self.failed == before:
            message = f"`!Ref {ref.target}` names nothing; write `!Ref global_config.name` of a value that is set"
            self._say(path, message)
        return None

    def _count(self, path: KeyPath) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            message = f"the references unfold into more than {MAX_VALUES} values"
            raise WorkflowError([Problem(self.source.file, *self.source.at(path), render_path(path), message)])

    def _say(self, path: KeyPath, message: str) -> None:
        self.failed += 1
        self.source.problems.append(self.source.problem(path, message))
