"""Estimate of the bytes of a workflow's model states, before anything is started.

Invariant: arithmetic on parameter counts, over all devices of a policy together. `gpu_memory` estimates each GPU,
including activations, logits and the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipe.dag.workflow.gpu_memory import REFERENCE
from recipe.dag.workflow.model_size import UnknownSize, size_of
from recipe.dag.workflow.schema import Frozen, Workflow
from recipe.dag.workflow.trainer_memory import ADAM, BF16, GRADIENT, MASTER

SERVING = BF16
"""Bytes per parameter in each replica of the server."""


class PolicyMemory(Frozen):
    """Bytes of a policy's states; None if the model's size is unknown."""

    policy: str
    parameters: int | None
    unknown: str = ""
    """The reason why the size is unknown."""
    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    reference: int | None = None
    critic: int | None = None
    """Weights, gradients and optimizer of its own critic; 0 without one."""
    serving: int | None = None

    @property
    def total(self) -> int | None:
        parts = (self.weights, self.gradients, self.optimizer, self.reference, self.critic, self.serving)
        sizes = [part for part in parts if part is not None]
        return sum(sizes) if len(sizes) == len(parts) else None


def estimate(workflow: Workflow, environ: Mapping[str, str] | None = None) -> tuple[PolicyMemory, ...]:
    """Estimate the memory of each policy, from the models' config.json files if they are on this machine."""
    return tuple(_policy(workflow, name, environ) for name in workflow.local_policies())


def _policy(workflow: Workflow, name: str, environ: Mapping[str, str] | None) -> PolicyMemory:
    policy = workflow.policies[name]
    critic = policy.critic if policy.critic is not None and policy.critic.share is None and not policy.frozen else None
    try:
        size = size_of(policy.model.path, environ)
        values = size_of((critic.model or policy.model).path, environ).value_parameters if critic else 0
    except UnknownSize as unknown:
        return PolicyMemory(policy=name, parameters=None, unknown=str(unknown))
    trained = 0 if policy.frozen else size.parameters
    return PolicyMemory(
        policy=name,
        parameters=size.parameters,
        weights=trained * MASTER,
        gradients=trained * GRADIENT,
        optimizer=trained * ADAM,
        reference=trained * REFERENCE if policy.reference else 0,
        critic=values * (MASTER + GRADIENT + ADAM),
        serving=size.parameters * SERVING,
    )
