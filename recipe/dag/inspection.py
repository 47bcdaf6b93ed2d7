"""Inspection of a workflow for `verl-dag validate` and `verl-dag plan`.

Invariant: nothing is started or written, and torch is not imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Workflow
    from recipe.dag.workflow_edits import Edit


def load_checked(file: str, edits: Sequence[Edit] = ()) -> Workflow:
    """Load a workflow, and check its overrides of verl's configuration if verl is installed. Raises UserError."""
    from recipe.dag.coach.agent import check_coaches
    from recipe.dag.main import check_overrides
    from recipe.dag.settings.compose import has_verl
    from recipe.dag.workflow_edits import load_edited

    workflow = load_edited(file, edits)
    check_coaches(workflow)
    if has_verl():
        check_overrides(file, text=workflow.edited)
    return workflow


def first_sample(path: str) -> dict[str, Any]:
    """Return the first sample of a data file. Raises UserError."""
    from recipe.dag.train.data import load_samples

    return dict(load_samples(path, max_samples=1, what="--data")[0])


def short_form_hint(file: str) -> str | None:
    """Return a hint if the workflow can be written in the short form; None otherwise, and for siiRL's files."""
    from recipe.dag.compat.siirl.translate import is_siirl
    from recipe.dag.workflow.short_form import shorter
    from recipe.dag.workflow.source import read_source

    source = read_source(file)
    return None if is_siirl(source) else shorter(source)


def estimate_gpus(
    workflow: Workflow, name: str, overrides: list[str], folder: Path | None, gpu_gb: float | None
) -> dict[str, Any]:
    """Estimate the memory of each GPU for a run with configuration `name` in `folder`.

    Returns fields of the plan: `gpus` and `choices`, or `no_gpus` with the reason why there is no estimate. `gpu_gb`
    replaces the memory of this machine's GPUs.
    """
    from recipe.dag.settings.compose import compose_config, has_verl
    from recipe.dag.settings.defaults import apply, decide, describe
    from recipe.dag.workflow.gpu_memory import GB
    from recipe.dag.workflow.machine import Machine, this_machine

    if not has_verl() and not overrides and gpu_gb is None:
        return {
            "no_gpus": "Memory of each GPU: not estimated, since verl, whose configuration a run has, is not installed"
        }
    config = compose_config(name, [f"workflow={json.dumps(workflow.path)}", *overrides], folder)
    if config.model_path:
        os.environ["MODEL_PATH"] = str(config.model_path)
    if config.platform == "cpu":
        return {"no_gpus": "Memory of each GPU: none is used (platform=cpu)"}
    machine = this_machine()
    if gpu_gb is not None:
        machine = Machine((int(gpu_gb * GB),) * max(len(machine.gpu_bytes), 1), machine.host_bytes)
    decision = decide(config, workflow, machine, visible=len(machine.gpu_bytes) or 1)
    if decision.unknown:
        hint = "; pass --gpu_gb 80 (scripts: GPU_GB=80)" if gpu_gb is None and not machine.gpu_bytes else ""
        return {"no_gpus": f"Memory of each GPU: not estimated, {decision.unknown}{hint}"}
    apply(config, decision)
    trains = bool(workflow.trained_policies())
    return {"gpus": decision.memory, "choices": tuple(describe(decision, machine, config, trains=trains))}
