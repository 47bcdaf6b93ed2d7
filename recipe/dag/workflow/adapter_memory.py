"""The sizes of adapters: of what a policy trains, and of what the servers of their base hold.

Invariant: as of `workflow.memory`, arithmetic on the sizes of models.
"""

from __future__ import annotations

from recipe.dag.workflow.adapter_shape import ALL_LINEAR, columns_of, critic_shape, shape_of
from recipe.dag.workflow.model_size import ModelSize
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.trainer_memory import BF16


def critic_path(workflow: Workflow, name: str) -> str | None:
    """Return the model below the critic that a policy trains beside itself; None without one of its own."""
    policy = workflow.policies[name]
    if policy.frozen or policy.critic is None or policy.critic.share is not None:
        return None
    return (policy.critic.model or policy.model).path


def adapter_parameters(workflow: Workflow, name: str, size: ModelSize) -> tuple[int, int]:
    """Return the numbers of parameters of an adapter on a model, and of its own critic; (0, 0) for a policy that is no
    adapter. Raises UserError for an adapter in a folder that cannot be read."""
    lora, critic = workflow.policies[name].lora, workflow.policies[name].critic
    if lora is None:
        return 0, 0
    shape = shape_of(lora, f"policies.{name}.lora.path")
    targets = None if shape.targets == (ALL_LINEAR,) else shape.targets
    own = size.adapter_parameters(shape.rank, targets)
    if critic is None or critic_path(workflow, name) is None:
        return own, 0
    return own, size.adapter_parameters(critic_shape(shape, critic).rank, targets) + size.hidden + 1


def served_adapters(workflow: Workflow, base: str, size: ModelSize, backend: str | None) -> int:
    """Return the bytes on each GPU that servers of a policy's model hold of the adapters on it, in their static share
    and while they sleep; an upper bound with tensor parallelism, which divides most of it. `backend`: SGLang's
    `lora_backend`, None for dense products. Raises UserError as `adapter_parameters` does."""
    adapters = {name: workflow.policies[name].lora for name in workflow.adapters_of(base)}
    ranks = [shape_of(lora, f"policies.{name}.lora.path").rank for name, lora in adapters.items() if lora is not None]
    if not ranks:
        return 0
    places = (len(ranks) + 1) * max(ranks)  # of SGLang's pool, in which the base takes one, too
    if backend in (None, "dense"):
        places += sum(map(columns_of, ranks))  # the copies that dense products read (policy/dense_adapters.py)
    return BF16 * places * size.adapter_parameters(1)
