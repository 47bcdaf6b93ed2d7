"""A workflow's data while it is edited, comments and order kept.

Invariant: whatever is set or removed here is known to have been brought by an argument of the command line, so that
what is wrong with the result can be told of that argument.
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

from recipe.dag.errors import UserError
from recipe.dag.workflow.paths import resolve_path, split_ref
from recipe.dag.workflow.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.short_form import is_short, long_node


class WorkflowCopy:
    def __init__(self, text: str):
        self._yaml = YAML()
        self._yaml.preserve_quotes, self._yaml.width = True, 120
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # legal: the latest one counts
            self.data: dict[str, Any] = self._yaml.load(text)
        _unfold(self.data, set())
        if isinstance(nodes := self.data.get("nodes"), list):  # flags are of the long form
            nodes[:] = [long_node(node)[0] if is_short(node) else node for node in nodes]
        self._brought: dict[str, tuple[str, Any]] = {}

    def text(self) -> str:
        out = io.StringIO()
        self._yaml.dump(self.data, out)
        return out.getvalue()

    def get(self, *path: str | int) -> Any:
        """None where there is nothing."""
        place: Any = self.data
        for key in path:
            if isinstance(place, dict):
                there = key in place
            else:
                there = isinstance(place, list) and isinstance(key, int) and key < len(place)
            if not there:
                return None
            place = place[key]
        return place

    def has(self, path: KeyPath) -> bool:
        """Whether the key is there, whatever its value."""
        *parents, last = path
        place = self.get(*parents)
        return isinstance(place, dict) and last in place

    def set(self, path: KeyPath, value: Any, argument: str) -> None:
        *parents, last = path
        place: Any = self.data
        for key in parents:
            if isinstance(place, dict) and place.get(key) is None:
                place[key] = {}
            place = place[key] if isinstance(place, dict) or isinstance(key, int) else None
        if not isinstance(place, dict):
            raise UserError(f"{argument}: `{last}` is inside a value that has no keys; set all of that value")
        place[last] = value
        self._brought[render_path(path)] = argument, value

    def drop(self, path: KeyPath, argument: str) -> None:
        *parents, last = path
        if self.get(*path) is not None:
            self.get(*parents).pop(last)
            self._brought[render_path(path)] = argument, None

    def trained(self) -> list[KeyPath]:
        """The policies that are not frozen."""
        return [("policies", name) for name, policy in self.data["policies"].items() if not policy.get("frozen")]

    def stepping(self) -> list[KeyPath]:
        """The nodes that step an env."""
        nodes = enumerate(self.data["nodes"])
        return [("nodes", i) for i, node in nodes if (node.get("agent_options") or {}).get("env_path")]

    def blamed(self, problem: Problem) -> str:
        """The argument to which a problem of the edited workflow goes back: it changed that place, or what it set is
        named in the message. All of them where no one stands out."""
        near = [place for place in self._brought if _holds(place, problem.where) or _holds(problem.where, place)]
        if near:
            return self._brought[max(near, key=len)][0]
        words = set(re.findall(r"\w+", problem.message))
        named = [argument for argument, value in self._brought.values() if isinstance(value, str) and value in words]
        return named[0] if named else self.arguments()

    def arguments(self) -> str:
        """All that changed something, in the order in which they did."""
        return " ".join(dict.fromkeys(argument for argument, _ in self._brought.values()))

    def decided(self) -> tuple[str, ...]:
        """The options that were set, by their path and by their name in backquotes."""
        return tuple(name for place in self._brought for name in (place, f"`{place.rpartition('.')[2]}`"))

    def anchor(self, source: Path) -> None:
        """Files that the workflow names by a relative path get their absolute one."""
        for place, key, value in list(_texts(self.data)):
            if split_ref(value)[0].endswith((".py", ".yaml", ".yml")):
                with suppress(UserError):  # a text that only looks like a file
                    file, name = resolve_path(value, source), split_ref(value)[1]
                    place[key] = f"{file}:{name}" if name else str(file)


def _unfold(data: Any, seen: set[int]) -> None:
    """Merged keys become a mapping's own and aliases copies, so that an edit changes what it names and nothing else."""
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


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _texts(data: Any) -> Iterator[tuple[Any, Any, str]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            yield from _texts(value)
        elif isinstance(value, str):
            yield data, key, value
