"""`workflow.agents.planner.sampling.temperature=0.7` on the command line overrides a value of the workflow for one run.

Invariant: the file is not changed, and must be valid by itself. An edit of a key that does not exist, and a mistake in
the edited workflow, are errors that name the argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from recipe.dag.compat.long_form import short_keys
from recipe.dag.core.errors import UserError
from recipe.dag.core.flatten import flatten
from recipe.dag.core.problem import KeyPath, Problem, WorkflowError
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.loading.workflow_copy import WorkflowCopy
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.draft import TOP_LEVEL
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.source import json_as_yaml

PREFIX = "workflow."
EVERY = "*"
"""Used as the name of an agent, policy or node, selects all of them."""


@dataclass(frozen=True, slots=True)
class Edit:
    argument: str
    """The argument as typed."""
    keys: tuple[str, ...]
    value: Any
    removes: bool = False
    """The argument removes the key from the file: `~workflow.algorithm.group_by`. With `+`, it may add a policy."""


def split_edits(arguments: Iterable[str]) -> tuple[list[str], list[Edit]]:
    """Split arguments into those of the run and edits of the workflow. Raises UserError for a value that is not valid
    YAML."""
    rest, edits = [], []
    for argument in arguments:
        if argument.lstrip("+~").startswith(PREFIX):
            edits.append(_parse(argument))
        else:
            rest.append(argument)
    return rest, edits


def load_edited(path: str | Path, edits: Sequence[Edit]) -> Workflow:
    """Load a workflow with edits; its text is in `Workflow.edited`. Raises WorkflowError for mistakes of the file,
    UserError for mistakes of the edits."""
    workflow = load_workflow(path)
    if not edits:
        return workflow
    copy = copy_of(Path(path))
    if "agents" not in copy.data:
        raise UserError(f"{edits[0].argument}: {path} is in siiRL's form; rewrite it first: verl-dag import {path}")
    for edit in edits:
        for path_in_file in paths_of(edit, copy):
            if not edit.removes:
                copy.set(path_in_file, edit.value, edit.argument)
            elif copy.has(path_in_file):
                copy.drop(path_in_file, edit.argument)
            else:
                raise UserError(f"{edit.argument}: the file does not have this key; remove the argument")
    text = json.dumps(copy.data, indent=1, default=str) if Path(path).suffix == ".json" else copy.text()
    try:
        edited = load_workflow(path, text)
        # a warning that the file causes keeps its position there
        of_file = {(warning.where, warning.message): warning for warning in workflow.warnings}
        warnings = tuple(of_file.get((new.where, new.message)) or _at_argument(new, copy) for new in edited.warnings)
        return edited.model_copy(update={"edited": text, "warnings": warnings})
    except WorkflowError as error:
        lines = {f"{copy.blamed(problem)}: {problem.where}: {problem.message}": None for problem in error.problems}
        raise UserError("\nerror: ".join(lines)) from error


def _at_argument(problem: Problem, copy: WorkflowCopy) -> Problem:
    """Return the problem with the argument that caused it as its position."""
    return replace(problem, file=copy.blamed(problem), line=0, column=0)


def _parse(argument: str) -> Edit:
    key, equals, value = argument.partition("=")
    removes = key.startswith("~")
    keys = tuple(key.lstrip("+~").removeprefix(PREFIX).split("."))
    if removes == bool(equals) or not all(keys):
        raise UserError(f"{argument}: write workflow.<key>=VALUE, or ~workflow.<key> to remove a key")
    try:
        return Edit(argument, keys, YAML(typ="safe", pure=True).load(value) if equals else None, removes)
    except YAMLError as error:
        raise UserError(f"{argument}: the value is not valid YAML; quote it") from error


def paths_of(edit: Edit, copy: WorkflowCopy) -> list[KeyPath]:
    """Return the paths in a workflow's copy that an edit changes. Raises UserError if there is none."""
    return [_as_written(copy, path) for path in _paths(copy.data, edit)]


def _as_written(copy: WorkflowCopy, path: KeyPath) -> KeyPath:
    """Return the path with the keys inside a `config` joined by dots where the file joins them."""
    if "config" not in path[:-1]:
        return path
    depth = path.index("config") + 1
    block, key = path[:depth], ".".join(map(str, path[depth:]))
    config = copy.get(*block)
    written = flatten(config, block) if isinstance(config, dict) else ()
    joined = (*block, key)
    return next((place for name, _, place in written if name == key), joined if copy.has(joined) else path)


def copy_of(path: Path, text: str | None = None) -> WorkflowCopy:
    """Return the data of a workflow file for editing. `text`: its content after edits. Raises UserError."""
    try:
        text = text or path.read_text("utf-8-sig")
        return WorkflowCopy(json_as_yaml(text, str(path)) if path.suffix == ".json" else text)
    except (UnicodeDecodeError, YAMLError) as error:
        raise UserError(f"{path}: only a file in UTF-8 can be edited; save it as UTF-8") from error


def _paths(data: dict[str, Any], edit: Edit) -> Iterator[KeyPath]:
    """Yield the paths in the file that an edit changes."""
    block, *rest = edit.keys
    if block not in TOP_LEVEL:
        raise UserError(f"{edit.argument}: a workflow has no `{block}`{did_you_mean(block, TOP_LEVEL)}")
    if block not in ("agents", "nodes", "policies"):
        yield edit.keys
        return
    names = _names(data, block)
    kind = {"agents": "agent", "nodes": "node", "policies": "policy"}[block]
    if not rest:
        example = f"workflow.{block}.{next(iter(names), kind)}.<key>=VALUE"
        raise UserError(f"{edit.argument}: name one of them, as in {example}")
    if block == "policies" and len(rest) == 1 and edit.argument.startswith("+"):
        yield block, rest[0]
        return
    if rest[0] != EVERY and rest[0] not in names:
        _refuse_included(data, edit, rest[0])
        hint = did_you_mean(rest[0], names)
        raise UserError(f"{edit.argument}: no {kind} `{rest[0]}`{hint} (`{EVERY}`: all of them)")
    name, *inner = rest
    if not inner and edit.removes and block in ("nodes", "policies") and name != EVERY:
        yield block, names[name]
        return
    if not inner:
        raise UserError(f"{edit.argument}: name one of its keys, as in workflow.{block}.{name}.<key>=VALUE")
    for key in names.values() if name == EVERY else (names[name],):
        try:
            yield block, key, *(short_keys(inner, data[block][key]) if block == "nodes" else inner)
        except UserError as error:
            raise UserError(f"{edit.argument}: {inner[0]} is a field of siiRL's form; {error}") from None


def _refuse_included(data: dict[str, Any], edit: Edit, name: str) -> None:
    """Raise UserError if this is a node of a sub-workflow."""
    for node in data["nodes"] if edit.keys[0] == "nodes" else ():
        if "workflow" in node and name.startswith(f"{node['id']}__"):
            raise UserError(
                f"{edit.argument}: `{name}` is in `{node['workflow']}`; change a copy of that file, and pass "
                f"workflow.nodes.{node['id']}.workflow=COPY"
            )


def _names(data: dict[str, Any], block: str) -> dict[str, str | int]:
    """Return name -> key or index in the block."""
    if block == "policies":
        return {name: name for name in data[block]}
    key = "name" if block == "agents" else "id"
    return {piece[key]: index for index, piece in enumerate(data[block])}
