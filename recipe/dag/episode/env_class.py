"""The env classes that a workflow names, and which of them an episode gets.

Invariant: a class that is loaded can be stepped and reset by the engine; a sample that leads to none of a node's envs
is an EnvFault, never a guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipe.dag.episode.condition import look_up
from recipe.dag.errors import EnvFault, UserError
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.workflow.schema import Node, Workflow
from recipe.dag.workflow.user_code import load_object

STEP = ("actions", "ground_truth")
"""What `step` is given."""


@dataclass(frozen=True, slots=True)
class EnvClass:
    """A loaded class, what its constructor is given and how its methods are called."""

    path: str
    cls: type
    reset_arguments: frozenset[str]
    step_by_name: bool = True
    """siiRL's way; else by position."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    sandbox: SandboxClient | None = None
    chained: bool = False
    """Credit carries rewards from agent to agent: what a number rewards is the last player's, or it would count
    twice."""


def choose_env(node: Node, sample: Mapping[str, Any]) -> str | None:
    """The entry of env_path that the node steps in the sample's episodes; None without one. Raises EnvFault where
    env_route leads to none of them."""
    options = node.agent_options
    if options.env_route is None:
        return options.env_path[0] if options.env_path else None
    value = look_up(sample, options.env_route)
    if value is None or str(value) not in options.env_path:
        found = "is not in the sample" if value is None else f"is {str(value)!r}"
        problem = f"env_route: {options.env_route} {found}; the envs are {', '.join(options.env_path)}"
        raise EnvFault(problem, where=f"node {node.node_id}")
    return str(value)


def needs_sandbox(workflow: Workflow) -> bool:
    """Whether an env runs programs. Raises UserError."""
    return any("sandbox" in env.reset_arguments for env in load_envs(workflow).values())


def load_envs(workflow: Workflow, sandbox: SandboxClient | None = None) -> dict[str, EnvClass]:
    """All that the rollout nodes may step, by the entry of env_path. Raises UserError."""
    for node in workflow.rollout_nodes:
        options = node.agent_options
        if len(options.env_path) > 1 and options.env_route is None:
            problem = f"env_path names {len(options.env_path)} envs; say by `env_route` which one an episode gets"
            raise UserError(f"node {node.node_id}: {problem}")
    names = [name for node in workflow.rollout_nodes for name in node.agent_options.env_path]
    chained = workflow.algorithm.spans_policies
    return {n: replace(load_env(n, workflow, sandbox), chained=chained) for n in dict.fromkeys(names)}


def load_env(name: str, workflow: Workflow, sandbox: SandboxClient | None = None) -> EnvClass:
    """`name`: one under `envs`, or a path. Raises UserError if there is no class with a step, or its reset asks for
    more than `sample`, `seed` and `sandbox`."""
    spec = workflow.envs.get(name)
    path, kwargs = (spec.path, spec.kwargs) if spec else (name, {})
    cls = load_object(path, workflow.path)
    if not inspect.isclass(cls) or not callable(getattr(cls, "step", None)):
        raise UserError(f"{path}: an env is a class with a method step(actions, ground_truth)")
    reset, by_name = getattr(cls, "reset", None), _takes_by_name(cls)
    if reset is None:
        return EnvClass(path, cls, frozenset(), by_name, kwargs)
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return EnvClass(path, cls, frozenset({"sample", "seed"}), by_name, kwargs)
    offered = frozenset(p.name for p in parameters) & {"sample", "seed", "sandbox"}
    optional = (inspect.Parameter.VAR_POSITIONAL,)
    strange = [p.name for p in parameters if p.name not in offered and p.default is p.empty and p.kind not in optional]
    if strange:
        raise UserError(f"{path}: reset asks for {', '.join(strange)}; it is given sample, seed and sandbox")
    return EnvClass(path, cls, offered, by_name, kwargs, sandbox)


def _takes_by_name(cls: type) -> bool:
    given = () if isinstance(inspect.getattr_static(cls, "step"), staticmethod | classmethod) else (None,)
    try:
        inspect.signature(cls.step).bind(*given, **dict.fromkeys(STEP))
    except (TypeError, ValueError):
        return False
    return True
