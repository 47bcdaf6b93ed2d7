"""Conversion of a workflow file's source to a Workflow.

Invariant: a Workflow that is returned has passed every check; otherwise all problems are raised together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.dag.core.frozen import M
from recipe.dag.core.problem import KeyPath, Problem, WorkflowError, each_once
from recipe.dag.workflow.checks.agent import warn_of_sampling
from recipe.dag.workflow.checks.all import check_workflow
from recipe.dag.workflow.checks.facts import DraftFacts
from recipe.dag.workflow.checks.lora import with_bases
from recipe.dag.workflow.checks.policy import warn_of_policies
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
    facts = checked(source, read)
    draft = facts.draft
    policies = with_bases(with_overrides(draft))
    return Workflow(
        path=str(Path(source.file).resolve()),
        dag_id=draft.dag_id,
        description=draft.description,
        agents=tuple(agent for _, agent in draft.each_agent()),
        policies=policies,
        tools={name: tool for name, tool in draft.tools.items() if tool is not None},
        envs={name: _here(relocated, env, draft, ("envs", name)) for name, env in draft.each_env()},
        episode=draft.episode,
        loops=dict(draft.each_loop()),
        algorithm=draft.algorithm,
        nodes=_nodes(draft),
        warnings=_warnings(facts),
    )


def checked(source: Source, read: Reader) -> DraftFacts:
    """Return the facts about a source that has no mistakes. `read` as in `workflow_from`. Raises WorkflowError."""
    facts = DraftFacts(read_draft(expand(source, read)))
    problems = [*facts.draft.problems, *check_workflow(facts)]
    if problems:
        raise WorkflowError(problems)
    return facts


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
        nodes.append(_here(relocated_node, node, draft, ("nodes", index)))
    if not any(node.kind in TRAINING_KINDS for node in nodes):
        nodes += derive_training_chain(dict(draft.each_policy()), nodes, draft.algorithm)
    by_id = {node.id: node for node in nodes}
    return tuple(by_id[name] for name in topological_order(graph_of(nodes)))


def _here(relocate: Callable[[M, str, str], M], piece: M, draft: Draft, path: KeyPath) -> M:
    """Return the piece at `path` with its paths as this file must write them, also if a sub-workflow's file has it."""
    file = draft.source.origin(path).source.file
    return piece if file == draft.source.file else relocate(piece, file, draft.source.file)


def _warnings(facts: DraftFacts) -> tuple[Problem, ...]:
    draft = facts.draft
    warnings = [
        *draft.source.warnings,
        *warn_of_sampling(draft),
        *warn_of_time_limits(draft),
        *warn_of_policies(draft),
        *draft.algorithm.warn(facts),
        *warn_of_rewards(facts),
    ]
    return tuple(each_once(warnings))
