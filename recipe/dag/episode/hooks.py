"""The user's code around a call, and the defaults of a node without any.

An agent has `prompt(context)` and `parse(context)`; siiRL's form, `pre_process` and `post_process` with a tokenizer and
token ids, is called as siiRL calls it.

Invariant: whatever a hook does, the caller gets a prompt or an Answer, or a HookFault that names the file and function.
Sync hooks run on the event loop, where they must be quick (they format and parse text); whatever waits must be async.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from recipe.dag.episode.agent import Agent
from recipe.dag.episode.chat import as_ids
from recipe.dag.episode.context import Context, Message, Output
from recipe.dag.episode.record import Call
from recipe.dag.episode.tasks import guarded
from recipe.dag.errors import HookFault, UserError, boundary, described
from recipe.dag.location import raised_at
from recipe.dag.workflow.schema import Node, Workflow
from recipe.dag.workflow.user_code import load_object

Prompt = list[int] | list[Message]
NATIVE_FORM = ("prompt", "parse")
SIIRL_FORM = ("pre_process", "post_process")


@dataclass(frozen=True, slots=True)
class Hook:
    """One user function, in either form."""

    function: Callable[..., Any]
    where: str
    """file:function"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    native: bool = False
    """It is called with the context alone; otherwise with siiRL's arguments."""
    takes_context: bool = False
    names_context: bool = False
    """By name, not through **kwargs: then it is written for this engine, not for siiRL."""
    reads_prompt_ids: bool = True
    """False: its code never touches its second argument, so nothing needs to be rendered and encoded for it."""

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
class Answer:
    """What post_process made of a call."""

    output: Output
    ids: list[int] | None = None
    """Where it returned token ids, siiRL's running transcript."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """A node's hooks; None: the default."""

    pre: Hook | None
    post: Hook | None
    dependencies: tuple[str, ...] = ()
    """The nodes whose texts the default prompt shows."""
    peers: tuple[str, ...] = ()
    """The nodes of its loop, whose texts of the round before it shows too."""

    async def pre_process(self, tokenizer: Any, prompt_ids: list[int], context: Context) -> Prompt:
        """Ids to feed as they are, or messages to template. Never empty."""
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
    ) -> Answer:
        """`output.text` None: the call keeps its own text."""
        if self.post is None:
            return Answer(Output())
        with boundary(HookFault, self.post.where, self.post.function):
            result = await self.post(tokenizer, prompt_ids, response_ids, context=context)
            if result is None:
                return Answer(Output())
            if isinstance(result, str):
                return Answer(Output(text=result))
            if isinstance(result, Output):
                return Answer(checked(result, self.post.where))
            ids = None if self.post.native else as_ids(result)
            if ids is None:
                wanted = "a str, an Output or None" if self.post.native else "token ids, a str or an Output"
                raise HookFault(f"returned {described(result)}, not {wanted}")
            return Answer(Output(text=tokenizer.decode(ids, skip_special_tokens=True)), ids)


def load_hooks(node: Node, workflow: Workflow) -> Hooks:
    """Load the node's process_path; a class is instantiated once, here, so it must keep nothing of an episode.
    Raises UserError."""
    inside = {other.node_id for other in workflow.episode_nodes}
    named = tuple(name for name in node.dependencies if name in inside)
    peers = next((loop.nodes for loop in workflow.loops.values() if node.node_id in loop.nodes), ())
    options = node.agent_options
    if options.process_path is None:
        return Hooks(None, None, named, peers)
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
            f"{where}: its pre_process takes no `context`, so it renders token ids of its own, and agent "
            f"{agent.name} has `memory: chat`, which appends messages: return messages, or remove `memory`"
        )
    if pre is None and post is None:
        kind = "file" if isinstance(holder, ModuleType) else "class"
        raise UserError(f"{where}: the {kind} defines neither prompt nor parse")
    return Hooks(pre, post, named, peers)


def _names_of_form(holder: Any, where: str) -> tuple[str, str]:
    """Return the names of the two functions in the form that `holder` is written in: siiRL's where it has one of those,
    since a helper may be called parse. Raises UserError for a class with half of each."""
    if not any(_defines(holder, name) for name in SIIRL_FORM):
        return NATIVE_FORM
    halves = (("prompt", "pre_process", "post_process"), ("parse", "post_process", "pre_process"))
    for native, counterpart, defined in halves:
        is_method = inspect.ismethod(getattr(holder, native, None)) and _defines(holder, native)
        if is_method and not _defines(holder, counterpart):
            raise UserError(f"{where}: the class defines {native} and {defined}; write prompt and parse")
    return SIIRL_FORM


def _defines(holder: Any, name: str) -> bool:
    """Whether `holder` has an attribute of that name, other than what it inherits from Agent."""
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
    named = "context" in parameters
    takes = named or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    reads = _reads_argument(function, 1)
    return Hook(function, f"{path}:{name}", kwargs, takes_context=takes, names_context=named, reads_prompt_ids=reads)


_SEES_ALL_LOCALS = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "stack"}


def _reads_argument(function: Callable[..., Any], position: int) -> bool:
    """Whether the function may read that positional argument (after `self`). True wherever that is not certain."""
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
    touched = (step.argval for step in dis.get_instructions(code))
    return any(name == what or isinstance(what, tuple) and name in what for what in touched)


def default_prompt(context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...] = ()) -> list[Message]:
    """Return the sample's messages with what `heard` gives, put behind the text of the last message, or in a message of
    its own where that is not the user's."""
    parts = [text for _, _, text in heard(context, dependencies, peers)]
    messages = list(context.sample["prompt"])
    if not parts:
        return messages
    text = "\n\n".join(parts)
    if messages and messages[-1]["role"] == "user":  # templates that alternate take no two of them in a row
        *messages, last = messages
        return [*messages, {**last, "content": _joined(last["content"], text)}]
    return [*messages, {"role": "user", "content": text}]


def heard(
    context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...] = ()
) -> list[tuple[str, Call | Output | None, str]]:
    """Return (node, its call or result, text) of what the default prompt shows beside the sample: what the dependencies
    said, each call by its agent's name and each vote or compute node's result by the node's, and in the later rounds of
    a loop what its nodes said before. A node with none of these sees from the second turn on what all nodes said in the
    turn before. Last, the env's observation, with no node and no call.
    """
    names = dict.fromkeys([*dependencies, *(peers if context.round else ())]) or [*context.upstream, *context.results]
    parts: list[tuple[str, Call | Output | None, str]] = []
    for name in names:
        if name in context.upstream:
            call = context.upstream[name]
            parts.append((name, call, f"{call.agent}:\n{call.text}"))
        elif name in context.results:
            result = context.results[name]
            parts.append((name, result, f"{name}:\n{result.text or json.dumps(result.parsed)}"))
    if context.obs is not None:
        parts.append(("", None, f"Observation:\n{context.obs}"))
    return parts


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):  # parts of text, as chat templates have them
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}"


def checked(output: Output, where: str) -> Output:
    """An Output that a record can hold. Raises HookFault."""
    if output.text is not None and not isinstance(output.text, str):
        raise HookFault(f"returned an Output whose text is {described(output.text)}", where=where)
    if not isinstance(output.parsed, dict):
        raise HookFault(f"returned an Output whose parsed is {described(output.parsed)}, not a dict", where=where)
    try:
        json.dumps(output.parsed)
    except (TypeError, ValueError) as error:
        raise HookFault(f"returned an Output whose parsed is no JSON: {error}", where=where) from error
    return output
