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

from recipe.dag.compat.siirl.token_hooks import TOKEN_FORM, TokenHooks, in_token_form
from recipe.dag.core.errors import HookFault, UserError, boundary, described
from recipe.dag.core.location import raised_at
from recipe.dag.core.tasks import guarded
from recipe.dag.core.user_code import load_object
from recipe.dag.types.agent import Agent, defines
from recipe.dag.types.context import Context
from recipe.dag.workflow.schema import Node, Workflow


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
    options = node.agent_options
    if options.process_path is None:
        return AgentCode()
    where = f"node {node.node_id}: {options.process_path}"
    holder = load_object(options.process_path, workflow.path)
    if inspect.isclass(holder):
        try:
            holder = holder()
        except Exception as error:
            text = f"{type(error).__name__}: {error} ({raised_at(error)})"
            raise UserError(f"{where}: {text}; a hook class takes no arguments") from error
    needs_tokens = in_token_form(holder, where)
    names = TOKEN_FORM if needs_tokens else ("prompt", "parse")
    functions = [_function(holder, name, options.process_path) for name in names]
    if functions == [None, None]:
        kind = "file" if isinstance(holder, ModuleType) else "class"
        raise UserError(f"{where}: the {kind} defines neither prompt nor parse")
    prompt, parse = functions
    if needs_tokens:
        adapter = TokenHooks(*functions, agent=workflow.agent_of(node), where=where)
        prompt, parse = adapter.prompt, adapter.parse
    if isinstance(holder, Agent):
        holder.prepare(workflow, node)
    kwargs = options.pre_process_kwargs, options.post_process_kwargs
    hooks = [
        None if function is None else Hook(call, f"{options.process_path}:{name}", function, own)
        for call, name, function, own in zip((prompt, parse), names, functions, kwargs, strict=True)
    ]
    return AgentCode(*hooks, private=bool(getattr(holder, "private", False)), needs_tokens=needs_tokens)


def _function(holder: Any, name: str, path: str) -> Any:
    """Return the function of that name; None if there is none."""
    if not defines(holder, name):
        return None
    function = getattr(holder, name)
    if not callable(function):
        raise UserError(f"{path}: {name} is {described(function)}, not a function")
    return function
