"""What the weights of a workflow's policies take, in bytes, before anything is started.

Invariant: arithmetic on parameter counts, over all devices of a policy together. What each GPU holds, activations,
logits and the KV cache included, is `gpu_memory`'s.
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
    """Bytes; None: the model's size is not known."""

    policy: str
    parameters: int | None
    unknown: str = ""
    """Why, where it is not."""
    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    reference: int | None = None
    critic: int | None = None
    """Weights, gradients and optimizer of its own critic; 0 where it has none or shares another's."""
    serving: int | None = None

    @property
    def total(self) -> int | None:
        parts = (self.weights, self.gradients, self.optimizer, self.reference, self.critic, self.serving)
        return None if None in parts else sum(parts)


def estimate(workflow: Workflow, environ: Mapping[str, str] | None = None) -> tuple[PolicyMemory, ...]:
    """Of each policy. Reads the models' config.json files where they are on this machine."""
    return tuple(_policy(workflow, name, environ) for name in workflow.policies)


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
