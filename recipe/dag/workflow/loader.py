"""Workflow file -> Workflow.

Invariant: a Workflow that comes back has passed every check; otherwise all problems come back together.
"""

from __future__ import annotations

from pathlib import Path

from recipe.dag.workflow.checks.agent import warn_of_sampling, warn_of_time_limits
from recipe.dag.workflow.checks.algorithm import warn_of_algorithm
from recipe.dag.workflow.checks.cory import warn_of_cory
from recipe.dag.workflow.checks.policy import warn_of_policies
from recipe.dag.workflow.checks.reward import warn_of_rewards
from recipe.dag.workflow.checks.training import TRAINING, policy_of
from recipe.dag.workflow.checks.whole import check_workflow
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.draft_nodes import read_draft
from recipe.dag.workflow.graph import graph_of, topological_order
from recipe.dag.workflow.inline import expand
from recipe.dag.workflow.overrides import Override, placed_overrides, with_overrides
from recipe.dag.workflow.problem import KeyPath, Problem, WorkflowError, each_once
from recipe.dag.workflow.rebase import rebased, rebased_node
from recipe.dag.workflow.refs import resolve_refs
from recipe.dag.workflow.schema import EnvSpec, Node, Workflow
from recipe.dag.workflow.short_form import in_long_form
from recipe.dag.workflow.siirl.translate import is_foreign, translate
from recipe.dag.workflow.source import parse_source, read_source
from recipe.dag.workflow.training_chain import derive_training_chain


def load_workflow(path: str | Path, text: str | None = None) -> Workflow:
    """Raises WorkflowError, whose `problems` are everything that is wrong with the file. `text`: what the file would
    hold, if it is not written yet."""
    draft = _checked(path, text)
    policies = with_overrides(draft)
    return Workflow(
        path=str(Path(path).resolve()),
        dag_id=draft.dag_id,
        description=draft.description,
        agents=tuple(draft.agents),
        policies=policies,
        envs={name: _env_at_home(draft, name, env) for name, env in draft.envs.items()},
        episode=draft.episode,
        loops=draft.loops,
        algorithm=draft.algorithm,
        nodes=_nodes(draft),
        warnings=_warnings(draft),
    )


def load_overrides(path: str | Path, text: str | None = None) -> tuple[Override, ...]:
    """What the file sets of verl's configuration, for `policy.overrides` to compare with what verl knows. `text`: as in
    `load_workflow`. Raises WorkflowError."""
    return tuple(placed_overrides(_checked(path, text)))


def _checked(path: str | Path, text: str | None = None) -> Draft:
    source = read_source(path) if text is None else parse_source(text.encode(), str(path))
    resolve_refs(source)
    source = translate(source) if is_foreign(source) else expand(in_long_form(source))
    draft = read_draft(source)
    problems = [*draft.problems, *check_workflow(draft)]
    if problems:
        raise WorkflowError(problems)
    return draft


def _nodes(draft: Draft) -> tuple[Node, ...]:
    """In topological order, each training node with its policy; the training chain derived if none is declared."""
    nodes = []
    for index, node in draft.each_node():
        # Its overrides are the policy's by now.
        given = {"config": {}} | ({"policy": policy_of(draft, index, node)} if node.node_role in TRAINING else {})
        node = node.model_copy(update=given)
        nodes.append(rebased_node(node, _home(draft, ("nodes", index)), draft.source.file))
    if not any(node.node_role in TRAINING for node in nodes):
        nodes += derive_training_chain(draft.policies, draft.agents, nodes, draft.algorithm)
    by_id = {node.node_id: node for node in nodes}
    return tuple(by_id[name] for name in topological_order(graph_of(nodes)))


def _home(draft: Draft, path: KeyPath) -> str:
    """The file in which it is written."""
    return draft.source.origin(path).source.file


def _env_at_home(draft: Draft, name: str, env: EnvSpec) -> EnvSpec:
    path = rebased(env.path, _home(draft, ("envs", name)), draft.source.file)
    return env.model_copy(update={"path": path})


def _warnings(draft: Draft) -> tuple[Problem, ...]:
    found = [
        *draft.source.warnings,
        *warn_of_sampling(draft),
        *warn_of_time_limits(draft),
        *warn_of_policies(draft),
        *warn_of_algorithm(draft),
        *warn_of_cory(draft),
        *warn_of_rewards(draft),
    ]
    return tuple(each_once(found))
