"""`verl-dag import`: a siiRL workflow file as one of this language.

Invariant: the new file loads to the same workflow, and its first lines say what the old one said that nothing does.
"""

from __future__ import annotations

from pathlib import Path

from recipe.dag.algorithms.custom import Custom
from recipe.dag.workflow.compact import to_yaml
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.rebase import rebased, rebased_node
from recipe.dag.workflow.schema import Workflow


def import_workflow(path: str | Path, output: str | Path | None = None) -> str:
    """The new file's text. `output`: where it will be; beside the old one where absent. Raises WorkflowError."""
    workflow = load_workflow(path)
    if output is not None:
        workflow = _moved(workflow, output)
    return to_yaml(workflow, _comments(workflow, Path(path).name))


def _moved(workflow: Workflow, output: str | Path) -> Workflow:
    """With its paths as a file at `output` has to write them."""
    envs = {
        name: env.model_copy(update={"path": rebased(env.path, workflow.path, output)})
        for name, env in workflow.envs.items()
    }
    nodes = tuple(rebased_node(node, workflow.path, output) for node in workflow.nodes)
    algorithm = workflow.algorithm
    if isinstance(algorithm, Custom):
        estimator = rebased(algorithm.estimator, workflow.path, output)
        algorithm = algorithm.model_copy(update={"estimator": estimator})
    return workflow.model_copy(update={"envs": envs, "nodes": nodes, "algorithm": algorithm})


def _comments(workflow: Workflow, name: str) -> list[str]:
    lines = [f"Made from {name} by `verl-dag import`."]
    if workflow.warnings:
        lines += ["", f"What {name} says and nothing reads, or what is done in its place:"]
    for problem in workflow.warnings:
        where = f"{problem.where}: " if problem.where else ""
        file = "" if Path(problem.file).name == name else f"{Path(problem.file).name}, "
        lines.append(f"  {file}line {problem.line}: {where}{' '.join(problem.message.split())}")
    return lines
