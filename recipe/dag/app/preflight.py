"""The checks of a workflow, and of a run before anything is started: its configuration, its workflow, and the one
against the other.

Invariant: `train`, `eval`, `plan`, `doctor` and the scripts go through `check_run`, so that none of them accepts what
another refuses. Nothing is written, and verl is located but not imported. A check that needs a slow import (hydra,
jinja, aiohttp) makes it only for a workflow that has something to check.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.dag.core.paths import split_ref
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.loading.workflow_file import load_overrides, refuse

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.loading.edits import Edit
    from recipe.dag.settings.typed import Typed
    from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class CheckedRun:
    config: DictConfig
    workflow: Workflow
    typed: Mapping[str, Typed]
    """The settings that the user typed, by dotted key."""


def check_run(
    name: str,
    arguments: Iterable[str],
    folder: Path | None = None,
    *,
    evaluate_only: bool | None = None,
    all_by_api: bool = False,
) -> CheckedRun:
    """Compose `name`.yaml of `folder` with the arguments, load its workflow, and check both.

    evaluate_only: the run does not train; None: if no policy of the workflow is trained
    all_by_api: a server's model plays every policy of the evaluation

    Raises UserError, or WorkflowError for the workflow's own mistakes."""
    from recipe.dag.settings.absolute import make_absolute
    from recipe.dag.settings.compose import compose_config, typed_settings
    from recipe.dag.settings.effects import check_effects, check_samples

    settings, edits = split_edits(arguments)
    config = compose_config(name, settings, folder)
    make_absolute(config)
    if config.model_path:
        os.environ["MODEL_PATH"] = str(config.model_path)
    workflow = load_edited(config.workflow, edits)
    _check_coaches(workflow)
    check_overrides(config.workflow, config, workflow.edited)
    if evaluate_only is None:
        evaluate_only = not workflow.trained_policies()
    typed = typed_settings(settings, folder)
    check_effects(typed, config, workflow, evaluate_only=evaluate_only, all_by_api=all_by_api)
    if not evaluate_only:
        check_samples(config, workflow)
    return CheckedRun(config, workflow, typed)


def check_workflow(file: str | Path, edits: Sequence[Edit] = ()) -> Workflow:
    """Load a workflow, and check what can be checked without a run's configuration. Raises UserError."""
    workflow = load_edited(file, edits)
    _check_coaches(workflow)
    check_overrides(file, text=workflow.edited)
    return workflow


def check_overrides(file: str | Path, config: DictConfig | None = None, text: str | None = None) -> None:
    """Raise WorkflowError if a workflow overrides keys that verl's configuration lacks.

    config: the run's; by default verl's with this project's defaults, and no check if verl is not installed
    text: the workflow file's contents, if the command line edits it
    """
    overrides = load_overrides(file, text)
    if not overrides:
        return
    from recipe.dag.policy.overrides import misfits
    from recipe.dag.settings.compose import default_config, has_verl

    if config is None:
        if not has_verl():
            return
        config = default_config()
    refuse(list(misfits(config, overrides)), text)


def _check_coaches(workflow: Workflow) -> None:
    hooks = (node.hooks for node in workflow.rollout_nodes)
    if any(ref is not None and split_ref(ref)[1] == "Coach" for ref in hooks):
        from recipe.dag.coach.agent import check_coaches

        check_coaches(workflow)
