"""YAML text as plain data, with the place of every key and value.

Invariant: what comes out is made of dict, list, str, int, float, bool, None and `Ref` only; no tag builds an object.
Keys are text and occur once, numbers are finite. Everything else is a problem with a place.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from recipe.dag.workflow.json_text import json_as_yaml
from recipe.dag.workflow.problem import KeyPath, Problem, WorkflowError, render_path

MAX_VALUES = 100_000
"""Aliases of aliases can unfold a small file into billions of values."""

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Ref:
    """`!Ref global_config.a.b`, not yet looked up."""

    target: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value that was moved or inlined really stands."""

    source: Source
    path: KeyPath


@dataclass(slots=True)
class Source:
    """A file's data. Positions are (line, column), 1-based; an aliased value stands where its anchor does."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Mistakes that leave the rest of the file readable."""
    warnings: list[Problem] = field(default_factory=list)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    """Of values that this source took over from another place; it holds for all that is inside them, too."""
    unread: set[str] = field(default_factory=set)
    """Sub-workflows that could not be read whole: what seems to be missing may stand there."""

    def origin(self, path: KeyPath) -> Origin:
        for depth in range(len(path), -1, -1):
            if (found := self.origins.get(path[:depth])) is not None:
                return found.source.origin((*found.path, *path[depth:]))
        return Origin(self, path)

    def has(self, path: KeyPath) -> bool:
        """The user wrote this key or list item."""
        origin = self.origin(path)
        return origin.path in origin.source.values

    def at(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """The place of the value at `path` (or of its key); of the nearest enclosing value where the file has none."""
        origin = self.origin(path)
        if origin.source is not self:
            return origin.source.at(origin.path, key=key)
        path = origin.path
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, (1, 1))

    def problem(self, path: KeyPath, message: str, *, key: bool = False) -> Problem:
        origin = self.origin(path)
        place = origin.source.at(origin.path, key=key)
        return Problem(origin.source.file, *place, render_path(origin.path), message)


def nowhere(source: Source, path: KeyPath) -> Origin:
    """A place near `path` that the file has not: of what a translation left out or made up."""
    return Origin(source, (*path, "\0"))


def read_source(path: str | Path) -> Source:
    """Raises WorkflowError where the file cannot be read as one YAML mapping."""
    file = str(path)
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise WorkflowError([Problem(file, 0, 0, "", "no such file")]) from None
    except OSError as error:
        raise WorkflowError([Problem(file, 0, 0, "", f"cannot read the file: {error.strerror}")]) from error
    return parse_source(raw, file)


def parse_source(raw: bytes, file: str) -> Source:
    text = _decode(raw, file)
    root = _compose(json_as_yaml(text, file) if file.endswith(".json") else text, file)
    if root is None:
        raise WorkflowError([Problem(file, 1, 1, "", "the file is empty; a workflow starts with `dag_id: name`")])
    source = Source(file)
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else f"`{root.value}`"
        message = f"expected a mapping with keys such as `dag_id` and `nodes`, got {kind}"
        raise WorkflowError([Problem(file, *_mark(root), "", message)])
    source.data = _Builder(source).build(root, ())
    return source


def _decode(raw: bytes, file: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = len(raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", "replace")) + 1
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise WorkflowError([Problem(file, line, column, "", message)]) from error


def _compose(text: str, file: str) -> Node | None:
    try:
        with warnings.catch_warnings():
            # YAML lets an anchor be set again; ruamel warns about it.
            warnings.simplefilter("ignore")
            return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise WorkflowError([Problem(file, *place, "", _syntax_message(error))]) from error
    except ReaderError as error:
        before = text[: error.position]
        place = (before.count("\n") + 1, error.position - before.rfind("\n"))
        message = f"the character U+{error.character:04X} may not stand in YAML"
        raise WorkflowError([Problem(file, *place, "", message)]) from error
    except RecursionError as error:
        raise WorkflowError([Problem(file, 1, 1, "", "the file is nested too deeply")]) from error
    except YAMLError as error:
        raise WorkflowError([Problem(file, 1, 1, "", f"not readable as YAML: {error}")]) from error


def _syntax_message(error: MarkedYAMLError) -> str:
    problem = error.problem or error.context or "not readable as YAML"
    if "'\\t'" in problem:
        return "a tab cannot indent or separate in YAML; use spaces"
    if "undefined alias" in problem:
        return f"undefined alias `*{problem.split(chr(39))[1]}`; an anchor `&name` must come before its alias"
    if "another document" in problem:
        return "a second document starts here; a workflow file holds one"
    if "mapping values are not allowed" in problem:
        return "a `:` cannot stand here; quote the text, or check the indentation"
    return f"YAML syntax: {problem}" + (f" ({error.context})" if error.context else "")


def _mark(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Builder:
    """Turns composed nodes into data, filling the source's positions and problems."""

    def __init__(self, source: Source):
        self.source = source
        self.open: set[int] = set()
        self.count = 0

    def problem(self, node: Node, path: KeyPath, message: str) -> None:
        self.source.problems.append(Problem(self.source.file, *_mark(node), render_path(path), message))

    def build(self, node: Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            message = f"the aliases unfold into more than {MAX_VALUES} values"
            raise WorkflowError([Problem(self.source.file, *_mark(node), render_path(path), message)])
        self.source.values[path] = _mark(node)
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            self.problem(node, path, "an anchor cannot contain its own alias")
            return None
        if str(node.tag) not in (_TAG + "map", _TAG + "seq"):
            self.problem(node, path, f"the tag `{_short(node)}` is not allowed here")
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            entries = self.entries(node, path)
            self.source.keys.update({(*path, key): _mark(key_node) for key, (key_node, _) in entries.items()})
            return {key: self.build(value, (*path, key)) for key, (_, value) in entries.items()}
        finally:
            self.open.discard(id(node))

    def entries(self, node: MappingNode, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        """The mapping's keys, then those that `<<` adds."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if str(key.tag) == _TAG + "merge":
                merged = {**self.merged(value, path), **merged}
            elif not isinstance(key, ScalarNode) or str(key.tag) != _TAG + "str":
                shown = key.value if isinstance(key, ScalarNode) else "..."
                self.problem(key, path, f"a key must be text, `{shown}` is not; quote it")
            elif key.value in own:
                first = _mark(own[key.value][0])[0]
                message = f"the key `{key.value}` occurs twice (first in line {first}); remove one"
                self.problem(key, (*path, key.value), message)
            else:
                own[key.value] = (key, value)
        return own | {key: entry for key, entry in merged.items() if key not in own}

    def merged(self, node: Node, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        """What `<<: node` brings; the first of several mappings wins."""
        result: dict[str, tuple[Node, Node]] = {}
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(part, MappingNode) or id(part) in self.open:
                self.problem(part, path, "`<<` merges a mapping or a list of mappings, never itself")
                continue
            self.open.add(id(part))
            result = {**self.entries(part, path), **result}
            self.open.discard(id(part))
        return result

    def scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag, text = str(node.tag), node.value
        if tag == "!Ref":
            return Ref(text.strip())
        if not tag.startswith(_TAG):
            self.problem(node, path, f"the tag `{_short(node)}` is not allowed; only `!Ref global_config.name` is")
            return text
        kind = tag.removeprefix(_TAG)
        if kind in ("str", "timestamp", "value"):
            return text
        if kind == "null":
            return None
        try:
            if kind == "bool":
                return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text.lower()]
            if kind == "int":
                return _integer(text)
            if kind == "float":
                return self.finite(node, path)
        except (KeyError, ValueError):
            self.problem(node, path, f"`{text}` is no {kind}")
            return text
        self.problem(node, path, f"the tag `{_short(node)}` is not allowed; only `!Ref global_config.name` is")
        return text

    def finite(self, node: ScalarNode, path: KeyPath) -> float:
        text = node.value.lower().replace("_", "")
        value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
        if math.isfinite(value):
            return value
        self.problem(node, path, f"a number must be finite, got {node.value}")
        return 1.0


def _integer(text: str) -> int:
    text = text.replace("_", "")
    unsigned = text.lstrip("+-").lower()
    base = {"0x": 16, "0o": 8, "0b": 2}.get(unsigned[:2], 10)
    return int(text, base)


def _short(node: Node) -> str:
    return str(node.tag).replace(_TAG, "!!")
