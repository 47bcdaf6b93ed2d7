"""Conversations within an episode, as token ids: of a node (`memory: chat`), or of all agents of a policy that share
theirs (`memory: shared`).

Invariant: ids are only ever appended. The prompt of a call begins with the prompt and the response of the call that it
continues, as they were fed and sampled; the new messages follow, rendered on their own. So the calls merge into one
row, even if the chat template would rewrite earlier turns. Which call is continued follows from what the node sees, not
from the clock: nodes that run at the same time continue the same call, each in a branch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.core.errors import HookFault, described
from recipe.dag.episode.hooks import Hooks, Prompt, default_prompt, is_messages, visible_texts
from recipe.dag.types.context import Context, Message
from recipe.dag.types.record import Call
from recipe.dag.workflow.agent_schema import Agent

GO_ON = "Go on."
"""The message to an agent without a hook if there is no new text since the call that it continues."""

Key = tuple[str, int]
"""Whose conversation it is, and the `id` of the call that it ends with."""


@dataclass(slots=True)
class Conversation:
    """The conversation that a call continues."""

    owner: str
    """The node or the policy that it belongs to."""
    calls: list[Call] = field(default_factory=list)
    """The calls that it consists of."""
    told: list[Any] = field(default_factory=list)
    """Calls and results whose texts the messages between them contain; compared by identity."""

    @property
    def last(self) -> Call | None:
        """The call that is continued."""
        return self.calls[-1] if self.calls else None

    def keep(self, call: Call, kept: dict[Key, Conversation]) -> None:
        """Let later calls continue this one, which has its response."""
        kept[self.owner, id(call)] = Conversation(self.owner, [*self.calls, call], self.told)

    def _contains(self, source: Any) -> bool:
        """Return whether it contains the text of a call or result. A text from `parse` is not in the call itself."""
        said = (call for call in self.calls if call.completion is None)
        return any(source is earlier for earlier in (*said, *self.told))

    def default_messages(
        self, context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...]
    ) -> list[Message]:
        """Return the default prompt for the first call. For a later call, return one message with the texts of the
        default prompt that the conversation does not contain yet, without the problem and the node's own texts."""
        texts = visible_texts(context, dependencies, peers)
        if self.last is None:
            messages = default_prompt(context, dependencies, peers)
        else:
            fresh = [text for name, source, text in texts if name != context.node and not self._contains(source)]
            messages = [{"role": "user", "content": "\n\n".join(fresh) or GO_ON}]
        self.told += [source for _, source, _ in texts if source is not None]
        return messages

    def new_messages(self, prompt: Prompt) -> list[Message]:
        """Return the messages of a hook's prompt that extend the conversation: all of them in the first call, later all
        but the leading system messages. Raises HookFault for token ids, or if no message is left."""
        if not is_messages(prompt):
            raise HookFault(f"returned {described(prompt)}: `memory` needs messages, which it appends")
        if self.last is None:
            return prompt
        start = next((i for i, message in enumerate(prompt) if message["role"] != "system"), len(prompt))
        if start == len(prompt):
            raise HookFault("returned only system messages for a later call; add a user message")
        return prompt[start:]

    def ids(self, end_of_turn: int) -> list[int]:
        """Return the conversation up to and including the end-of-turn token of the last answer, which a limit or a stop
        string may have cut off before that token."""
        assert self.last is not None  # there is no conversation before the first call
        ids = self.last.prompt_ids + self.last.response_ids
        return ids if self.last.response_ids[-1:] == [end_of_turn] else [*ids, end_of_turn]


def conversation_of(agent: Agent, context: Context, kept: Mapping[Key, Conversation]) -> Conversation | None:
    """Return the conversation that a call of the agent continues: that of the latest call that its node sees, of this
    node or, with `memory: shared`, of any agent that shares it. None for an agent without memory. `kept`: those that
    `Conversation.keep` has kept in this attempt."""
    if agent.memory == "none":
        return None
    owner = f"policy {agent.policy}" if agent.memory == "shared" else f"node {context.node}"
    seen = (kept.get((owner, id(call))) for call in reversed(context.calls))
    earlier = next((conversation for conversation in seen if conversation is not None), Conversation(owner))
    return Conversation(owner, earlier.calls, [*earlier.told])


async def prompt_of(hooks: Hooks, context: Context, conversation: Conversation | None) -> Prompt:
    """Return a call's prompt, with memory the part of it that extends the conversation."""
    if conversation is None:
        return await hooks.prompt(context)
    context.continued = tuple(conversation.calls)
    if hooks.code.prompt is None:
        return conversation.default_messages(context, hooks.dependencies, hooks.peers)
    prompt = await hooks.prompt(context)
    with hooks.guard():
        return conversation.new_messages(prompt)
