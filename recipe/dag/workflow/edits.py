"""`workflow.agents.planner.sampling.temperature=0.7` on the command line overrides a value of the workflow for one run.

Invariant: the file itself is not touched, and must be valid by itself. What an edit cannot find a place for, and what
is wrong with the edited workflow, is an error that names the argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from recipe.dag.errors import UserError
from recipe.dag.workflow.draft import TOP_LEVEL
from recipe.dag.workflow.json_text import json_as_yaml
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.problem import KeyPath, Problem, WorkflowError, did_you_mean
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.short_form import LONG
from recipe.dag.workflow.workflow_copy import WorkflowCopy

PREFIX = "workflow."
EVERY = "*"
"""In the place of an agent's, policy's or node's name: all of them."""


@dataclass(frozen=True, slots=True)
class Edit:
    argument: str
    """As it was typed."""
    keys: tuple[str, ...]
    value: Any
    removes: bool = False
    """`~workflow.algorithm.group_by`: as if the file did not have it."""


def split_edits(arguments: Iterable[str]) -> tuple[list[str], list[Edit]]:
    """Return (the arguments that are the run's, those that are the workflow's). Raises UserError for a value that is no
    YAML."""
    rest, edits = [], []
    for argument in arguments:
        if argument.lstrip("+~").startswith(PREFIX):
            edits.append(_parsed(argument))
        else:
            rest.append(argument)
    return rest, edits


def load_edited(path: str | Path, edits: Sequence[Edit]) -> Workflow:
    """Return the workflow with the edits, its text under `edited`. Raises WorkflowError for the file, UserError for the
    edits."""
    workflow = load_workflow(path)
    if not edits:
        return workflow
    copy = copy_of(Path(path))
    if "agents" not in copy.data:
        raise UserError(f"{edits[0].argument}: {path} is in siiRL's form; rewrite it first: verl-dag import {path}")
    for edit in edits:
        for place in _places(copy.data, edit):
            place = _as_written(copy, place)
            if not edit.removes:
                copy.set(place, edit.value, edit.argument)
            elif copy.has(place):
                copy.drop(place, edit.argument)
            else:
                raise UserError(f"{edit.argument}: the file does not have this key, so there is nothing to leave out")
    text = json.dumps(copy.data, indent=1, default=str) if Path(path).suffix == ".json" else copy.text()
    try:
        edited = load_workflow(path, text)
        found = {(warning.where, warning.message): warning for warning in workflow.warnings}
        warnings = tuple(found.get((new.where, new.message)) or _at_argument(new, copy) for new in edited.warnings)
        return edited.model_copy(update={"edited": text, "warnings": warnings})
    except WorkflowError as error:
        lines = {f"{copy.blamed(problem)}: {problem.where}: {problem.message}": None for problem in error.problems}
        raise UserError("\nerror: ".join(lines)) from error


def _at_argument(problem: Problem, copy: WorkflowCopy) -> Problem:
    """The problem without a place in the file, which is not the text that it was found in."""
    return replace(problem, file=copy.blamed(problem), line=0, column=0)


def _parsed(argument: str) -> Edit:
    key, equals, value = argument.partition("=")
    removes = key.startswith("~")
    keys = tuple(key.lstrip("+~").removeprefix(PREFIX).split("."))
    if removes == bool(equals) or not all(keys):
        raise UserError(f"{argument}: write workflow.<key>=VALUE, or ~workflow.<key> to leave a key out")
    try:
        loaded = YAML(typ="safe", pure=True).load(value) if equals else None
        one_dependency = keys[0] == "nodes" and keys[2:] == ("after",) and isinstance(loaded, str)
        return Edit(argument, keys, [loaded] if one_dependency else loaded, removes)
    except YAMLError as error:
        raise UserError(f"{argument}: the value is not valid YAML; quote it") from error


def _as_written(copy: WorkflowCopy, path: KeyPath) -> KeyPath:
    """The path with the keys of a `config` joined by dots, where the file writes them so."""
    if "config" in path:
        depth = path.index("config") + 1
        dotted = (*path[:depth], ".".join(map(str, path[depth:])))
        return dotted if len(path) > depth and copy.has(dotted) else path
    return path


def copy_of(path: Path, text: str | None = None) -> WorkflowCopy:
    """Return the file's data for editing; `text`: the file's, where the command line has edited it. Raises
    UserError."""
    try:
        text = text or path.read_text("utf-8-sig")
        return WorkflowCopy(json_as_yaml(text, str(path)) if path.suffix == ".json" else text)
    except (UnicodeDecodeError, YAMLError) as error:
        raise UserError(f"{path}: flags can change a workflow in UTF-8 only; save it as that") from error


def _places(data: dict[str, Any], edit: Edit) -> Iterator[KeyPath]:
    """Where in the file the value belongs."""
    block, *rest = edit.keys
    if block not in TOP_LEVEL:
        raise UserError(f"{edit.argument}: a workflow has no `{block}`{did_you_mean(block, TOP_LEVEL)}")
    if block not in ("agents", "nodes", "policies"):
        yield edit.keys
        return
    names = _names(data, block)
    what = {"agents": "agent", "nodes": "node", "policies": "policy"}[block]
    if not rest:
        raise UserError(f"{edit.argument}: name one, as in workflow.{block}.{next(iter(names), what)}.<key>=VALUE")
    if rest[0] != EVERY and rest[0] not in names:
        hint = did_you_mean(rest[0], names)
        raise UserError(f"{edit.argument}: no {what} `{rest[0]}`{hint} (`{EVERY}`: all of them)")
    name, *inner = rest
    if not inner:
        raise UserError(f"{edit.argument}: say which of its keys, as in workflow.{block}.{name}.<key>=VALUE")
    if block == "nodes" and inner[0] in LONG:
        inner = [*LONG[inner[0]], *inner[1:]]
    for key in names.values() if name == EVERY else (names[name],):
        yield block, key, *inner


def _names(data: dict[str, Any], block: str) -> dict[str, str | int]:
    """Name -> key in the block."""
    if block == "policies":
        return {name: name for name in data[block]}
    key = "name" if block == "agents" else "node_id"
    return {piece[key]: index for index, piece in enumerate(data[block])}
