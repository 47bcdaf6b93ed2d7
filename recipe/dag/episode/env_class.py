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
from recipe.dag.types.values import look_up
from recipe.dag.workflow.schema import Node, Workflow

RESET = frozenset({"sample", "seed", "sandbox", "agents"})
"""The arguments that `reset` may take."""
STEP = ("actions", "ground_truth")
"""The arguments of `step`."""
STEP_OPTIONAL = frozenset({"agents", "agent"})
"""Its optional arguments: the agent of each action, and the agent whose node steps the env."""


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
    """Return the entry of env_path that the node steps in the sample's episodes; None if it steps none. Raises EnvFault
    if env_route selects none of them."""
    options = node.agent_options
    if options.env_route is None:
        return options.env_path[0] if options.env_path else None
    value = look_up(sample, options.env_route)
    if value is None or str(value) not in options.env_path:
        actual = "is not in the sample" if value is None else f"is {str(value)!r}"
        problem = f"env_route: {options.env_route} {actual}; the envs are {', '.join(options.env_path)}"
        raise EnvFault(problem, where=f"node {node.node_id}")
    return str(value)


def needs_sandbox(workflow: Workflow) -> bool:
    """Return whether the reset of any env asks for the sandbox. Raises UserError."""
    return any("sandbox" in env.reset_arguments for env in load_envs(workflow).values())


def load_envs(workflow: Workflow, sandbox: SandboxClient | None = None) -> dict[str, EnvClass]:
    """Return all envs that the rollout nodes may step, by the entry of env_path. Raises UserError."""
    for node in workflow.rollout_nodes:
        options = node.agent_options
        if len(options.env_path) > 1 and options.env_route is None:
            problem = f"env_path names {len(options.env_path)} envs; add `env_route` to choose one for each episode"
            raise UserError(f"node {node.node_id}: {problem}")
    names = [name for node in workflow.rollout_nodes for name in node.agent_options.env_path]
    chained = workflow.algorithm.spans_policies
    return {name: replace(load_env(name, workflow, sandbox), chained=chained) for name in dict.fromkeys(names)}


def load_env(name: str, workflow: Workflow, sandbox: SandboxClient | None = None) -> EnvClass:
    """Load an env by its name under `envs` or by its path. Raises UserError if it is not a class with a `step`, or if
    its `reset` requires arguments that are not in RESET."""
    spec = workflow.envs.get(name)
    path, kwargs = (spec.path, spec.kwargs) if spec else (name, {})
    cls = load_object(path, workflow.path)
    if not inspect.isclass(cls) or not callable(getattr(cls, "step", None)):
        raise UserError(f"{path}: an env is a class with a method step(actions, ground_truth)")
    reset = getattr(cls, "reset", None)
    optional = _optional_of_step(cls)
    by_name = _steps_by_name(cls, (*STEP, *optional))
    if reset is None:
        return EnvClass(path, cls, frozenset(), by_name, optional, kwargs)
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return EnvClass(path, cls, frozenset({"sample", "seed"}), by_name, optional, kwargs)
    offered = frozenset(p.name for p in parameters) & RESET
    unknown = [p.name for p in parameters if p.name not in offered and _is_required(p)]
    if unknown:
        raise UserError(f"{path}: reset asks for {', '.join(unknown)}; it can take sample, seed, sandbox and agents")
    return EnvClass(path, cls, offered, by_name, optional, kwargs, sandbox)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not inspect.Parameter.VAR_POSITIONAL


def _optional_of_step(cls: Any) -> frozenset[str]:
    try:
        return STEP_OPTIONAL & inspect.signature(cls.step).parameters.keys()
    except (TypeError, ValueError):
        return frozenset()


def _steps_by_name(cls: Any, arguments: tuple[str, ...]) -> bool:
    bound = isinstance(inspect.getattr_static(cls, "step"), staticmethod | classmethod)
    self_argument = () if bound else (None,)
    try:
        inspect.signature(cls.step).bind(*self_argument, **dict.fromkeys(arguments))
    except (TypeError, ValueError):
        return False
    return True
