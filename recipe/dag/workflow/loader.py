"""Conversion of a workflow file's source to a Workflow.

Invariant: a Workflow that is returned has passed every check; otherwise all problems are raised together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipe.dag.core.problem import KeyPath, Problem, WorkflowError, each_once
from recipe.dag.workflow.checks.agent import warn_of_sampling
from recipe.dag.workflow.checks.all import check_workflow
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.checks.policy import warn_of_policies
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.checks.reward import warn_of_rewards
from recipe.dag.workflow.checks.tool import warn_of_time_limits
from recipe.dag.workflow.checks.training import policy_of
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.graph import graph_of, topological_order
from recipe.dag.workflow.node import TRAINING_KINDS, Node
from recipe.dag.workflow.overrides import with_overrides
from recipe.dag.workflow.read_draft import read_draft
from recipe.dag.workflow.relocate_paths import relocated, relocated_node
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.source import Source
from recipe.dag.workflow.subworkflow import Reader, expand
from recipe.dag.workflow.training_chain import derive_training_chain


def workflow_from(source: Source, read: Reader) -> Workflow:
    """Return the workflow of a source whose references are resolved. `read` reads the files of sub-workflows. Raises
    WorkflowError, whose `problems` are all mistakes of the file."""
    draft = checked_draft(source, read)
    policies = with_overrides(draft)
    return Workflow(
        path=str(Path(source.file).resolve()),
        dag_id=draft.dag_id,
        description=draft.description,
        agents=tuple(agent for _, agent in draft.each_agent()),
        policies=policies,
        tools={name: tool for name, tool in draft.tools.items() if tool is not None},
        envs={
            name: relocated(env, _file_of(draft, ("envs", name)), draft.source.file) for name, env in draft.each_env()
        },
        episode=draft.episode,
        loops=dict(draft.each_loop()),
        algorithm=draft.algorithm,
        nodes=_nodes(draft),
        warnings=_warnings(draft),
    )


def checked_draft(source: Source, read: Reader) -> Draft:
    """Return the pieces of a source that has no mistakes. `read` as in `workflow_from`. Raises WorkflowError."""
    draft = read_draft(expand(source, read))
    problems = [*draft.problems, *check_workflow(draft)]
    if problems:
        raise WorkflowError(problems)
    return draft


def _nodes(draft: Draft) -> tuple[Node, ...]:
    """Return the nodes in topological order, each training node with its policy. The training chain is derived if none
    is declared."""
    nodes = []
    for index, node in draft.each_node():
        # with_overrides has moved the node's overrides to its policy
        changes: dict[str, Any] = {"config": {}}
        if node.kind in TRAINING_KINDS:
            changes["policy"] = policy_of(draft, node)
        node = node.model_copy(update=changes)
        nodes.append(relocated_node(node, _file_of(draft, ("nodes", index)), draft.source.file))
    if not any(node.kind in TRAINING_KINDS for node in nodes):
        nodes += derive_training_chain(dict(draft.each_policy()), nodes, draft.algorithm)
    by_id = {node.id: node for node in nodes}
    return tuple(by_id[name] for name in topological_order(graph_of(nodes)))


def _file_of(draft: Draft, path: KeyPath) -> str:
    """Return the file in which the value at `path` is written."""
    return draft.source.origin(path).source.file


def _warnings(draft: Draft) -> tuple[Problem, ...]:
    facts = DraftFacts(draft, References(draft.source))
    warnings = [
        *draft.source.warnings,
        *warn_of_sampling(draft),
        *warn_of_time_limits(draft),
        *warn_of_policies(draft),
        *draft.algorithm.warn(facts),
        *warn_of_rewards(facts),
    ]
    return tuple(each_once(warnings))
