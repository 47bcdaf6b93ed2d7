"""The types that hooks and compute functions receive and return.

Invariant: hooks read the episode through this object alone and change nothing in it; they act through their return
value and `call_tool`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

from recipe.dag.core.errors import HookFault, UserError
from recipe.dag.types.inert import inert
from recipe.dag.types.record import Call, ToolResult
from recipe.dag.types.tokens import Tokens

Message = dict[str, Any]
"""A chat message, {"role": ..., "content": ...}, as chat templates take it."""


@dataclass(slots=True)
class Output:
    """The result of an agent's `parse`, or of a vote or compute node."""

    text: str | None = None
    """The text that the node passes on. None keeps the model's text."""
    parsed: dict[str, Any] = field(default_factory=dict)
    """JSON-able data for later hooks, conditions and rewards."""
    done: bool = False
    """Ends the loop after this round, and the episode after this turn."""
    train: bool = True
    """False excludes this call from the loss."""


async def _no_model(messages: list[Message]) -> str:
    raise UserError("context.ask asks an agent's model, and this node has none")


@dataclass(slots=True)
class Context:
    """The episode as a node sees it when it runs."""

    sample: dict[str, Any]
    """The data row: prompt (messages), data_source, ground_truth, extra_info."""
    uid: str
    """Identifies the sample; all episodes of one group share it."""
    episode: int
    """Index of the episode in its group; of a fork in training, that of the episode that it repeats."""
    turn: int
    """From 0."""
    max_turns: int
    agent: str
    """Empty for a compute node."""
    node: str
    upstream: dict[str, Call]
    """The latest visible call of each rollout node, by node id. It is from this turn for the nodes that this node
    depends on, directly or not, and from the previous turn for all other nodes. In a loop: from this round for the
    loop's nodes that it depends on, and from the latest earlier round for the loop's other nodes, itself included. A
    node that was skipped is absent."""
    history: list[Call]
    """This agent's earlier calls in the episode."""
    obs: Any
    """The env's latest observation for this agent, or None."""
    validate: bool
    """True in validation."""
    call_tool: Callable[..., Awaitable[ToolResult]]
    """`await context.call_tool(name, **arguments)` runs one of the agent's tools and records the result in the call."""
    call: Call = cast(Call, None)  # so that `parse` need not check what only `prompt` lacks
    """In `parse`: the current call (text, stop_reason, tool_results). None in `prompt`."""
    results: dict[str, Output] = field(default_factory=dict)
    """The results of vote and compute nodes, by the same rules as `upstream`."""
    round: int = 0
    """The round of the node's loop, from 0 in every turn."""
    max_rounds: int = 1
    """1 outside loops."""
    calls: list[Call] = field(default_factory=list)
    """All visible calls of the episode in causal order: those of earlier turns and, of this turn, those of the node's
    ancestors and of its loop's earlier rounds. `upstream` holds the latest call of each node."""
    continued: tuple[Call, ...] = ()
    """With memory: the calls that this one continues, in order; the messages from `prompt` are appended to them. Empty
    without memory, and for the first call."""
    ask: Callable[[list[Message]], Awaitable[str]] = _no_model
    """`await context.ask(messages)` returns the model's answer to a further prompt of this call, within its time limit;
    only for agents whose policy is not trained. Both are recorded in `call.messages`, and
    `call.stop_reason` is that of the answer."""
    read_by: Callable[[Call], str] = attrgetter("prompt_text")
    """`context.read_by(call)`: all that a visible call's model had read before its last generation, as it was rendered:
    its prompt, its earlier generations and the results of its tool calls."""
    inert: Callable[[str], str] = inert
    """`context.inert(text)`: the text in which the control tokens of this agent's model are broken (types/inert.py).
    For texts of other models in a prompt, where such a token would end the message and begin another one."""
    tokens: Tokens | None = None
    """For the adapters of agents that work on token ids; None for all others."""

    @property
    def continues(self) -> bool:
        """Whether the messages from `prompt` are appended to a conversation, which has stated the problem."""
        return bool(self.continued)

    def remembers(self, call: Call) -> bool:
        """Return whether the conversation that this call continues contains the other call."""
        return any(call is earlier for earlier in self.continued)

    @property
    def problem(self) -> str:
        """The text of the sample's last user message."""
        return next((m["content"] for m in reversed(self.sample["prompt"]) if m["role"] == "user"), "")


def required(context: Context | None) -> Context:
    """Return the context, in a hook that cannot work without it. Raises HookFault for None."""
    if context is None:
        raise HookFault("this hook needs the episode's context")
    return context
