"""YAML or JSON text as plain data, with the position of every key and value.

Invariant: the data consists of dict, list, str, int, float, bool, None and `Ref` only; no tag creates an object. Keys
are text and occur once, numbers are finite. Everything else is a problem with its position.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from recipe.dag.core.problem import KeyPath, Problem, WorkflowError, render_path

MAX_VALUES = 100_000
"""Limit of a file's values: aliases of aliases could expand a small file into billions."""

_TAG = "tag:yaml.org,2002:"
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
"""A surrogate pair of escapes: one character in JSON, two invalid ones in YAML."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An unresolved `!Ref global_config.a.b`."""

    target: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The file and path in which a moved or inlined value is written."""

    source: Source
    path: KeyPath


@dataclass(slots=True)
class Source:
    """A file's data. Positions are (line, column), 1-based; an aliased value has the position of its anchor."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    has_refs: bool = False
    """Whether the data contains a `Ref`."""
    problems: list[Problem] = field(default_factory=list)
    """Mistakes that leave the rest of the file readable."""
    warnings: list[Problem] = field(default_factory=list)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    """Origins of values that were taken over from elsewhere; an origin applies to everything inside its value."""
    unread: set[str] = field(default_factory=set)
    """Sub-workflows that could not be read completely: a node that seems to be missing may be part of one. "" if any
    node may be missing."""

    def origin(self, path: KeyPath) -> Origin:
        """Return where the value at `path` is written."""
        for depth in range(len(path), -1, -1):
            if (origin := self.origins.get(path[:depth])) is not None:
                return origin.source.origin((*origin.path, *path[depth:]))
        if path[-1:] == (0,) and path not in self.values and path[:-1] in self.values:
            path = path[:-1]  # one value in place of a list
        return Origin(self, path)

    def has(self, path: KeyPath) -> bool:
        """Return whether the user wrote this key or list item."""
        origin = self.origin(path)
        return origin.path in origin.source.values

    def at(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """Return the position of the value at `path`, or of its key; of the nearest enclosing value if the file does
        not contain it."""
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
        """Return a problem at the position of the value at `path`, or of its key."""
        origin = self.origin(path)
        position = origin.source.at(origin.path, key=key)
        return Problem(origin.source.file, *position, render_path(origin.path), message)


def nowhere(source: Source, path: KeyPath) -> Origin:
    """Return an origin below `path` that the file does not contain, for values that a translation removed or added."""
    return Origin(source, (*path, "\0"))


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at `path`; None if there is none."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def read_source(path: str | Path) -> Source:
    """Read a YAML or JSON file. Raises WorkflowError if it cannot be read as one mapping."""
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
        # not its text: a workflow may name any file as a sub-workflow, also one with a secret
        kind = "a list" if isinstance(root, SequenceNode) else "one value"
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


@functools.lru_cache(maxsize=16)  # a command loads a file up to five times; nothing changes the nodes
def _compose(text: str, file: str) -> Node | None:
    try:
        with warnings.catch_warnings():
            # YAML allows an anchor to be set again; ruamel warns about it.
            warnings.simplefilter("ignore")
            return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise WorkflowError([Problem(file, *position, "", _syntax_message(error))]) from error
    except ReaderError as error:
        before = text[: error.position]
        position = (before.count("\n") + 1, error.position - before.rfind("\n"))
        message = f"the character U+{error.character:04X} is not allowed in YAML; remove it"
        raise WorkflowError([Problem(file, *position, "", message)]) from error
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
        return "a second document starts here; a workflow file contains one"
    if "mapping values are not allowed" in problem:
        return "a `:` is not allowed here; quote the text, or check the indentation"
    return f"YAML syntax: {problem}" + (f" ({error.context})" if error.context else "")


def _mark(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Builder:
    """Converts composed nodes to data, and fills the source's positions and problems."""

    def __init__(self, source: Source):
        self.source = source
        self.open: set[int] = set()
        self.count = 0

    def problem(self, node: Node, path: KeyPath, message: str) -> None:
        self.source.problems.append(Problem(self.source.file, *_mark(node), render_path(path), message))

    def build(self, node: Node, path: KeyPath) -> Any:
        self.expand(1, node, path)
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
            assert isinstance(node, MappingNode), node
            entries = self.entries(node, path)
            self.source.keys.update({(*path, key): _mark(key_node) for key, (key_node, _) in entries.items()})
            return {key: self.build(value, (*path, key)) for key, (_, value) in entries.items()}
        finally:
            self.open.discard(id(node))

    def expand(self, values: int, node: Node, path: KeyPath) -> None:
        """Count values. Raises WorkflowError if there are too many."""
        self.count += values
        if self.count > MAX_VALUES:
            message = f"the aliases expand into more than {MAX_VALUES} values"
            raise WorkflowError([Problem(self.source.file, *_mark(node), render_path(path), message)])

    def entries(self, node: MappingNode, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        """Return (key node, value node) by key: the mapping's own keys, then those that `<<` adds."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if str(key.tag) == _TAG + "merge":
                merged = {**self.merged(value, path), **merged}
            elif not isinstance(key, ScalarNode) or str(key.tag) != _TAG + "str":
                text = key.value if isinstance(key, ScalarNode) else "..."
                self.problem(key, path, f"a key must be text, `{text}` is not; quote it")
            elif key.value in own:
                first = _mark(own[key.value][0])[0]
                message = f"the key `{key.value}` occurs twice (first in line {first}); remove one"
                self.problem(key, (*path, key.value), message)
            else:
                own[key.value] = (key, value)
        return own | {key: entry for key, entry in merged.items() if key not in own}

    def merged(self, node: Node, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        """Return the entries that `<<: node` adds; the first of several mappings wins."""
        result: dict[str, tuple[Node, Node]] = {}
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(part, MappingNode) or id(part) in self.open:
                self.problem(part, path, "`<<` merges a mapping or a list of mappings, but not itself")
                continue
            self.open.add(id(part))
            self.expand(1 + len(part.value), part, path)
            result = {**self.entries(part, path), **result}
            self.open.discard(id(part))
        return result

    def scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag, text = str(node.tag), node.value
        if tag == "!Ref":
            self.source.has_refs = True
            return Ref(text.strip())
        kind = tag.removeprefix(_TAG) if tag.startswith(_TAG) else ""
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
            self.problem(node, path, f"`{text}` is not a valid {kind}; quote it if it is text")
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


def json_as_yaml(text: str, file: str) -> str:
    """Return JSON text as YAML with the same positions. Raises WorkflowError for invalid JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        position = (error.lineno, error.colno)
        raise WorkflowError([Problem(file, *position, "", f"JSON syntax: {error.msg.lower()}")]) from error
    except RecursionError as error:
        raise WorkflowError([Problem(file, 1, 1, "", "the file is nested too deeply")]) from error
    # In valid JSON, tabs occur between tokens only, where YAML does not allow them.
    return _PAIR.sub(_one_character, text.replace("\t", " "))


def _one_character(match: re.Match[str]) -> str:
    high, low = int(match[2], 16), int(match[3], 16)
    return f"{match[1]}\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"
