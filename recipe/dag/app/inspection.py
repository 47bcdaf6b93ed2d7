"""Inspection of a workflow for `verl-dag validate` and `verl-dag plan`.

Invariant: nothing is started, written or fetched, and torch is imported with a tokenizer alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.workflow.schema import Workflow


def first_samples(path: str, count: int) -> list[dict[str, Any]]:
    """Return the first samples of a data file. Raises UserError."""
    from recipe.dag.train.data import load_samples

    return [dict(sample) for sample in load_samples(path, max_samples=count, what="--data")]


def predict_reuse(
    workflow: Workflow, config: DictConfig | None, data: str | None, folder: Path | None = None
) -> list[str]:
    """Play two problems without a model, and return what a prefix cache would have read, as lines; beside it, what the
    servers of the run in `folder` measured. Raises UserError."""
    from recipe.dag.episode.rehearsal import SAMPLE, rehearse
    from recipe.dag.report.reuse import lines_of, measured_by_node, reuse_by_node
    from recipe.dag.report.run_folder import read_run

    asked = ("Which number is the larger one, 12 or 21?", "How many of the 30 apples are left?")
    made_up = [SAMPLE | {"prompt": [{"role": "user", "content": question}]} for question in asked]
    answers = [f"{word * 8} The answer is \\boxed{{{{{{right}}}}}}." for word in ("first ", "other ")]
    samples = first_samples(data, 2) if data else made_up
    tokenizers, unit = find_tokenizers(workflow)
    problems = [rehearse(workflow, sample, answers, tokenizers) for sample in samples]
    n = 8 if config is None else int(config.actor_rollout_ref.rollout.n)
    measured = None if folder is None else measured_by_node(read_run(folder).metrics)
    return list(lines_of(reuse_by_node(problems, n), n, unit, measured))


def find_tokenizers(workflow: Workflow) -> tuple[dict[str, Any] | None, str]:
    """Return the tokenizers by policy, and "tokens", which are counted with them; if one is not on this machine, None
    and "characters", with the reason."""
    from recipe.dag.train.models import load_tokenizer
    from recipe.dag.types.model import Model
    from recipe.dag.workflow.interpolation import resolve_env

    found: dict[str, Any] = {}
    for name, policy in workflow.policies.items():
        try:
            model = workflow.policies[workflow.base_of(name)].model
            if policy.api is not None:
                if policy.api.tokenizer is None:
                    return None, f"characters, since policy {name} has no tokenizer"
                model = Model(path=policy.api.tokenizer)
            path = str(Path(resolve_env(model.path)).expanduser())
            found[name] = load_tokenizer(model, path, local_files_only=True)
        except Exception:  # transformers raises any kind for files that are no tokenizer's
            return None, f"characters, since the tokenizer of policy {name} is not here"
    return found, "tokens"


def short_form_hint(file: str) -> str | None:
    """Return a hint if the workflow can be written in the short form; None otherwise, and for siiRL's files."""
    from recipe.dag.compat.long_form import hint_at_short_form
    from recipe.dag.workflow.source import read_source

    return hint_at_short_form(read_source(file))


def open_planned(
    file: str, arguments: Sequence[str], name: str, folder: Path | None, gpu_gb: float | None
) -> tuple[Workflow, DictConfig | None]:
    """Load and check a workflow, with configuration `name` of `folder` as a run has it. Without verl, and if nothing
    asks for a configuration, that is None. Raises UserError."""
    from recipe.dag.app.preflight import check_run, check_workflow
    from recipe.dag.loading.edits import split_edits
    from recipe.dag.settings.compose import has_verl

    settings, edits = split_edits(arguments)
    if not has_verl() and not settings and gpu_gb is None:
        return check_workflow(file, edits), None
    check_workflow(file)  # its own mistakes first
    checked = check_run(name, [f"workflow={json.dumps(file)}", *arguments], folder)
    return checked.workflow, checked.config


def estimate_memory(workflow: Workflow, config: DictConfig | None, gpu_gb: float | None) -> dict[str, Any]:
    """Estimate the memory of a run: the plan's field `memory`, and those of `estimate_gpus`."""
    from recipe.dag.workflow.memory import estimate_states

    moments = {}
    if config is not None:
        from recipe.dag.settings.defaults import moments_of

        moments = {name: moments_of(config, workflow, name) for name in workflow.local_policies()}
    return {"memory": estimate_states(workflow, moments=moments), **estimate_gpus(workflow, config, gpu_gb)}


def estimate_gpus(workflow: Workflow, config: DictConfig | None, gpu_gb: float | None) -> dict[str, Any]:
    """Estimate the memory of each GPU for a run.

    Returns fields of the plan: `gpus` and `choices`, or `no_gpus` with the reason why there is no estimate. `gpu_gb`
    replaces the memory of this machine's GPUs.
    """
    if config is None:
        return {
            "no_gpus": "Memory of each GPU: not estimated, since verl, whose configuration a run has, is not installed"
        }
    if config.platform == "cpu":
        return {"no_gpus": "Memory of each GPU: none is used (platform=cpu)"}
    from recipe.dag.settings.decision_lines import describe
    from recipe.dag.settings.defaults import apply, decide
    from recipe.dag.workflow.machine import Machine, this_machine
    from recipe.dag.workflow.memory import GB

    machine = this_machine()
    if gpu_gb is not None:
        machine = Machine((int(gpu_gb * GB),) * max(len(machine.gpu_bytes), 1), machine.host_bytes)
    decision = decide(config, workflow, machine, visible=len(machine.gpu_bytes) or 1)
    if decision.unknown:
        hint = "; pass --gpu_gb 80 (scripts: GPU_GB=80)" if gpu_gb is None and not machine.gpu_bytes else ""
        return {"no_gpus": f"Memory of each GPU: not estimated, {decision.unknown}{hint}"}
    apply(config, decision)
    return {"gpus": decision.memory, "choices": tuple(describe(decision, machine, config, workflow))}


def propose_sharing(workflow: Workflow, config: DictConfig | None, folder: Path) -> tuple[str, ...]:
    """Return which policies should share the GPUs of a run, by the metrics in the folder of an earlier one, as lines of
    the plan. Raises UserError."""
    from recipe.dag.core.errors import UserError
    from recipe.dag.report.run_folder import read_run
    from recipe.dag.settings.sharing import describe, loads_of, propose

    run = read_run(folder)
    if not run.config:
        raise UserError(f"{folder}: has no launch, which says on how many GPUs it ran; pass the output folder of a run")
    trainer, policies = run.config["trainer"], run.workflow.get("policies", {})
    measured = trainer["n_gpus_per_node"] * trainer["nnodes"]
    own = {name: policy["gpus"] for name, policy in policies.items() if policy.get("gpus")}
    try:
        loads = loads_of(workflow, run.metrics, measured, own)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    gpus, machines = measured, trainer["nnodes"]
    if config is not None:
        gpus, machines = int(config.trainer.n_gpus_per_node or measured) * config.trainer.nnodes, config.trainer.nnodes
    placements = propose(loads, gpus)
    if machines > 1:  # where no policy can have its own
        placements = [placement for placement in placements if not placement.own]
    heading = f"Placement on {gpus} GPU{'s' * (gpus > 1)}, by the steps of {folder} (memory: plan with these settings)"
    return (heading, *describe(loads, placements, gpus))
