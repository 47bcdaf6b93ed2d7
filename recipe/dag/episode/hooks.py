"""An agent's `prompt` and `parse` around a call, and the defaults for a node without them.

Invariant: whatever a hook does, the caller gets a prompt or an Output, or a HookFault that names the file and function.
Sync hooks run on the event loop, so they must be quick (they format and parse text); a hook that waits must be async.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipe.dag.core.errors import HookFault, UserError, boundary, described
from recipe.dag.endpoint.chat import as_ids
from recipe.dag.episode.agent_code import AgentCode, load_agent
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Prompt = list[int] | list[Message]


@dataclass(frozen=True, slots=True)
class Hooks:
    """A node's hooks, with what the default prompt contains."""

    node: str
    code: AgentCode = AgentCode()
    dependencies: tuple[str, ...] = ()
    """The nodes whose texts the default prompt contains."""
    peers: tuple[str, ...] = ()
    """The nodes of its loop, whose texts of the previous round it contains as well."""

    def guard(self) -> AbstractContextManager[None]:
        """Return the boundary for what is done with the prompt."""
        return boundary(HookFault, f"node {self.node}") if self.code.prompt is None else self.code.prompt.guard()

    async def prompt(self, context: Context) -> Prompt:
        """Return ids to feed unchanged, or messages for the chat template; never empty."""
        hook = self.code.prompt
        if hook is None:
            return default_prompt(context, self.dependencies, self.peers)
        with hook.guard():
            result = await hook.run(context)
            ids = as_ids(result)
            if ids:
                return ids
            if isinstance(result, list) and result and all(isinstance(m, dict) and "role" in m for m in result):
                return result
            raise HookFault(f"returned {described(result)}, not token ids or messages")

    async def parse(self, context: Context) -> Output:
        """Return what `parse` made of the call. If its text is None, the call keeps its own."""
        hook = self.code.parse
        if hook is None:
            return Output()
        with hook.guard():
            result = await hook.run(context)
            if result is None or isinstance(result, str):
                return Output(text=result)
            if isinstance(result, Output):
                return checked(result)
            raise HookFault(f"returned {described(result)}, not a str, an Output or None")

    def check_messages(self, policy: str) -> None:
        """Raise UserError if the hooks cannot do without token ids, which the policy does not have."""
        hook = self.code.prompt or self.code.parse
        if hook is not None and self.code.needs_tokens:
            raise UserError(
                f"node {self.node}: {hook.where} works on token ids, but policy {policy} is an API without "
                "`tokenizer`; write prompt and parse, or name the tokenizer"
            )


def is_messages(prompt: Prompt) -> TypeIs[list[Message]]:
    """Return whether a prompt, which is never empty, consists of messages rather than token ids."""
    return isinstance(prompt[0], dict)


def load_hooks(node: Node, workflow: Workflow) -> Hooks:
    """Load the code of the node's agent. Raises UserError."""
    episode_nodes = {other.id for other in workflow.episode_nodes}
    dependencies = tuple(name for name in node.after if name in episode_nodes)
    peers = next((loop.nodes for loop in workflow.loops.values() if node.id in loop.nodes), ())
    return Hooks(node.id, load_agent(node, workflow), dependencies, peers)


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


def checked(output: Output) -> Output:
    """Check that a record can hold the Output, and return it. Raises HookFault."""
    if output.text is not None and not isinstance(output.text, str):
        raise HookFault(f"returned an Output whose text is {described(output.text)}")
    if not isinstance(output.parsed, dict):
        raise HookFault(f"returned an Output whose parsed is {described(output.parsed)}, not a dict")
    try:
        json.dumps(output.parsed)
    except (TypeError, ValueError) as error:
        raise HookFault(f"returned an Output whose parsed is not JSON: {error}") from error
    return output
