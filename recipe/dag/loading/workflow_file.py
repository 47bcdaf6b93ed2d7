"""Loading of workflow files, in all supported formats.

Invariant: other systems' files and their form of nodes are converted before the loader reads them; it supports one
format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipe.dag.compat.long_form import in_short_form, is_siirl
from recipe.dag.compat.siirl.translate import translate
from recipe.dag.core.problem import Problem, WorkflowError
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.loader import checked, workflow_from
from recipe.dag.workflow.overrides import Override, placed_overrides
from recipe.dag.workflow.refs import resolve_refs
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.source import Source, parse_source, read_source


def load_workflow(path: str | Path, text: str | None = None) -> Workflow:
    """Load a workflow. `text` replaces the file's content. Raises WorkflowError, whose `problems` are all mistakes of
    the file."""
    return workflow_from(_open(path, text), _read_included)


def load_draft(path: str | Path, text: str | None = None) -> Draft:
    """Return the pieces of a workflow with their positions in the file. `text` as in `load_workflow`. Raises
    WorkflowError."""
    return checked(_open(path, text), _read_included).draft


def load_overrides(path: str | Path, text: str | None = None) -> tuple[Override, ...]:
    """Return the keys of verl's configuration that a workflow sets. `text` as in `load_workflow`. Raises WorkflowError.

    `recipe.dag.policy.overrides` compares them with the keys that verl has.
    """
    return tuple(placed_overrides(load_draft(path, text)))


def refuse(problems: Sequence[Problem], text: str | None = None) -> None:
    """Raise WorkflowError if there are problems. `text`: as in `load_workflow`, whose lines are not the file's."""
    if problems:
        raise WorkflowError(problems if text is None else [replace(each, line=0, column=0) for each in problems])


def _open(path: str | Path, text: str | None) -> Source:
    source = read_source(path) if text is None else parse_source(text.encode(), str(path))
    if source.has_refs:
        resolve_refs(source)
    return in_short_form(translate(source) if is_siirl(source) else source)


def _read_included(path: Path) -> Source:
    source = read_source(path)
    if source.has_refs:
        resolve_refs(source)
    return in_short_form(source, included=True)
