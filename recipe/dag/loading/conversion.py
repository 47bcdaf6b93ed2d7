"""`verl-dag import`: rewrites a workflow file, also one of siiRL, in the short form.

Invariant: the new file loads to the same workflow, and its first lines list the settings of the old file that have no
effect.
"""

from __future__ import annotations

from pathlib import Path

from recipe.dag.core.frozen import Mark, marked
from recipe.dag.core.paths import resolve_folder
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.workflow.agent_schema import Agent, ToolSpec
from recipe.dag.workflow.relocate_paths import relocated, relocated_node, relocated_path
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.to_yaml import to_yaml


def import_workflow(path: str | Path, output: str | Path | None = None) -> str:
    """Return the text of the new file. `output`: its path; by default in the folder of the old file. Raises
    WorkflowError."""
    workflow = load_workflow(path)
    if output is not None:
        workflow = _relocated(workflow, output)
    return to_yaml(workflow, _comments(workflow, Path(path).name))


def _relocated(workflow: Workflow, output: str | Path) -> Workflow:
    """Return the workflow with its paths as a file at `output` must write them."""
    nodes = tuple(relocated_node(node, workflow.path, output) for node in workflow.nodes)
    agents = tuple(_relocated_tools(agent, workflow.path, output) for agent in workflow.agents)
    tools = {name: _relocated_tool(tool, workflow.path, output, name) for name, tool in workflow.tools.items()}
    rest = relocated(workflow.model_copy(update={"nodes": (), "agents": (), "tools": {}}), workflow.path, output)
    return rest.model_copy(update={"nodes": nodes, "agents": agents, "tools": tools})


def _relocated_tools(agent: Agent, origin: str | Path, target: str | Path) -> Agent:
    tools = tuple(_relocated_tool(tool, origin, target) for tool in agent.tools)
    return agent.model_copy(update={"tools": tools}) if tools != agent.tools else agent


def _relocated_tool(tool: ToolSpec, origin: str | Path, target: str | Path, declared: str = "") -> ToolSpec:
    """`declared`: its key under `tools`, which is its name unless it has another."""
    if tool.path is not None:
        return relocated(tool, origin, target)
    built_in = BUILTIN.get(tool.name or declared)
    folders = marked(built_in.Options, Mark.CONTENT) if built_in is not None else ()
    moved = {
        key: relocated_path(tool.kwargs[key], resolve_folder, origin, target) for key in folders if tool.kwargs.get(key)
    }
    return tool.model_copy(update={"kwargs": {**tool.kwargs, **moved}}) if moved else tool


def _comments(workflow: Workflow, name: str) -> list[str]:
    lines = [f"Made from {name} by `verl-dag import`."]
    if workflow.warnings:
        lines += ["", f"Settings of {name} without an effect, or with a different one:"]
    for problem in workflow.warnings:
        where = f"{problem.where}: " if problem.where else ""
        file = "" if Path(problem.file).name == name else f"{Path(problem.file).name}, "
        lines.append(f"  {file}line {problem.line}: {where}{' '.join(problem.message.split())}")
    return lines
