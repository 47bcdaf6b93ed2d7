"""A node's conversation within an episode, as token ids (`memory: chat`).

Invariant: ids are only ever appended. The prompt of a call begins with the prompt and the response of the call before,
as they were fed and sampled; the new messages follow, rendered on their own. So the calls of an episode merge into one
row, even if the chat template would rewrite earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.core.errors import HookFault, described
from recipe.dag.episode.hooks import Hooks, Prompt, default_prompt, is_messages, visible_texts
from recipe.dag.types.context import Context, Message
from recipe.dag.types.record import Call

GO_ON = "Go on."
"""The message to an agent without a hook if there is no new text since its last call."""


@dataclass(slots=True)
class Conversation:
    """The conversation of one node in one episode."""

    last: Call | None = None
    """The node's latest finished call."""
    sources: list[Any] = field(default_factory=list)
    """Calls and results whose texts the conversation contains; compared by identity."""

    def default_messages(
        self, context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...]
    ) -> list[Message]:
        """Return the default prompt for the first call. For a later call, return one message with the texts of the
        default prompt that the conversation does not contain yet, without the problem and the node's own texts."""
        texts = visible_texts(context, dependencies, peers)
        if self.last is None:
            messages = default_prompt(context, dependencies, peers)
        else:
            fresh = [
                text
                for name, source, text in texts
                if name != context.node and not any(source is earlier for earlier in self.sources)
            ]
            messages = [{"role": "user", "content": "\n\n".join(fresh) or GO_ON}]
        self.sources += [source for _, source, _ in texts if source is not None]
        return messages

    def new_messages(self, prompt: Prompt) -> list[Message]:
        """Return the messages of a hook's prompt that extend the conversation: all of them in the first call, later all
        but the leading system messages. Raises HookFault for token ids, or if no message is left."""
        if not is_messages(prompt):
            raise HookFault(f"returned {described(prompt)}: `memory: chat` needs messages, which it appends")
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


async def prompt_of(hooks: Hooks, context: Context, conversation: Conversation | None) -> Prompt:
    """Return a call's prompt, with `memory: chat` the part of it that extends the conversation."""
    if conversation is None:
        return await hooks.prompt(context)
    context.continues = conversation.last is not None
    if hooks.code.prompt is None:
        return conversation.default_messages(context, hooks.dependencies, hooks.peers)
    prompt = await hooks.prompt(context)
    with hooks.guard():
        return conversation.new_messages(prompt)
