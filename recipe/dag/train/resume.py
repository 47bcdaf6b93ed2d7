"""Whether and where a run goes on.

Invariant: decided before anything is started or written. A run continues the experiment that its checkpoint belongs to:
what is learned otherwise is reported in a line each, and refused unless `trainer.resume_mode=force`. What could not be
loaded at all is refused always.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.dag.errors import UserError
from recipe.dag.policy.placement import plan_pools
from recipe.dag.train import checkpoint
from recipe.dag.train.fingerprint import Fingerprint, Items, differences
from recipe.dag.workflow.schema import NodeRole, Workflow

TRAINING_ROLES = (NodeRole.ADVANTAGE, NodeRole.ACTOR, NodeRole.CRITIC, NodeRole.REFERENCE)


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run continues."""

    folder: Path
    step: int
    drawn: int
    """Batches of samples that its steps rolled out."""


def find_start(run: DictConfig, workflow: Workflow, now: Fingerprint, *, samples: int, platform: str) -> Start | None:
    """Return None where the run starts anew. Differences that do not stop it go to stderr. `samples`: to train on.
    Raises UserError."""
    trainer = run.trainer
    folder = checkpoint.find(Path(trainer.default_local_dir), mode=trainer.resume_mode, path=trainer.resume_from_path)
    if folder is None:
        return None
    stored = checkpoint.read(folder)
    _check_loadable(folder, stored, workflow, _processes(run, workflow, platform))
    if "fingerprint" in stored:
        learned, validated = differences(stored["fingerprint"], now)
    else:
        learned, validated = _differing_facts(stored, run, samples), []
        print(
            f"warning: {folder} was made by an earlier version, which kept nothing to compare workflow, models and "
            "problems with",
            file=sys.stderr,
        )
    step = int(stored["step"])
    if learned:
        _report(folder, learned, forced=trainer.resume_mode == "force")
    if validated:
        lines = "".join(f"\n  {line}" for line in validated)
        print(f"warning: accuracies up to step {step} do not compare with later ones:{lines}", file=sys.stderr)
    return Start(folder, step, int(stored.get("drawn", step)))


def way_back(run: DictConfig, start: Start | None, saved: int) -> str:
    """Say how a run that ends early goes on. `saved`: the step of its last checkpoint, `start`'s included; 0: none."""
    if start is not None and saved == start.step:
        return f"the same command resumes from {start.folder}"
    if not saved:
        return "no checkpoint was saved"
    folder, path = checkpoint.step_folder(Path(run.trainer.default_local_dir), saved), run.trainer.resume_from_path
    mode = run.trainer.resume_mode
    if mode == "auto" or mode == "force" and path is None:
        return f"the same command resumes from {folder}"
    without = "" if path is None else " and without trainer.resume_from_path"
    return f"resume from {folder} with trainer.resume_mode=auto{without}"


def launch_facts(
    run: DictConfig, *, platform: str, start: Start | None = None, evaluated: Path | None = None
) -> dict[str, Any]:
    """Return what the record of a launch (report/run_record.py) says beside configuration and workflow."""
    facts = {"seed": run.seed, "platform": platform}
    if evaluated is not None:
        return {**facts, "evaluated": str(evaluated)}
    if start is None:
        return {**facts, "resumed_from": None}
    return {**facts, "resumed_from": str(start.folder), "step": start.step, "resume_mode": run.trainer.resume_mode}


def report_evaluated(folder: Path, now: Fingerprint) -> None:
    """Print to stderr in what the agents, their prompts and the code of an evaluation are not those that the weights in
    `folder` were trained with. That is often what an evaluation is for, so it is no error."""
    stored = checkpoint.read(folder)
    if "fingerprint" not in stored:
        return
    frozen = [f"policies.{name}." for name, p in _workflow(stored["fingerprint"])["policies"].items() if p["frozen"]]
    restricted = Fingerprint(_played(now.items, frozen), _played(now.chosen, frozen), {})
    learned, _ = differences(_played(stored["fingerprint"], frozen), restricted)
    if learned:
        lines = "".join(f"\n  {line}" for line in learned)
        print(f"warning: {folder} was trained otherwise than it is evaluated:{lines}", file=sys.stderr)


def _workflow(items: Items) -> Items:
    return items["learned"]["workflow"]


def _played(items: Items, frozen: list[str]) -> Items:
    """The part of a fingerprint that decides what happens in an episode, the weights of trained policies apart."""
    workflow = {key: _workflow(items)[key] for key in ("agents", "envs", "episode", "loops") if key in _workflow(items)}
    training = {str(role) for role in TRAINING_ROLES}
    nodes = {name: n for name, n in _workflow(items)["nodes"].items() if n.get("node_role") not in training}
    models = {key: model for key, model in items["learned"]["models"].items() if key.startswith(tuple(frozen))}
    learned = {"workflow": {**workflow, "nodes": nodes}, "files": items["learned"]["files"], "models": models}
    return {"learned": learned, "validation": {}}


def _report(folder: Path, learned: list[str], *, forced: bool) -> None:
    lines = "".join(f"\n  {line}" for line in learned)
    if not forced:
        raise UserError(
            f"{folder} belongs to another experiment:{lines}\nuse another trainer.experiment_name, or start anew with "
            "trainer.resume_mode=disable, or go on all the same with trainer.resume_mode=force"
        )
    print(f"warning: going on from {folder} as another experiment (trainer.resume_mode=force):{lines}", file=sys.stderr)


def _processes(run: DictConfig, workflow: Workflow, platform: str) -> dict[str, int]:
    """Of each policy's trainer: verl's checkpoints are one file per process."""
    pools = plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node)
    return {name: 1 if platform == "cpu" else sum(pool.processes_on_nodes) for pool in pools for name in pool.policies}


def _check_loadable(folder: Path, stored: dict[str, Any], workflow: Workflow, processes: dict[str, int]) -> None:
    """Raises UserError where the checkpoint lacks something that this run must load."""
    advice = "use another trainer.experiment_name, or trainer.resume_mode=disable"
    for name in workflow.trained_policies():
        if name not in stored["policies"]:
            held = ", ".join(stored["policies"]) or "none"
            raise UserError(f"{folder}: holds no policy `{name}` to go on with (its policies: {held}); {advice}")
        if stored["policies"][name] != processes[name]:
            raise UserError(
                f"{folder}: policy {name} was trained by {stored['policies'][name]} processes, this run has "
                f"{processes[name]}; take as many GPUs, or {advice}"
            )
        if workflow.critic_owner(name) == name and name not in stored.get("critics", ()):
            raise UserError(f"{folder}: holds no critic of policy `{name}` to go on with; {advice}")


def _differing_facts(stored: dict[str, Any], run: DictConfig, samples: int) -> list[str]:
    """What checkpoints of earlier versions say about their run."""
    now = {"seed": run.seed, "train_batch_size": run.data.train_batch_size, "train_samples": samples}
    known = {key: value for key, value in now.items() if key in stored}
    return [f"{key}: was {stored[key]}, now {value}" for key, value in known.items() if stored[key] != value]
