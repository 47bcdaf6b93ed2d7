"""Settings of an evaluation: frozen policies, with weights from disk.

Invariant: pure, except that it reads the folder names of a checkpoint; it starts no process and writes no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.episode.generation import sampling_of
from recipe.dag.policy.shards import SNAPSHOT
from recipe.dag.tools.address import address_problems
from recipe.dag.train import checkpoint
from recipe.dag.train.rollout import episodes_at_once
from recipe.dag.types.model import Api
from recipe.dag.workflow.adapter_shape import CONFIG
from recipe.dag.workflow.agent_schema import Agent, Policy
from recipe.dag.workflow.schema import Workflow


def evaluation_of(
    workflow: Workflow, *, weights: Path | None = None, temperature: float | None = None, api: Api | None = None
) -> Workflow:
    """Return the workflow with every policy frozen and without its training chain.

    weights: a folder for `find_checkpoint`; by default the policies' own models
    temperature: replaces the validation temperature of every agent
    api: replaces the model of every policy
    """
    models = checkpoint_models(weights, workflow) if weights is not None else {}
    policies = {}
    for name, policy in workflow.policies.items():
        if api is not None:
            policies[name] = Policy(api=api)
            continue
        if policy.lora is not None:
            weights_of = {"lora": policy.lora.model_copy(update={"path": models.get(name, policy.lora.path)})}
        else:
            weights_of = {"model": policy.model.model_copy(update={"path": models.get(name, policy.model.path)})}
        own = {"frozen": True, "snapshot_of": None, "every": None}
        policies[name] = policy.model_copy(update={**own, **weights_of})
    agents = workflow.agents
    if temperature is not None:
        if temperature < 0:
            raise UserError(f"validation.temperature={temperature} must be at least 0")
        agents = tuple(
            agent.model_copy(update={"validation": agent.validation.model_copy(update={"temperature": temperature})})
            for agent in agents
        )
    nodes = tuple(node for node in workflow.nodes if node not in workflow.training_nodes)
    return workflow.model_copy(update={"agents": agents, "policies": policies, "nodes": nodes})


def checkpoint_models(folder: Path, workflow: Workflow) -> dict[str, str]:
    """Return the folders of the models or adapters of the workflow's trained policies. Raises UserError if the
    checkpoint lacks one."""
    step = find_checkpoint(folder)
    models = {}
    for name in workflow.trained_policies():
        folder, is_adapter = checkpoint.policy_folder(step, name), workflow.policies[name].lora is not None
        if not folder.is_dir():
            policies = sorted(path.name for path in step.iterdir() if (path / "actor").is_dir())
            names = ", ".join(policies) or "none"
            raise UserError(f"{step}: holds no policy '{name}' of {workflow.path}; its policies: {names}")
        model = folder if is_adapter else folder / "huggingface"
        models[name] = str(model)
        if is_adapter and not (model / CONFIG).is_file():
            raise UserError(f"{model}: no adapter in it, which policy '{name}' of {workflow.path} is")
        if not is_adapter and not (model / "config.json").is_file():
            raise UserError(
                f"{model}: no model in it; train with hf_model in actor_rollout_ref.actor.checkpoint.save_contents"
            )
    for name, source in workflow.snapshots().items():
        folder = step / name / SNAPSHOT / "huggingface"
        models[name] = str(folder) if folder.is_dir() else models[source]
    return models


def find_checkpoint(folder: Path) -> Path:
    """Return `folder` if it is a `global_step_N`, else the last one in a `checkpoints` folder or a run's output folder.
    Raises UserError if there is none."""
    if (folder / "run.json").is_file():
        return folder
    for root in (folder, folder / "checkpoints"):
        step = checkpoint.find(root, mode="auto", path=None)
        if step is not None:
            return step
    raise UserError(
        f"{folder}: no checkpoint there; pass outputs/NAME/checkpoints, or outputs/NAME/checkpoints/global_step_N"
    )


def describe_evaluation(config: DictConfig, workflow: Workflow, *, max_programs: int | None) -> dict[str, Any]:
    """Return the settings of an evaluation for the reader of its results: model, limits and sampling.

    max_programs: programs at once, None without a sandbox
    """
    models = {
        name: (policy.api.model or policy.api.title)
        if policy.api is not None
        else (policy.lora and policy.lora.path) or policy.model.path
        for name, policy in workflow.policies.items()
    }
    loops = [agent.tool_loop.max_generations for agent in workflow.agents if agent.tool_loop is not None]
    in_flight = episodes_at_once(config)
    apis = [policy.api.max_concurrent for policy in workflow.policies.values() if policy.api is not None]
    return {
        "model": next(iter(models.values())) if len(models) == 1 else models,
        "n_samples": config.validation.n,
        "max_turns": max(loops, default=1),
        "max_concurrent_requests": min([in_flight, *apis]) if len(apis) < 2 else min(in_flight, sum(apis)),
        "max_concurrent_sandbox": max_programs,
        "sandbox_timeout": config.sandbox.timeout_s if max_programs is not None else None,
        "seed": config.seed,
        "sampling": {agent.name: _sampling(agent) for agent in workflow.agents},
    }


def _sampling(agent: Agent) -> dict[str, Any]:
    sampling = sampling_of(agent, validate=True, thinks=True)
    return {key: sampling[key] for key in ("temperature", "top_p", "top_k", "max_tokens")}


def check_model_option(workflow: Workflow) -> None:
    """Raise UserError for --model if no policy's model is MODEL_PATH."""
    paths = {name: policy.model.path for name, policy in workflow.policies.items()}
    if not any("oc.env:MODEL_PATH" in path for path in paths.values()):
        named = ", ".join(f"{name}: {path}" for name, path in paths.items())
        raise UserError(
            f"{workflow.path}: --model has no effect, since no policy's model is ${{oc.env:MODEL_PATH}} ({named})"
        )


def api_of(base_url: str, model: str, *, key_env: str | None = None, **options: Any) -> Api:
    """Return the API that the command line describes. `options`: further fields of `Api`; None: their defaults. Raises
    UserError."""
    for option, message in address_problems(base_url, key_env):
        raise UserError(f"--{option.replace('_', '-')}: {message}")
    if not model.strip():
        raise UserError("--served-model: must not be empty")
    options = {key: value for key, value in options.items() if value is not None}
    return Api(base_url=base_url, model=model, key_env=key_env, **options)


def check_output(config: DictConfig) -> None:
    """Raise UserError if the output folder belongs to a training run, whose results would be overwritten."""
    folder = Path(config.output_dir)
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: holds a training run, whose results would be overwritten; pass another --output")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; pass another --output")


def check_conversations(config: DictConfig, workflow: Workflow) -> None:
    """Raise UserError for `report.conversations_file` if a policy does not exchange messages: the run would have no
    conversations to write."""
    name = config.report.conversations_file
    if not name:
        return
    if Path(name).name != name or name in ("results.json", "summary.json", "evaluation.json", "episodes.jsonl"):
        raise UserError(f"report.conversations_file={name} must be the name of a new file in the output folder")
    for policy, spec in workflow.policies.items():
        if spec.api is None or spec.api.tokenizer is not None:
            raise UserError(
                f"report.conversations_file: policy '{policy}' works on token ids, not messages; pass --base-url URL "
                "without --tokenizer, or remove it: results.json has every text, too"
            )


def option(key: str, value: object) -> str:
    """Return a hydra override for `value`, quoted so that a path may contain any character."""
    if isinstance(value, str | Path):
        text = str(value)
        quoted = text.replace("'", "\\'")
        return f"{key}='{quoted}'"
    return f"{key}={'null' if value is None else value}"
