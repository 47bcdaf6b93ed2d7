"""What makes an evaluation of a run: frozen policies, their weights from disk, problems from any file.

Invariant: pure but for reading a checkpoint's folder names; no process is started here and no file is written.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from recipe.dag.errors import UserError
from recipe.dag.train import checkpoint
from recipe.dag.workflow.schema import Workflow


def evaluation_of(workflow: Workflow, *, weights: Path | None = None, temperature: float | None = None) -> Workflow:
    """The same workflow with every policy frozen and no training chain.

    `weights`: see `find_checkpoint`; without it the policies' own models. `temperature`: of every agent, instead of its
    own.
    """
    models = checkpoint_models(weights, workflow) if weights is not None else {}
    policies = {}
    for name, policy in workflow.policies.items():
        model = policy.model.model_copy(update={"path": models.get(name, policy.model.path)})
        policies[name] = policy.model_copy(update={"frozen": True, "model": model})
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
    """Model folders of the workflow's trained policies; its frozen ones are in no checkpoint. Raises UserError."""
    step = find_checkpoint(folder)
    models = {name: checkpoint.policy_folder(step, name) / "huggingface" for name in workflow.trained_policies()}
    for name, model in models.items():
        if not model.parent.is_dir():
            there = sorted(path.name for path in step.iterdir() if (path / "actor").is_dir())
            held = ", ".join(there) or "none"
            raise UserError(f"{step}: holds no policy '{name}' of {workflow.path}; its policies: {held}")
        if not (model / "config.json").is_file():
            raise UserError(
                f"{model}: no model in it; train with hf_model among actor_rollout_ref.actor.checkpoint.save_contents"
            )
    return {name: str(model) for name, model in models.items()}


def find_checkpoint(folder: Path) -> Path:
    """`folder` itself if it is a `global_step_N`, else the last one of a `checkpoints` or a run's output folder."""
    if (folder / "run.json").is_file():
        return folder
    for root in (folder, folder / "checkpoints"):
        found = checkpoint.find(root, mode="auto", path=None)
        if found is not None:
            return found
    raise UserError(
        f"{folder}: no checkpoint there; pass outputs/NAME/checkpoints, or outputs/NAME/checkpoints/global_step_N"
    )


def check_model_option(workflow: Workflow) -> None:
    """--model needs a policy that asks for MODEL_PATH. Raises UserError."""
    paths = {name: policy.model.path for name, policy in workflow.policies.items()}
    if not any("oc.env:MODEL_PATH" in path for path in paths.values()):
        named = ", ".join(f"{name}: {path}" for name, path in paths.items())
        raise UserError(
            f"{workflow.path}: --model has no effect, since no policy's model is ${{oc.env:MODEL_PATH}} ({named})"
        )


def check_output(config: DictConfig) -> None:
    """The results of a training run are not replaced by those of an evaluation. Raises UserError."""
    folder = Path(config.output_dir)
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: holds a training run, whose results.json would be lost; pass another --output")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; pass another --output")


def option(key: str, value: object) -> str:
    """A hydra override that means `value` and nothing else, whatever characters a path has."""
    if isinstance(value, str | Path):
        text = str(value)
        quoted = text.replace("'", "\\'")
        return f"{key}='{quoted}'"
    return f"{key}={'null' if value is None else value}"
