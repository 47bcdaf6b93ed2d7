"""A workflow with values of a command line in it.

Invariant: the text keeps its comments and order, and loads; what an edit cannot find a place for, and what is wrong
with the edited workflow, is a UserError that names the argument, never ignored and never written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipe.dag.errors import UserError
from recipe.dag.workflow.edits import copy_of
from recipe.dag.workflow.importer import import_workflow
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.problem import KeyPath, WorkflowError
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.workflow_copy import WorkflowCopy
from recipe.marft.credit import set_env_rewards, set_estimator, set_kl
from recipe.marft.rules import Edit


class Edited(NamedTuple):
    text: str
    flow: Workflow
    """What the text loads to."""
    decided: tuple[str, ...]
    """The options that the edits set, as the workflow's warnings write them."""


def edited(source: Workflow, edits: Mapping[str, Edit], *, batch_size: int, at: Path) -> Edited:
    """A copy of the workflow, with the edits. A file in siiRL's form is rewritten into this language's first.
    `edits`: by section and key, as `recipe.marft.flags` makes them. `batch_size`: samples per step, which siiRL's
    mini-batch sizes are parts of. `at`: where the copy will be. Raises UserError."""
    copy, edits = copy_of(Path(source.path), source.edited), dict(edits)
    if "agents" not in copy.data:
        copy = WorkflowCopy(import_workflow(source.path))
        if "episode.max_turns" in edits and "train_turns" not in source.episode.model_fields_set:
            copy.set(("episode", "train_turns"), "last", edits["episode.max_turns"].argument)  # siiRL's default
    set_estimator(copy, edits)
    set_kl(copy, edits)
    set_env_rewards(copy, edits)
    clip = edits.pop("clip_ratio", None)
    for key in ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high") if clip is not None else ():
        edits.setdefault(key, clip)
    do_sample = edits.pop("do_sample", None)
    for key, edit in edits.items():
        _apply(copy, key, edit, batch_size)
    if do_sample is not None:
        _do_sample(copy, do_sample)
    copy.anchor(Path(source.path))
    text = f"# {source.path}, changed by {copy.arguments()}\n\n{copy.text()}"
    try:
        return Edited(text, load_workflow(at, text), copy.decided())
    except WorkflowError as error:
        lines = {
            (copy.blamed(found), " ".join(found.message.split())): found.where for found in reversed(error.problems)
        }
        text = "\nerror: ".join(f"{argument}: {where}: {what}" for (argument, what), where in reversed(lines.items()))
        raise UserError(text) from error


def _apply(copy: WorkflowCopy, key: str, edit: Edit, batch_size: int) -> None:
    section, _, name = key.partition(".")
    value: Any = edit.value
    if name == "mini_batch_size":
        if value > batch_size:
            raise UserError(f"{edit.argument}: is more than data.train_batch_size={batch_size}")
        name, value = "mini_batches", math.ceil(batch_size / value)
    elif name == "max_turns" and value is None:
        value = 1
    elif name == "train_turns":
        value = "all" if value else "last"
    elif name == "model":
        value = {"path": str(value)}
    places = list(_places(copy, section))
    if not places:
        what = "its estimator has no critic" if section == "critic" else "no policy is trained"
        raise UserError(f"{edit.argument}: the workflow has no place for it ({what}); leave it out")
    for place in places:
        copy.set((*place, *name.split(".")), value, edit.argument)


def _places(copy: WorkflowCopy, section: str) -> Iterator[KeyPath]:
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
    """Without it, validation takes the likeliest token, whatever temperature there is."""
    for index, agent in enumerate(copy.data["agents"]):
        path = ("agents", index, "validation", "temperature")
        own, trained = copy.get(*path), copy.get("agents", index, "sampling", "temperature")
        if not edit.value:
            copy.set(path, 0.0, edit.argument)
        elif (trained if own is None else own) == 0:
            message = f"agent `{agent['name']}` validates at temperature 0; add rollout.val_kwargs.temperature=1.0"
            raise UserError(f"{edit.argument}: {message}")
