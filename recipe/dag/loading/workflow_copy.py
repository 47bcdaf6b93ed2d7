"""A workflow's data while it is edited, with comments and order.

Invariant: each value that is set or removed is recorded with its argument of the command line, so that errors in the
result are reported against that argument.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import merge_attrib
from ruamel.yaml.error import ReusedAnchorWarning

from recipe.dag.compat.long_form import is_long, long_fields, read_node
from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import resolve_path, split_ref
from recipe.dag.core.problem import KeyPath, Problem, contains, render_path


class WorkflowCopy:
    def __init__(self, text: str):
        self._yaml = YAML()
        self._yaml.preserve_quotes, self._yaml.width = True, 120
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # legal: the latest one applies
            self.data: dict[str, Any] = self._yaml.load(text)
        _unfold(self.data, set())
        if isinstance(nodes := self.data.get("nodes"), list):  # edits use keys of the schema
            agents = self.data.get("agents") or []
            nodes[:] = [read_node(node, agents).node if is_long(node) else node for node in nodes]
        self._changes: dict[str, tuple[str, Any]] = {}
        """Path -> (argument, value that it set there)."""

    def text(self) -> str:
        out = io.StringIO()
        self._yaml.dump(self.data, out)
        return out.getvalue()

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`, or None."""
        value: Any = self.data
        for key in path:
            is_entry = isinstance(value, dict) and key in value
            is_item = isinstance(value, list) and isinstance(key, int) and key < len(value)
            if not (is_entry or is_item):
                return None
            container: Any = value
            value = container[key]
        return value

    def has(self, path: KeyPath) -> bool:
        """Return whether the key exists; its value may be None."""
        *parents, last = path
        container = self.get(*parents)
        return last in container if isinstance(container, dict) else isinstance(container, list)

    def set(self, path: KeyPath, value: Any, argument: str) -> None:
        """Set the value at `path`, for `argument`. Raises UserError if a parent of the key is not a mapping."""
        *parents, last = path
        container: Any = self.data
        for key in parents:
            if isinstance(container, dict) and container.get(key) is None:
                container[key] = {}
            container = container[key] if isinstance(container, dict) or isinstance(key, int) else None
        if not isinstance(container, dict):
            raise UserError(f"{argument}: `{last}` is inside a value that is not a mapping; set the whole value")
        container[last] = value
        self._changes[render_path(path)] = argument, value

    def drop(self, path: KeyPath, argument: str) -> None:
        """Remove the key at `path`, for `argument`, if it has a value."""
        *parents, last = path
        if self.get(*path) is not None:
            removed = self.get(*parents).pop(last)
            # a node is known by its name, since later nodes take its place in the list
            named = (*parents, removed["id"]) if isinstance(last, int) else path
            self._changes[render_path(named)] = argument, named[-1] if named is not path else None

    def trained(self) -> list[KeyPath]:
        """Return the paths of the policies that are trained: neither frozen nor behind an API nor a past self."""
        keys, policies = ("frozen", "api", "snapshot_of"), self.data["policies"].items()
        return [("policies", name) for name, policy in policies if not any(policy.get(key) for key in keys)]

    def stepping(self) -> list[KeyPath]:
        """Return the paths of the nodes that step an env."""
        nodes = enumerate(self.data["nodes"])
        return [("nodes", i) for i, node in nodes if node.get("env")]

    def blamed(self, problem: Problem) -> str:
        """Return the argument that caused a problem of the edited workflow: the one that changed the value of the
        problem or whose value the message names. All arguments if it cannot be determined."""
        related = [path for path in self._changes if contains(path, problem.where) or contains(problem.where, path)]
        if related:
            return self._changes[max(related, key=len)][0]
        words = set(re.findall(r"\w+", problem.message))
        named = [argument for argument, value in self._changes.values() if isinstance(value, str) and value in words]
        return named[0] if named else self.arguments()

    def arguments(self) -> str:
        """Return all arguments that changed a value, in order, joined by spaces."""
        return " ".join(dict.fromkeys(argument for argument, _ in self._changes.values()))

    def decided(self) -> tuple[str, ...]:
        """Return the options that were set, each by its path and by its names in both forms in backquotes."""
        keys = [path.rpartition(".")[2] for path in self._changes]
        return (*self._changes, *(f"`{name}`" for key in keys for name in (key, *long_fields(key))))

    def anchor(self, source: Path) -> None:
        """Make relative paths of files in the workflow absolute."""
        for container, key, value in list(_texts(self.data)):
            if split_ref(value)[0].endswith((".py", ".yaml", ".yml")) or key == "template":
                with suppress(UserError, OSError):  # a text that only looks like a path
                    file, name = resolve_path(value, source), split_ref(value)[1]
                    container[key] = f"{file}:{name}" if name else str(file)


def _unfold(data: Any, seen: set[int]) -> None:
    """Copy merged keys and aliased values to where they are used, so that an edit changes only the value it names."""
    if getattr(data, merge_attrib, None):
        merged = {key: data[key] for key in data}
        delattr(data, merge_attrib)
        data.update(merged)
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            if id(value) in seen:
                data[key] = value = deepcopy(value)
            seen.add(id(value))
            _unfold(value, seen)


def _texts(data: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield (mapping or list, key or index, text) of every text in `data`."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            yield from _texts(value)
        elif isinstance(value, str):
            yield data, key, value
