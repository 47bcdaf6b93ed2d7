"""Loads the env classes that a workflow names, and chooses one of them for an episode.

Invariant: the engine can step and reset every loaded class; a sample that selects none of a node's envs is an EnvFault,
never a guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.dag.core.errors import EnvFault, UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.convention import ENV, method_parameters
from recipe.dag.types.values import look_up
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class EnvClass:
    """A loaded class, the arguments of its constructor, and how its methods are called."""

    path: str
    cls: type
    reset_arguments: frozenset[str]
    step_by_name: bool = True
    """The arguments of `step` are passed by name; otherwise by position."""
    step_optional: frozenset[str] = frozenset()
    """The optional arguments that `step` takes."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    sandbox: SandboxClient | None = None
    chained: bool = False
    """The estimator propagates rewards from agent to agent, so a single number rewards only the last player: it would
    count twice otherwise."""


def choose_env(node: Node, sample: Mapping[str, Any]) -> str | None:
    """Return the entry of `env` that the node steps in the sample's episodes; None if it steps none. Raises EnvFault
    if env_route selects none of them."""
    if node.env_route is None:
        return node.env[0] if node.env else None
    value = look_up(sample, node.env_route)
    if value is None or str(value) not in node.env:
        actual = "is not in the sample" if value is None else f"is {str(value)!r}"
        problem = f"env_route: {node.env_route} {actual}; the envs are {', '.join(node.env)}"
        raise EnvFault(problem, where=f"node {node.id}")
    return str(value)


def needs_sandbox(workflow: Workflow) -> bool:
    """Return whether the reset of any env asks for the sandbox. Raises UserError."""
    return any("sandbox" in env.reset_arguments for env in load_envs(workflow).values())


def load_envs(workflow: Workflow, sandbox: SandboxClient | None = None) -> dict[str, EnvClass]:
    """Return all envs that the rollout nodes may step, by the entry of `env`. Raises UserError."""
    for node in workflow.rollout_nodes:
        if len(node.env) > 1 and node.env_route is None:
            problem = f"`env` names {len(node.env)} envs; add `env_route` to choose one for each episode"
            raise UserError(f"node {node.id}: {problem}")
    names = [name for node in workflow.rollout_nodes for name in node.env]
    chained = workflow.algorithm.spans_policies
    return {name: replace(load_env(name, workflow, sandbox), chained=chained) for name in dict.fromkeys(names)}


def load_env(name: str, workflow: Workflow, sandbox: SandboxClient | None = None) -> EnvClass:
    """Load an env by its name under `envs` or by its path. Raises UserError if it is not a class whose methods the
    engine can call."""
    spec = workflow.envs.get(name)
    path, kwargs = (spec.path, spec.kwargs) if spec else (name, {})
    cls = load_object(path, workflow.path)
    if not inspect.isclass(cls) or not callable(getattr(cls, "step", None)):
        raise UserError(f"{path}: an env is a class with a method step(actions, ground_truth)")
    shapes = {method: method_parameters(cls, method) for method in ENV if hasattr(cls, method)}
    for method, shape in shapes.items():
        for _, message in ENV[method].misfits(shape):
            raise UserError(f"{path}: {method} {message}")
    taken = {method: ENV[method].taken(shape) for method, shape in shapes.items()}
    by_name = ENV["step"].by_name(shapes["step"])
    return EnvClass(path, cls, taken.get("reset", frozenset()), by_name, taken["step"], kwargs, sandbox)
