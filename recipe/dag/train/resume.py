"""The decision whether a run resumes, and from which checkpoint.

Invariant: it is made before anything is started or written. A run continues the experiment that its checkpoint belongs
to: each difference that affects learning is reported in a line, and is an error unless `trainer.resume_mode=force`. A
checkpoint that cannot be loaded is always an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.policy.shards import SNAPSHOT
from recipe.dag.report.api_usage import Totals, larger, read_api_usage, totals_of
from recipe.dag.settings.pools import plan_pools
from recipe.dag.train import checkpoint
from recipe.dag.train.fingerprint import Fingerprint, Items, differences, in_todays_form
from recipe.dag.workflow.schema import Workflow

_ELSEWHERE = "use another trainer.experiment_name, or trainer.resume_mode=disable"


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run resumes from."""

    folder: Path
    step: int
    batches_consumed: int
    """Batches of samples that its steps rolled out."""
    sampled: int = 0
    """Tokens that its steps sampled."""
    coach_bias: Mapping[str, Any] = field(default_factory=dict)
    """State of the bias monitor (coach/bias.py)."""
    user_metrics: Mapping[str, Any] = field(default_factory=dict)
    """State of the user's metrics (train/user_metrics.py)."""
    role_baselines: Mapping[str, Any] = field(default_factory=dict)
    """State of the moving averages (train/role_baselines.py)."""
    api_usage: Totals = field(default_factory=dict)
    """What the API policies had consumed."""


def find_start(run: DictConfig, workflow: Workflow, now: Fingerprint, *, samples: int, platform: str) -> Start | None:
    """Return the checkpoint to resume from, or None if the run starts from the beginning.

    Prints differences that do not stop the run to stderr. `samples` is the number of training samples. Raises
    UserError."""
    trainer = run.trainer
    folder = checkpoint.find(Path(trainer.default_local_dir), mode=trainer.resume_mode, path=trainer.resume_from_path)
    if folder is None:
        return None
    stored = checkpoint.read(folder)
    if "sft" in stored:
        raise UserError(
            f"{folder}: a checkpoint of supervised fine-tuning; start from its model in another output_dir: "
            f"model_path={folder.parent.parent / 'huggingface'}"
        )
    check_processes(folder, stored, _processes(run, workflow, platform), advice=_ELSEWHERE)
    for name in workflow.trained_policies():
        if workflow.critic_owner(name) == name and name not in stored.get("critics", ()):
            raise UserError(f"{folder}: has no critic of policy `{name}`; {_ELSEWHERE}")
        reference = workflow.policies[name].reference
        if reference is not None and reference.refresh and name not in stored.get("references", ()):
            raise UserError(f"{folder}: has no reference of policy `{name}`, which is renewed here; {_ELSEWHERE}")
    if "fingerprint" in stored:
        learned, validated = differences(in_todays_form(stored["fingerprint"]), now)
    else:
        learned, validated = _legacy_differences(stored, run, samples), []
        print(
            f"warning: {folder} was written by an earlier version, which did not record workflow, models and problems "
            "for comparison",
            file=sys.stderr,
        )
    step = int(stored["step"])
    elsewhere = "use another trainer.experiment_name"
    report_differences(folder, learned, forced=trainer.resume_mode == "force", elsewhere=elsewhere)
    if validated:
        lines = "".join(f"\n  {line}" for line in validated)
        print(f"warning: accuracies up to step {step} are not comparable with later ones:{lines}", file=sys.stderr)
    usage = totals_of(stored.get("api_usage", {}))
    states = {name: stored.get(name, {}) for name in ("coach_bias", "user_metrics", "role_baselines")}
    counts = {"batches_consumed": int(stored.get("drawn", step)), "sampled": int(stored.get("sampled", 0))}
    return Start(folder, step, **counts, api_usage=usage, **states)


def spent_before(run: DictConfig, start: Start | None, *, evaluate_only: bool) -> Totals:
    """Return what the API policies have consumed in this output folder and, if the run resumes from a checkpoint,
    before that. A run that starts over (`trainer.resume_mode=disable`) counts from zero. Raises UserError."""
    if not evaluate_only and run.trainer.resume_mode == "disable":
        return {}
    return larger(read_api_usage(run.output_dir), start.api_usage if start is not None else {})


def way_back(run: DictConfig, start: Start | None, saved: int) -> str:
    """Return how to resume a run that ended early. `saved` is the step of its last checkpoint, which may be that of
    `start`; 0 means none."""
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


def needed_to_resume(name: str) -> bool:
    """Return whether a resumed run reads this file of a checkpoint: all but the models for other programs."""
    return "/huggingface/" not in name or f"/{SNAPSHOT}/" in name


def resume_from(folder: Path) -> str:
    """Return the settings to resume from a given checkpoint."""
    return f"pass trainer.resume_mode=resume_path trainer.resume_from_path={folder}"


def launch_facts(
    run: DictConfig, *, platform: str, start: Start | None = None, evaluated: Path | None = None
) -> dict[str, Any]:
    """Return what a launch record (report/run_record.py) holds besides configuration and workflow."""
    facts = {"seed": run.seed, "platform": platform}
    if evaluated is not None:
        return {**facts, "evaluated": str(evaluated)}
    if start is None:
        return {**facts, "resumed_from": None}
    return {**facts, "resumed_from": str(start.folder), "step": start.step, "resume_mode": run.trainer.resume_mode}


def report_evaluated(folder: Path, now: Fingerprint) -> None:
    """Print to stderr how the agents, prompts and code of an evaluation differ from those that the weights in `folder`
    were trained with. Such differences are often the purpose of an evaluation, so they are not an error."""
    stored = checkpoint.read(folder)
    if "fingerprint" not in stored:
        return
    trained = in_todays_form(stored["fingerprint"])
    policies = _workflow(trained)["policies"]
    frozen = [f"policies.{name}." for name, policy in policies.items() if policy["frozen"]]
    restricted = Fingerprint(_episode_items(now.items, frozen), _episode_items(now.chosen, frozen), {})
    learned, _ = differences(_episode_items(trained, frozen), restricted)
    if learned:
        lines = "".join(f"\n  {line}" for line in learned)
        print(f"warning: {folder} was not trained as it is evaluated:{lines}", file=sys.stderr)


def _workflow(items: Items) -> Items:
    return items["learned"]["workflow"]


def _episode_items(items: Items, frozen: list[str]) -> Items:
    """Return the part of a fingerprint that determines episodes, without the weights of trained policies."""
    workflow = {key: _workflow(items)[key] for key in ("agents", "envs", "episode", "loops") if key in _workflow(items)}
    nodes = {name: node for name, node in _workflow(items)["nodes"].items() if node.get("train") is None}
    models = {key: model for key, model in items["learned"]["models"].items() if key.startswith(tuple(frozen))}
    learned = {"workflow": {**workflow, "nodes": nodes}, "files": items["learned"]["files"], "models": models}
    return {"learned": learned, "validation": {}}


def report_differences(folder: Path, learned: list[str], *, forced: bool, elsewhere: str) -> None:
    """Raise UserError if there are differences that affect learning, or print them if the resume is forced.
    `elsewhere`: how to train in another folder, for the message."""
    if not learned:
        return
    lines = "".join(f"\n  {line}" for line in learned)
    if not forced:
        raise UserError(
            f"{folder} belongs to another experiment:{lines}\n{elsewhere}, or start over with "
            "trainer.resume_mode=disable, or resume regardless with trainer.resume_mode=force"
        )
    print(f"warning: resuming {folder} as another experiment (trainer.resume_mode=force):{lines}", file=sys.stderr)


def check_processes(folder: Path, stored: dict[str, Any], processes: Mapping[str, int], *, advice: str) -> None:
    """Raise UserError if a checkpoint lacks a policy of this run, or was written by another number of processes.

    stored: its run.json
    processes: of each trained policy
    advice: what to do without the checkpoint, for the message
    """
    for name, count in processes.items():
        if name not in stored["policies"]:
            names = ", ".join(stored["policies"]) or "none"
            raise UserError(f"{folder}: has no policy `{name}` (its policies: {names}); {advice}")
        if stored["policies"][name] != count:
            raise UserError(
                f"{folder}: policy {name} was trained by {stored['policies'][name]} processes, but this run has "
                f"{count}; use as many GPUs, or {advice}"
            )


def _processes(run: DictConfig, workflow: Workflow, platform: str) -> dict[str, int]:
    """Return the number of processes of each trained policy: verl's checkpoints have one file per process."""
    pools = plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node)
    counts = {name: sum(pool.groups(platform)) for pool in pools for name in pool.policies}
    return {name: counts[workflow.base_of(name)] for name in workflow.trained_policies()}


def _legacy_differences(stored: dict[str, Any], run: DictConfig, samples: int) -> list[str]:
    """Return the differences to a checkpoint without a fingerprint, as earlier versions wrote them."""
    now = {"seed": run.seed, "train_batch_size": run.data.train_batch_size, "train_samples": samples}
    comparable = {key: value for key, value in now.items() if key in stored}
    return [f"{key}: was {stored[key]}, now {value}" for key, value in comparable.items() if stored[key] != value]
