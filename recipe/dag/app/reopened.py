"""The policies of a finished run, as they were at chosen steps, started again to play episodes.

Invariant: the run's folder is only read, and what the started processes write is in a temporary folder. All policies
are frozen.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from recipe.dag.app.evaluate import evaluation_of
from recipe.dag.app.launch import Evaluation, Run, signals_reported, started, with_cluster
from recipe.dag.core.errors import UserError
from recipe.dag.core.interrupt import Interruption
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.policy.cluster import Cluster
from recipe.dag.report.phases import PHASES
from recipe.dag.report.run_record import launches
from recipe.dag.settings.compose import CONFIG_FOLDER, compose_file
from recipe.dag.train import checkpoint
from recipe.dag.train.alternation import as_bound
from recipe.dag.train.fingerprint import Fingerprint
from recipe.dag.train.inputs import Inputs
from recipe.dag.train.models import find_models
from recipe.dag.train.resources import Resources
from recipe.dag.workflow.schema import Workflow

T = TypeVar("T")
Weights = Path | None
"""A checkpoint's `global_step_N`; None: the models with which the run started."""


@dataclass(slots=True)
class Reopened:
    """The started policies of a run."""

    config: DictConfig
    workflow: Workflow
    """With the policies of all chosen steps; its agents have those of the run's workflow."""
    names: Mapping[tuple[Weights, str], str]
    """(weights, policy of the run's workflow) -> policy of `workflow`."""
    resources: Resources
    _runners: dict[tuple, EpisodeRunner] = field(default_factory=dict)

    def runner(self, weights: Weights, *, swapped: Mapping[str, str] | None = None, bound: int = 0) -> EpisodeRunner:
        """Return the runner of episodes with these weights.

        swapped: agent -> the policy of `workflow` that it has instead of its own
        bound: the step, from 0, in which the agents have their policies (`algorithm.cory`)
        """
        swapped = swapped or {}
        key = weights, tuple(sorted(swapped.items())), bound
        if key not in self._runners:
            agents = (
                agent.model_copy(update={"policy": swapped.get(agent.name) or self.names[weights, agent.policy]})
                for agent in as_bound(self.workflow, bound).agents
            )
            # user code may not be ready for a silent agent; that loses an episode, not the others
            episode = self.workflow.episode.model_copy(update={"on_user_error": "mask"})
            workflow = self.workflow.model_copy(update={"agents": tuple(agents), "episode": episode})
            resources = self.resources
            self._runners[key] = EpisodeRunner(
                workflow, resources.endpoints, resources.tools, seed=self.config.seed, sandbox=resources.client
            )
        return self._runners[key]


def reopen(folder: Path, weights: Iterable[Weights], work: Callable[[Reopened], Awaitable[T]]) -> T:
    """Start the policies of the run in `folder` with each of the `weights`, and return what `work` returns. Raises
    UserError, and SystemExit after a signal."""
    config, workflow = read_launch(folder)
    workflow, names = with_weights(workflow, weights)
    output = tempfile.mkdtemp(prefix="verl_dag_")
    with Interruption() as stop:
        stop.way_back = "nothing was written"
        config.output_dir = output
        run = Run(config, workflow, stop, Evaluation())

        async def play(cluster: Cluster | None) -> T:
            models = await asyncio.to_thread(find_models, run.workflow)
            inputs = Inputs(models, [], [], Fingerprint({}, {}, {}))
            async with started(run, inputs, cluster, record=False) as resources:
                PHASES.ready()
                return await work(Reopened(config, run.workflow, names, resources))

        with signals_reported(stop):
            answer = with_cluster(run, play)
        shutil.rmtree(output, ignore_errors=True)  # after an error, a message names the logs in it
        return answer


def read_launch(folder: Path) -> tuple[DictConfig, Workflow]:
    """Return configuration and workflow of the run's last launch, with the models that it loaded. Raises UserError."""
    records = launches(folder)
    if not records:
        raise UserError(f"{folder}: has no record of a launch in run/; pass the output folder of a run")
    record = records[-1]
    try:
        defaults = compose_file("dag", (), CONFIG_FOLDER).copy()  # of keys that are newer than the record
        config = cast(DictConfig, OmegaConf.merge(defaults, OmegaConf.load(record / "config.yaml")))
        file = record / "workflow_resolved.json"
        workflow = Workflow.model_validate_json((file if file.exists() else record / "workflow.json").read_bytes())
        models = json.loads((record / "fingerprint.json").read_bytes())["learned"]["models"]
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{record}: cannot be read as the record of a launch of this version: {reason}") from error
    if not Path(workflow.path).is_file():
        raise UserError(f"{record}: the run's workflow file {workflow.path} is gone; put it back, with its code")
    policies = {}
    for name, policy in workflow.policies.items():
        loaded = models.get(f"policies.{name}.model", {}).get("name")
        if loaded and "${" in policy.model.path:
            policy = policy.model_copy(update={"model": policy.model.model_copy(update={"path": loaded})})
        policies[name] = policy
    return config, workflow.model_copy(update={"policies": policies})


def weights_at(folder: Path, step: int) -> Weights:
    """Return the weights that the run had after `step` of its steps. Raises UserError if it kept no such checkpoint."""
    if step == 0:
        return None
    kept = weights_of(folder)
    if step not in kept:
        steps = ", ".join(map(str, [0, *kept]))
        raise UserError(
            f"{folder}: has no checkpoint of step {step}; it has the weights of step {steps}. Pass --checkpoint for "
            "others than those of the record, or train with report.keep_checkpoints=0, which keeps all"
        )
    return kept[step]


def weights_of(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, in order."""
    config, _ = read_launch(folder)
    roots = (Path(str(config.trainer.default_local_dir)), folder / "checkpoints")
    found = (path.parent for root in roots for path in root.glob("global_step_*/run.json"))
    return dict(sorted({checkpoint.step_of(path): path for path in found}.items()))


def with_weights(workflow: Workflow, weights: Iterable[Weights]) -> tuple[Workflow, dict[tuple[Weights, str], str]]:
    """Return the workflow with frozen policies for each of the weights, one where they are the same, and their names
    by weights and policy. Raises UserError."""
    policies, names = {}, {}
    frozen = workflow
    for chosen in dict.fromkeys(weights):
        frozen = evaluation_of(workflow, weights=chosen)
        for name, policy in sorted(frozen.policies.items(), key=lambda item: item[1].lora is not None):
            if policy.lora is not None:  # its base, which comes first, may have other weights, too
                lora = policy.lora.model_copy(update={"base": names[chosen, policy.lora.base]})
                policy = policy.model_copy(update={"lora": lora})
            label = name if name not in policies else f"{name}_{chosen.name if chosen else 'start'}"
            same = next((other for other, known in policies.items() if known == policy), label)
            policies[same], names[chosen, name] = policy, same
    return frozen.model_copy(update={"policies": policies}), names
