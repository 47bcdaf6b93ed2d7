"""Hooks on token ids as agents: `pre_process(tokenizer, prompt_ids, obs, ...)` and `post_process(tokenizer, prompt_ids,
response_ids, ...)`.

Invariant: the `prompt_ids` of `pre_process` are a running transcript in the ids of its agent's tokenizer: what the
latest visible call's `post_process` returned, or what its env said in place of that. Without one, and for a hook that
names `context` and builds its prompt from there, they are the rendered sample.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

from recipe.dag.core.errors import HookFault, UserError, described
from recipe.dag.endpoint.chat import as_ids
from recipe.dag.types.agent import defines
from recipe.dag.types.context import Context, Output
from recipe.dag.types.convention import TOKEN_HOOKS, parameters_of
from recipe.dag.types.record import Call
from recipe.dag.types.tokens import Tokens
from recipe.dag.workflow.agent_schema import Agent


def check_form(holder: Any, where: str) -> None:
    """Raise UserError for a class that has one function of each form."""
    halves = (("prompt", "pre_process", "post_process"), ("parse", "post_process", "pre_process"))
    for native, counterpart, defined in halves:
        is_method = inspect.ismethod(getattr(holder, native, None)) and defines(holder, native)
        if is_method and not defines(holder, counterpart):
            raise UserError(f"{where}: the class defines {native} and {defined}; write prompt and parse")


class TokenHooks:
    """The `prompt` and `parse` of an agent whose code has the token-level form."""

    def __init__(
        self, pre: Callable[..., Any] | None, post: Callable[..., Any] | None, agent: Agent, where: str
    ) -> None:
        """Of `pre` and `post` one may be missing. Raises UserError for an agent that cannot have such hooks."""
        if pre is not None and agent.memory != "none" and not _takes_context(pre):
            raise UserError(
                f"{where}: pre_process takes no `context`, so it returns token ids, but agent {agent.name} has "
                f"`memory: {agent.memory}`, which appends messages; add `context` and return messages, or remove it"
            )
        self._pre, self._post = _called_with_context(pre), _called_with_context(post)
        # A hook that names the context, not as a part of **kwargs, builds its prompt from it.
        self._names_context = pre is not None and "context" in inspect.signature(pre).parameters
        self._reads_ids = pre is not None and _reads_argument(pre, 1)

    async def prompt(self, context: Context, **options: Any) -> Any:
        """Return the token ids or messages that `pre_process` returns."""
        ids = await self._prompt_ids(context) if self._reads_ids else []
        return await self._pre(context, options, ids, context.obs)

    async def parse(self, context: Context, **options: Any) -> Output | str | None:
        """Return what `post_process` returns; token ids as their text, and as the transcript for the next agent."""
        call, tokens = context.call, context.tokens
        result = await self._post(context, options, list(call.prompt_ids), list(call.response_ids))
        if result is None or isinstance(result, str | Output):
            return result
        ids = as_ids(result)
        if ids is None or tokens is None:
            raise HookFault(f"returned {described(result)}, not token ids, a str or an Output")
        # With special tokens: the next agent's hook gets these ids again, from its own tokenizer.
        tokens.notes[_key(call)] = tokens.tokenizer.decode(ids, skip_special_tokens=False)
        return tokens.tokenizer.decode(ids, skip_special_tokens=True)

    async def _prompt_ids(self, context: Context) -> list[int]:
        tokens = context.tokens
        if tokens is None:
            return []
        if not self._names_context and (transcript := _transcript(tokens, context)) is not None:
            return await tokens.encode(transcript)
        key = ("sample", context.agent)
        if key not in tokens.notes:
            tokens.notes[key] = await tokens.sample_ids()
        return list(tokens.notes[key])


def _called_with_context(function: Callable[..., Any] | None) -> Any:
    """Return `call(context, options, *args)` for a function that gets the tokenizer first and may take no context."""
    if function is None:
        return None
    takes_context = _takes_context(function)

    async def call(context: Context, options: dict[str, Any], *args: Any) -> Any:
        tokenizer = None if context.tokens is None else context.tokens.tokenizer
        result = function(tokenizer, *args, **options, **({"context": context} if takes_context else {}))
        return await result if inspect.isawaitable(result) else result

    return call


def _takes_context(function: Callable[..., Any]) -> bool:
    return "context" in TOKEN_HOOKS["pre_process"].taken(parameters_of(function))


def _transcript(tokens: Tokens, context: Context) -> str | None:
    """Return the transcript of the latest visible call; None if its `post_process` did not return token ids."""
    visible = context.upstream.values()
    last = next((call for call in reversed(context.calls) if any(call is other for other in visible)), None)
    if last is None or "failed" in last.parsed or _key(last) not in tokens.notes:
        return None
    obs = tokens.observed(last)
    return obs if isinstance(obs, str) else tokens.notes[_key(last)]


def _key(call: Call) -> tuple[str, int, int, int | None]:
    return call.node, call.turn, call.round, call.candidate


_SEES_ALL_LOCALS = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"}


def _reads_argument(function: Callable[..., Any], position: int) -> bool:
    """Return whether the function may read that positional argument (after `self`); True if in doubt. To render and
    encode the sample is expensive.

    It looks for the argument's name in the bytecode: an instruction's operand is a name or a tuple of names.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    position += inspect.ismethod(function)
    if position >= code.co_argcount or _SEES_ALL_LOCALS & set(code.co_names):
        return True
    name = code.co_varnames[position]
    # Closures and comprehensions read it through a cell.
    if name in code.co_cellvars:
        return True
    operands = (instruction.argval for instruction in dis.get_instructions(code))
    return any(name == operand or isinstance(operand, tuple) and name in operand for operand in operands)
