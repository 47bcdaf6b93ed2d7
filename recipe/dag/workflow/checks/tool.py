"""Checks of the tools that are declared under `tools`, that agents name, and of what agents write beside a name.

Invariant: a tool that passes exists, and each of its keys has an effect: the tool reads it, or the engine applies it to
every call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean, listing
from recipe.dag.tools.base import BuiltinTool
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.sandbox import MAX_RUN_S
from recipe.dag.types.convention import TOOL, Reference
from recipe.dag.types.tool import problem_of_parameters
from recipe.dag.workflow.agent_schema import DeclaredTool, ToolSpec
from recipe.dag.workflow.checks.references import References
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.source import value_at

BY_BUILT_IN = ("max_timeout_s", "memory_mb", "auto_print")
"""Options that the engine cannot apply to a tool: only built-in tools read them."""


def check_tools(draft: Draft, references: References) -> Iterator[Problem]:
    yield from _check_unused(draft)
    yield from _check_twice(draft)
    declared = draft.source.data.get("tools")
    for path, written, tool in _each_tool(draft):
        name = written.get("name") if isinstance(written, dict) else written
        if path[0] == "tools" or not isinstance(declared, dict) or name not in declared:
            yield from _check_named(draft, references, path, written, tool)
        elif isinstance(written, dict) and "path" in written:
            message = f"`tools.{name}` says which tool it is; remove this, or give the tool another `name`"
            yield draft.source.problem((*path, "path"), message, key=True)
        elif isinstance(written, dict) and written.get("kwargs"):
            yield from _check_overriding_kwargs(draft, references, path, str(name), tool)
        if isinstance(written, dict):
            problems = list(_check_options(draft, path, written, tool))
            yield from problems or _check_shown(draft, path, written)


def _each_tool(draft: Draft) -> Iterator[tuple[KeyPath, Any, ToolSpec]]:
    """Yield (path, what is written there, the tool with all of its options) of each tool that is declared, or that an
    agent names."""
    for name, spec in draft.tools.items():
        if spec is not None:
            named = spec if spec.path or spec.name else spec.model_copy(update={"name": name})
            yield ("tools", name), draft.source.data["tools"][name], named
    for index, agent in draft.each_agent():
        for position, tool in enumerate(agent.tools):
            path: KeyPath = ("agents", index, "tools", position)
            if (written := value_at(draft.source.data, path)) is not None:  # None: a misspelt key, which was reported
                yield path, written, tool


def _check_named(
    draft: Draft, references: References, path: KeyPath, written: Any, tool: ToolSpec
) -> Iterator[Problem]:
    """Check that the tool exists, and takes its `kwargs`."""
    if tool.path is not None:
        at = (*path, "path") if isinstance(written, dict) else path
        yield from references.check_class(Reference(tool.path, at, tool.kwargs, (*path, "kwargs")), TOOL)
    elif not tool.name:
        message = f"give the tool a `name` ({', '.join(BUILTIN)}) or a `path` (`file.py:Class`)"
        yield draft.source.problem(path, message)
    elif tool.name in BUILTIN:
        yield from _check_built_in(draft, tool.name, tool.kwargs, path)
    else:
        names = [*BUILTIN, *(draft.tools if path[0] == "agents" else ())]
        at = (*path, "name") if isinstance(written, dict) and "name" in written else path
        message = f"no tool `{tool.name}`{did_you_mean(tool.name, names)} (your own tool: `file.py:Class`)"
        yield draft.source.problem(at, message)


def _check_built_in(draft: Draft, name: str, kwargs: dict[str, Any], at: KeyPath) -> Iterator[Problem]:
    """Check the `kwargs` of a built-in tool that is written at `at`."""
    source, here = draft.source, (*at, "kwargs")
    options, problems = parse_piece(BUILTIN[name].Options, kwargs, source, here)
    yield from problems
    for key, text in kwargs.items():
        if isinstance(text, str) and (message := check_env(text)):
            yield source.problem((*here, key), message)
    if options is None or problems:
        return
    for key, message in BUILTIN[name].problems(options, str(source.file)):
        yield source.problem((*here, key) if key else at, message)


def _check_overriding_kwargs(
    draft: Draft, references: References, at: KeyPath, declared: str, tool: ToolSpec
) -> Iterator[Problem]:
    """Check the `kwargs` at `at`, merged with those of the declared tool, whose own mistakes are reported there."""
    base: KeyPath = ("tools", declared)
    both = ((value_at(draft.source.data, (*base, "kwargs")) or {}, base), (tool.kwargs, at))
    if tool.path is not None:
        outline, owner = (yield from references.look_up(tool.path, (*base, "path"), "Class")) or (None, None)
        if outline is None or not isinstance(owner, ast.ClassDef):
            return
        calls = [Reference(tool.path, at, kwargs, (*where, "kwargs")) for kwargs, where in both]
        own, merged = (references.check_constructor(outline, owner, call) for call in calls)
    elif tool.name is not None and tool.name in BUILTIN:
        own, merged = (_check_built_in(draft, tool.name, kwargs, where) for kwargs, where in both)
    else:
        return
    known = {problem.message for problem in own}
    yield from (problem for problem in merged if problem.message not in known)


def _check_options(draft: Draft, path: KeyPath, written: dict[str, Any], tool: ToolSpec) -> Iterator[Problem]:
    problem = draft.source.problem
    built_in = BUILTIN.get(tool.name or "") if tool.path is None else None
    if tool.path is not None:
        for key in (key for key in BY_BUILT_IN if written.get(key) is not None):
            message = "has no effect on a class of yours; if its constructor takes it, write it in `kwargs`"
            yield problem((*path, key), message, key=True)
    elif built_in is not None:
        own = built_in.Options.model_fields
        for key in (key for key in BY_BUILT_IN if written.get(key) is not None and key not in own):
            yield problem((*path, key), f"`{tool.name}` has no such option; remove it", key=True)
        for key in (key for key in own if written.get(key) is not None and key in tool.kwargs):
            yield problem((*path, key), f"`kwargs.{key}` sets this, too; remove one", key=True)
        options = built_in.Options.model_construct(**tool.options(own))
        yield from _check_shared(draft, path, written, tool, built_in)
        limit, largest = (getattr(options, key, None) for key in ("timeout_s", "max_timeout_s"))
        if isinstance(limit, int | float) and isinstance(largest, int | float) and largest < limit:
            for key in (key for key in ("max_timeout_s", "timeout_s") if written.get(key) is not None):
                message = f"max_timeout_s {largest:g} is below timeout_s {limit:g}; raise it or remove it"
                yield problem((*path, key), message, key=True)
                break
    if written.get("parameters") is not None and tool.parameters is not None:
        own_parameters = built_in.parameters if built_in is not None else None
        message = problem_of_parameters(tool.parameters, own_parameters)
        if message is not None:
            yield problem((*path, "parameters"), message)


def _check_shared(
    draft: Draft, path: KeyPath, written: dict[str, Any], tool: ToolSpec, built_in: type[BuiltinTool]
) -> Iterator[Problem]:
    """Check that a text for one tool is not written for all tools of a server."""
    if built_in.several and len(tool.kwargs.get("tools") or ()) != 1:
        for key in (key for key in ("description", "parameters") if written.get(key) is not None):
            message = "several tools would share it; select one with `kwargs: {tools: [NAME]}`, or remove this"
            yield draft.source.problem((*path, key), message, key=True)


def _check_shown(draft: Draft, path: KeyPath, written: dict[str, Any]) -> Iterator[Problem]:
    """Check that a model reads the description, and calls the tool with the parameters, that are written at `path`."""
    keys = [key for key in ("description", "parameters") if written.get(key) is not None]
    if not keys or not draft.complete:
        return
    if path[0] == "tools":
        agents = [agent for _, agent in draft.each_agent() if any(_declares(tool, path[1]) for tool in agent.tools)]
    else:
        agents = [agent for index, agent in draft.each_agent() if index == path[1]]
    formats = {agent.tool_loop.format for agent in agents if agent.tool_loop is not None}
    names = listing(agent.name for agent in agents)
    for key in keys if agents else ():
        if key == "description" and "hermes" not in formats:
            message = f"no model reads it: only `tool_loop: {{format: hermes}}` shows it (agents: {names}); remove it"
            yield draft.source.problem((*path, key), message, key=True)
        if key == "parameters" and not formats:
            message = f"no model calls the tool: there is no `tool_loop` (agents: {names}); remove it"
            yield draft.source.problem((*path, key), message, key=True)


def _declares(tool: ToolSpec, name: Any) -> bool:
    return isinstance(tool, DeclaredTool) and tool.declared == name


def _check_twice(draft: Draft) -> Iterator[Problem]:
    for index, agent in draft.each_agent():
        for position, tool in enumerate(agent.tools):
            if any(tool.key == other.key for other in agent.tools[:position]):
                yield draft.source.problem(
                    ("agents", index, "tools", position), f"`{tool}` is listed twice; remove one"
                )


def _check_unused(draft: Draft) -> Iterator[Problem]:
    """Check that every tool under `tools` is used."""
    tools = [tool for _, agent in draft.each_agent() for tool in agent.tools]
    used = {tool.declared if isinstance(tool, DeclaredTool) else tool.name for tool in tools} - {None}
    if not draft.complete or used - {*BUILTIN, *draft.tools}:
        return  # a name that does not exist is reported; it may be a misspelt one
    for name in draft.tools:
        if name not in used:
            message = f"no agent uses tool `{name}`; name it in an agent's `tools` or remove it"
            yield draft.source.problem(("tools", name), message, key=True)


def warn_of_time_limits(draft: Draft) -> Iterator[Problem]:
    """Warn of time limits of tools that exceed the limit of the call, the episode or the sandbox."""
    limits = (
        (draft.episode.call_timeout_s, "episode.call_timeout_s ends the call after {:g} s; raise that or lower this"),
        (draft.episode.timeout_s, "episode.timeout_s ends the episode after {:g} s; raise that or lower this"),
    )
    of_programs = (*limits, (MAX_RUN_S, "the sandbox ends every program after {:g} s; lower this"))
    times: list[tuple[KeyPath, Any, tuple[tuple[float, str], ...]]] = [
        (("nodes", index, "parse_options", "code_timeout"), value, of_programs)
        for index, node in draft.each_node()
        if (value := node.parse_options.get("code_timeout")) is not None
    ]
    for path, written, tool in _each_tool(draft):
        written = written if isinstance(written, dict) else {}
        built_in = BUILTIN.get(tool.name or "") if tool.path is None else None
        reasons = of_programs if built_in is not None and built_in.needs_sandbox else limits
        kwargs = written.get("kwargs") if tool.path is None else None
        for key in ("timeout_s", "max_timeout_s", "request_timeout_s"):
            times.append(((*path, key), written.get(key), reasons))
            if isinstance(kwargs, dict):
                times.append(((*path, "kwargs", key), kwargs.get(key), reasons))
    for path, seconds, reasons in times:
        if isinstance(seconds, int | float) and not isinstance(seconds, bool):
            for limit, reason in reasons:
                if seconds >= limit:
                    yield draft.source.problem(path, f"{seconds:g} s cannot be reached: {reason.format(limit)}")
                    break
