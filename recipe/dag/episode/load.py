"""Loads all code that a workflow names, before a run starts anything.

Invariant: code that loads here also loads in the run, which does so in the same process.
"""

from __future__ import annotations

from recipe.dag.algorithms.custom import Custom
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.candidates import load_choices
from recipe.dag.episode.env_class import load_envs
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.reward import load_rewards
from recipe.dag.types.convention import COMPUTE, SCRIPT
from recipe.dag.workflow.node import Kind
from recipe.dag.workflow.schema import Workflow


def load_user_code(workflow: Workflow) -> None:
    """Import the files of all hooks, envs, compute nodes, tools, scripts, rewards and estimators, and instantiate the
    hook classes. Raises UserError with the file and line of the user's code."""
    for node in workflow.rollout_nodes:
        load_hooks(node, workflow)
    load_envs(workflow)
    load_choices(workflow)
    for node in workflow.of_kind(Kind.COMPUTE):
        if node.compute is not None:
            COMPUTE.load(node.compute, workflow.path, f"node {node.id}", node.args)
    for path in {tool.path for agent in workflow.agents for tool in agent.tools if tool.path is not None}:
        load_object(path, workflow.path)
    for name, policy in workflow.policies.items():
        if policy.api is not None and policy.api.script is not None:
            SCRIPT.load(policy.api.script, workflow.path, f"policies.{name}.api.script")
    load_rewards(workflow)
    if isinstance(workflow.algorithm, Custom):
        workflow.algorithm.load(workflow.path)
