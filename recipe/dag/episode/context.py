"""What a hook or a compute node's function sees of its episode, and what it may answer.

Invariant: they read the episode through this object alone and change nothing in it; they act by what they return and
through `call_tool`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.record import Call, ToolResult
from recipe.dag.errors import HookFault

Message = dict[str, Any]
"""{"role": ..., "content": ...}, as chat templates take it."""


@dataclass(slots=True)
class Output:
    """What post_process may return instead of token ids; the result of a vote or compute node."""

    text: str | None = None
    """What the agent hands over; None: its own text."""
    parsed: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    """End the episode after this turn's nodes, and the loop after this round."""
    train: bool = True
    """False leaves this call out of the loss."""


@dataclass(slots=True)
class Context:
    """One move's view of its episode."""

    sample: dict[str, Any]
    uid: str
    episode: int
    turn: int
    max_turns: int
    agent: str
    """Empty for a compute node."""
    node: str
    upstream: dict[str, Call]
    """Calls of rollout nodes, by node id: this turn's of those that the node depends on, and the turn before's of all
    others. In a loop: this round's of the loop's nodes that it depends on, and the latest of the rounds before of the
    loop's others, itself included. A node that was skipped is absent."""
    history: list[Call]
    """This agent's earlier calls in the episode."""
    obs: Any
    """The environment's latest observation for this agent, or None."""
    validate: bool
    call_tool: Callable[..., Awaitable[ToolResult]]
    """`await context.call_tool(name, **arguments)`: only tools that the agent declares; recorded in the call."""
    call: Call | None = None
    """In post_process: the call under way (text, stop_reason, tool_results so far)."""
    results: dict[str, Output] = field(default_factory=dict)
    """Of vote and compute nodes, as `upstream` has the calls."""
    round: int = 0
    """Of the loop that the node stands in, from 0 in every turn."""
    max_rounds: int = 1
    """1 outside of loops."""
    calls: list[Call] = field(default_factory=list)
    """All calls of the episode that the node can know of, in causal order: those of the turns before and, of this turn,
    its ancestors' and those of its loop's earlier rounds. `upstream` has the latest one of each node."""

    continues: bool = False
    """With `memory: chat`: the node was called before in this episode, and what pre_process returns is appended to its
    conversation. False in a node's first call, and without memory always."""

    @property
    def problem(self) -> str:
        """The text of the sample's last user message."""
        return next((m["content"] for m in reversed(self.sample["prompt"]) if m["role"] == "user"), "")


def required(context: Context | None) -> Context:
    """For hooks that cannot do without. Raises HookFault."""
    if context is None:
        raise HookFault("this hook needs the episode's context")
    return context
