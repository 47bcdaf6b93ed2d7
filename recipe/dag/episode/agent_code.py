"""The code of agents as a workflow names it, a class or a file, in any supported form.

Invariant: whatever form the code has, the engine gets `prompt(context)` and `parse(context)`, and errors name the
user's own file and function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from recipe.dag.compat.siirl.token_hooks import TokenHooks, check_form
from recipe.dag.core.errors import HookFault, UserError, boundary, described
from recipe.dag.core.location import raised_at
from recipe.dag.core.tasks import guarded
from recipe.dag.core.user_code import load_object
from recipe.dag.types.agent import Agent, defines
from recipe.dag.types.context import Context
from recipe.dag.types.convention import HOOKS, TOKEN_HOOKS, form_of
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.source import Source


@dataclass(frozen=True, slots=True)
class Hook:
    """`prompt` or `parse` of an agent, with its options."""

    call: Callable[..., Any]
    """`call(context, **options)`, sync or async."""
    where: str
    """file:function"""
    function: Callable[..., Any]
    """The user's own, in whose file a mistake is located."""
    options: dict[str, Any]

    def guard(self) -> AbstractContextManager[None]:
        """Return the boundary that its failures cross, those of what it returned included."""
        return boundary(HookFault, self.where, self.function)

    async def run(self, context: Context) -> Any:
        """Return what the hook returns, unchecked. Raises what it raises."""
        result = self.call(context, **self.options)
        return await guarded(result) if inspect.isawaitable(result) else result


@dataclass(frozen=True, slots=True)
class AgentCode:
    """The code of a node's agent. None: the engine's default."""

    prompt: Hook | None = None
    parse: Hook | None = None
    private: bool = False
    """`Agent.private`."""
    needs_tokens: bool = False
    """It needs `context.tokens`, so its policy must have a tokenizer."""


def load_agent(node: Node, workflow: Workflow) -> AgentCode:
    """Load the node's hooks. A class is instantiated once, here, so it must keep no state of an episode. Raises
    UserError."""
    if node.hooks is None:
        return AgentCode()
    where = f"node {node.id}: {node.hooks}"
    holder = load_object(node.hooks, workflow.path)
    if inspect.isclass(holder):
        try:
            holder = holder()
        except Exception as error:
            text = f"{type(error).__name__}: {error} ({raised_at(error)})"
            raise UserError(f"{where}: {text}; a hook class takes no arguments") from error
    form = form_of(lambda name: defines(holder, name))
    needs_tokens = form is TOKEN_HOOKS
    if needs_tokens:
        check_form(holder, where)
    kwargs = (_passed(holder, node.prompt_options, where), node.parse_options)
    functions = [_function(holder, name, node.hooks, own) for name, own in zip(form, kwargs, strict=True)]
    if functions == [None, None]:
        kind = "file" if isinstance(holder, ModuleType) else "class"
        raise UserError(f"{where}: the {kind} defines neither prompt nor parse")
    prompt, parse = functions
    if needs_tokens:
        adapter = TokenHooks(*functions, agent=workflow.agent_of(node), where=where)
        prompt, parse = adapter.prompt, adapter.parse
    if isinstance(holder, Agent):
        holder.prepare(workflow, node)
    hooks = [
        None if function is None else Hook(call, f"{node.hooks}:{name}", function, own)
        for call, name, function, own in zip((prompt, parse), form, functions, kwargs, strict=True)
    ]
    return AgentCode(*hooks, private=bool(getattr(holder, "private", False)), needs_tokens=needs_tokens)


def _passed(holder: Any, options: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the options that are passed to `prompt`: none if the class lists them in `Options`, which then reads them.
    Raises UserError."""
    if isinstance(holder, ModuleType) or getattr(holder, "Options", None) is None:
        return options
    holder.options, problems = parse_piece(holder.Options, options, Source(where), ())
    for problem in problems:
        raise UserError(f"{where}: prompt_options.{problem.where}: {problem.message}")
    return {}


def _function(holder: Any, name: str, path: str, options: dict[str, Any]) -> Any:
    """Return the function of that name; None if there is none. Raises UserError if it cannot be called."""
    if not defines(holder, name):
        return None
    function = getattr(holder, name)
    if not callable(function):
        raise UserError(f"{path}: {name} is {described(function)}, not a function")
    (HOOKS | TOKEN_HOOKS)[name].check(function, f"{name} of {path}", options)
    return function
