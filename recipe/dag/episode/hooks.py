"""The user's code around a call, and the defaults for a node without hooks.

Hooks have one of two forms: `prompt(context)` and `parse(context)`, or the token-level form, `pre_process` and
`post_process` with a tokenizer and token ids.

Invariant: whatever a hook does, the caller gets a prompt or a HookResult, or a HookFault that names the file and
function. Sync hooks run on the event loop, so they must be quick (they format and parse text); a hook that waits must
be async.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from recipe.dag.core.errors import HookFault, UserError, boundary, described
from recipe.dag.core.location import raised_at
from recipe.dag.core.tasks import guarded
from recipe.dag.core.user_code import load_object
from recipe.dag.endpoint.chat import as_ids
from recipe.dag.types.agent import Agent
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call
from recipe.dag.workflow.schema import Node, Workflow

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Prompt = list[int] | list[Message]
NATIVE_FORM = ("prompt", "parse")
TOKEN_FORM = ("pre_process", "post_process")


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function in either form."""

    function: Callable[..., Any]
    where: str
    """file:function"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    native: bool = False
    """True: called with the context alone. False: called with the arguments of the token-level form."""
    takes_context: bool = False
    names_context: bool = False
    """The context is a named parameter, not part of **kwargs. Such a hook builds its prompt from the context, so its
    prompt_ids are the sample's, not the transcript of the call before."""
    reads_prompt_ids: bool = True
    """False: its code never touches its second argument, so the sample need not be rendered and encoded for it."""

    async def __call__(self, *args: Any, context: Context) -> Any:
        extra: dict[str, Any] = {}
        if self.native:
            args = (context,)
        elif self.takes_context:
            extra["context"] = context
        with boundary(HookFault, self.where, self.function):
            result = self.function(*args, **self.kwargs, **extra)
            return await guarded(result) if inspect.isawaitable(result) else result


@dataclass(slots=True)
class HookResult:
    """The result of a call after its `parse` or `post_process` hook."""

    output: Output
    ids: list[int] | None = None
    """The token ids that a hook in the token-level form returned: the transcript for the next agent's hook."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """A node's hooks. None means the default."""

    pre: Hook | None
    post: Hook | None
    dependencies: tuple[str, ...] = ()
    """The nodes whose texts the default prompt contains."""
    peers: tuple[str, ...] = ()
    """The nodes of its loop, whose texts of the previous round it contains as well."""
    private: bool = False
    """`Agent.private`."""

    async def pre_process(self, tokenizer: Any, prompt_ids: list[int], context: Context) -> Prompt:
        """Return ids to feed unchanged, or messages for the chat template; never empty."""
        if self.pre is None:
            return default_prompt(context, self.dependencies, self.peers)
        with boundary(HookFault, self.pre.where, self.pre.function):
            result = await self.pre(tokenizer, prompt_ids, context.obs, context=context)
            ids = as_ids(result)
            if ids:
                return ids
            if isinstance(result, list) and result and all(isinstance(m, dict) and "role" in m for m in result):
                return result
            raise HookFault(f"returned {described(result)}, not token ids or messages")

    async def post_process(
        self, tokenizer: Any, prompt_ids: list[int], response_ids: list[int], context: Context
    ) -> HookResult:
        """Return what the hook made of the call. If `output.text` is None, the call keeps its text."""
        if self.post is None:
            return HookResult(Output())
        with boundary(HookFault, self.post.where, self.post.function):
            result = await self.post(tokenizer, prompt_ids, response_ids, context=context)
            if result is None:
                return HookResult(Output())
            if isinstance(result, str):
                return HookResult(Output(text=result))
            if isinstance(result, Output):
                return HookResult(checked(result, self.post.where))
            ids = None if self.post.native else as_ids(result)
            if ids is None:
                wanted = "a str, an Output or None" if self.post.native else "token ids, a str or an Output"
                raise HookFault(f"returned {described(result)}, not {wanted}")
            return HookResult(Output(text=tokenizer.decode(ids, skip_special_tokens=True)), ids)


def is_messages(prompt: Prompt) -> TypeIs[list[Message]]:
    """Return whether a prompt, which is never empty, consists of messages rather than token ids."""
    return isinstance(prompt[0], dict)


def load_hooks(node: Node, workflow: Workflow) -> Hooks:
    """Load the node's process_path. A class is instantiated once, here, so it must keep no state of an episode.
    Raises UserError."""
    episode_nodes = {other.node_id for other in workflow.episode_nodes}
    dependencies = tuple(name for name in node.dependencies if name in episode_nodes)
    peers = next((loop.nodes for loop in workflow.loops.values() if node.node_id in loop.nodes), ())
    options = node.agent_options
    if options.process_path is None:
        return Hooks(None, None, dependencies, peers)
    where = f"node {node.node_id}: {options.process_path}"
    holder = load_object(options.process_path, workflow.path)
    if inspect.isclass(holder):
        try:
            holder = holder()
        except Exception as error:
            text = f"{type(error).__name__}: {error} ({raised_at(error)})"
            raise UserError(f"{where}: {text}; a hook class takes no arguments") from error
    names = _names_of_form(holder, where)
    pre = _hook(holder, names[0], options.process_path, options.pre_process_kwargs)
    post = _hook(holder, names[1], options.process_path, options.post_process_kwargs)
    agent = workflow.agent_of(node)
    if agent.memory == "chat" and pre is not None and not pre.takes_context:
        raise UserError(
            f"{where}: pre_process takes no `context`, so it returns token ids, but agent {agent.name} has "
            "`memory: chat`, which appends messages; add `context` and return messages, or remove `memory`"
        )
    if pre is None and post is None:
        kind = "file" if isinstance(holder, ModuleType) else "class"
        raise UserError(f"{where}: the {kind} defines neither prompt nor parse")
    if isinstance(holder, Agent):
        holder.prepare(workflow, node)
    return Hooks(pre, post, dependencies, peers, private=bool(getattr(holder, "private", False)))


def _names_of_form(holder: Any, where: str) -> tuple[str, str]:
    """Return the names of the two functions in the form that `holder` uses: the token-level form if it defines one of
    those, since a helper may be called parse. Raises UserError for a class with one function of each form."""
    if not any(_defines(holder, name) for name in TOKEN_FORM):
        return NATIVE_FORM
    halves = (("prompt", "pre_process", "post_process"), ("parse", "post_process", "pre_process"))
    for native, counterpart, defined in halves:
        is_method = inspect.ismethod(getattr(holder, native, None)) and _defines(holder, native)
        if is_method and not _defines(holder, counterpart):
            raise UserError(f"{where}: the class defines {native} and {defined}; write prompt and parse")
    return TOKEN_FORM


def _defines(holder: Any, name: str) -> bool:
    """Return whether `holder` has an attribute of that name that it does not just inherit from Agent."""
    function = getattr(holder, name, None)
    inherited = name in NATIVE_FORM and getattr(function, "__func__", None) is getattr(Agent, name)
    return function is not None and not inherited


def _hook(holder: Any, name: str, path: str, kwargs: dict[str, Any]) -> Hook | None:
    if not _defines(holder, name):
        return None
    function = getattr(holder, name)
    if callable(function) and name in NATIVE_FORM:
        return Hook(
            function,
            f"{path}:{name}",
            kwargs,
            native=True,
            takes_context=True,
            names_context=True,
            reads_prompt_ids=False,
        )
    if not callable(function):
        raise UserError(f"{path}: {name} is {described(function)}, not a function")
    parameters = inspect.signature(function).parameters
    names_context = "context" in parameters
    return Hook(
        function,
        f"{path}:{name}",
        kwargs,
        takes_context=names_context or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()),
        names_context=names_context,
        reads_prompt_ids=_reads_argument(function, 1),
    )


_SEES_ALL_LOCALS = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"}


def _reads_argument(function: Callable[..., Any], position: int) -> bool:
    """Return whether the function may read that positional argument (after `self`); True if in doubt.

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


def default_prompt(context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...] = ()) -> list[Message]:
    """Return the sample's messages followed by the texts of `visible_texts`: appended to the last message if it is the
    user's, otherwise in a new one."""
    parts = [text for _, _, text in visible_texts(context, dependencies, peers)]
    messages = list(context.sample["prompt"])
    if not parts:
        return messages
    text = "\n\n".join(parts)
    if messages and messages[-1]["role"] == "user":  # some templates refuse two user messages in a row
        *messages, last = messages
        return [*messages, {**last, "content": _joined(last["content"], text)}]
    return [*messages, {"role": "user", "content": text}]


def visible_texts(
    context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...] = ()
) -> list[tuple[str, Call | Output | None, str]]:
    """Return (node, its call or result, text) for each text that the default prompt adds to the sample.

    These are the outputs of the dependencies, headed by the agent's name for a call and by the node's for a result,
    and in later rounds of a loop those of its nodes. A node with neither sees, from the second turn on, the outputs of
    all nodes in the previous turn. The env's observation comes last, with an empty node and None.
    """
    names = dict.fromkeys([*dependencies, *(peers if context.round else ())]) or [*context.upstream, *context.results]
    parts: list[tuple[str, Call | Output | None, str]] = []
    for name in names:
        if name in context.upstream:
            call = context.upstream[name]
            parts.append((name, call, f"{call.agent}:\n{call.handed}"))
        elif name in context.results:
            result = context.results[name]
            parts.append((name, result, f"{name}:\n{result.text or json.dumps(result.parsed)}"))
    if context.obs is not None:
        parts.append(("", None, f"Observation:\n{context.obs}"))
    return parts


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):  # content in parts, as chat templates accept it
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}"


def checked(output: Output, where: str) -> Output:
    """Check that a record can hold the Output, and return it. Raises HookFault."""
    if output.text is not None and not isinstance(output.text, str):
        raise HookFault(f"returned an Output whose text is {described(output.text)}", where=where)
    if not isinstance(output.parsed, dict):
        raise HookFault(f"returned an Output whose parsed is {described(output.parsed)}, not a dict", where=where)
    try:
        json.dumps(output.parsed)
    except (TypeError, ValueError) as error:
        raise HookFault(f"returned an Output whose parsed is not JSON: {error}", where=where) from error
    return output
