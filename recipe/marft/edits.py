"""Applies the flags' edits to a copy of the workflow.

Invariant: the text keeps its comments and order, and is valid. An edit that does not fit the workflow, and an error in
the edited workflow, is a UserError that names the flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import KeyPath, Problem, WorkflowError
from recipe.dag.loading.conversion import import_workflow
from recipe.dag.loading.edits import copy_of
from recipe.dag.loading.workflow_copy import WorkflowCopy
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.schema import Workflow
from recipe.marft.credit import set_env_rewards, set_estimator, set_kl
from recipe.marft.rules import Edit, Errors


class Edited(NamedTuple):
    """The edited copy."""

    text: str
    flow: Workflow
    """The workflow in `text`, as far as it could be edited."""
    decided: tuple[str, ...]
    """The options that the edits set, as written in the workflow's warnings."""


def edited(
    source: Workflow, edits: Mapping[str, Edit], *, batch_size: int, at: Path, errors: Errors | None = None
) -> Edited:
    """Return a copy of the workflow with the edits; a file in siiRL's form is converted first. Edits that do not fit
    the workflow are left out, and are lines of `errors`, or of a UserError without it.

    `edits`: by section and key, from `recipe.marft.flags`. `batch_size`: samples per step, of which siiRL's mini-batch
    sizes are parts. `at`: the path of the copy. Raises UserError if the edited workflow is invalid.
    """
    copy, edits, problems = copy_of(Path(source.path), source.edited), dict(edits), errors or Errors()
    if "agents" not in copy.data:
        copy = WorkflowCopy(import_workflow(source.path))
        if "episode.max_turns" in edits and "train_turns" not in source.episode.model_fields_set:
            copy.set(("episode", "train_turns"), "last", edits["episode.max_turns"].argument)  # siiRL's default
    for apply in (set_estimator, set_kl, set_env_rewards):
        with problems.collected():
            apply(copy, edits)
    if (clip := edits.pop("clip_ratio", None)) is not None:
        edits.setdefault("algorithm.clip_ratio_low", clip)
        edits.setdefault("algorithm.clip_ratio_high", clip)
    do_sample = edits.pop("do_sample", None)
    for key, edit in edits.items():
        with problems.collected():
            _apply(copy, key, edit, batch_size)
    if do_sample is not None:
        with problems.collected():
            _do_sample(copy, do_sample)
    if errors is None:
        problems.check()
    copy.anchor(Path(source.path))
    text = f"# {source.path}, changed by {copy.arguments()}\n\n{copy.text()}"
    try:
        return Edited(text, load_workflow(at, text), copy.decided())
    except WorkflowError as error:
        raise UserError(_by_argument(copy, error.problems)) from error


def _by_argument(copy: WorkflowCopy, problems: Iterable[Problem]) -> str:
    """Return a line for each flag and message, with the first place of the problem."""
    places: dict[tuple[str, str], str] = {}
    for problem in problems:
        places.setdefault((copy.blamed(problem), " ".join(problem.message.split())), problem.where)
    return "\nerror: ".join(f"{argument}: {where}: {message}" for (argument, message), where in places.items())


def _apply(copy: WorkflowCopy, key: str, edit: Edit, batch_size: int) -> None:
    """Set `key`, with siiRL's value converted, wherever it applies."""
    section, _, name = key.partition(".")
    value: Any = edit.value
    if name == "mini_batch_size":
        if value > batch_size:
            raise UserError(f"{edit.argument}: exceeds data.train_batch_size={batch_size}; pass {batch_size} or less")
        name, value = "mini_batches", math.ceil(batch_size / value)
    elif name == "max_turns" and value is None:
        value = 1
    elif name == "train_turns":
        value = "all" if value else "last"
    elif name == "model":
        value = {"path": str(value)}
    paths = list(_paths(copy, section))
    if not paths:
        reason = "its estimator does not use a critic" if section == "critic" else "no policy is trained"
        raise UserError(f"{edit.argument}: it has no effect on this workflow ({reason}); remove the flag")
    for path in paths:
        copy.set((*path, *name.split(".")), value, edit.argument)


def _paths(copy: WorkflowCopy, section: str) -> Iterator[KeyPath]:
    """Yield the mappings of the workflow that a section of flags refers to."""
    if section in ("algorithm", "episode"):
        yield (section,)
    elif section in ("sampling", "validation"):
        yield from (("agents", index, section) for index in range(len(copy.data["agents"])))
    elif section == "policy":
        yield from copy.trained()
    elif section == "critic":
        critics = ((*policy, "critic") for policy in copy.trained())
        yield from (path for path in critics if copy.get(*path) is not None and "share" not in copy.get(*path))


def _do_sample(copy: WorkflowCopy, edit: Edit) -> None:
    """Apply `do_sample`: without sampling, the temperature of validation is 0."""
    for index, agent in enumerate(copy.data["agents"]):
        path = ("agents", index, "validation", "temperature")
        temperature = copy.get(*path)
        if temperature is None:
            temperature = copy.get("agents", index, "sampling", "temperature")
        if not edit.value:
            copy.set(path, 0.0, edit.argument)
        elif temperature == 0:
            message = f"agent `{agent['name']}` validates at temperature 0; add rollout.val_kwargs.temperature=1.0"
            raise UserError(f"{edit.argument}: {message}")
