"""A node's conversation within an episode, as token ids (`memory: chat`).

Invariant: ids are only appended to. The prompt of a call begins with the prompt and the response of the call before, as
they were fed and sampled; what was said since comes behind them, rendered alone. So the rows of an episode merge, and a
chat template that rewrites earlier turns has nothing to rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.context import Context, Message
from recipe.dag.episode.hooks import Prompt, default_prompt, heard
from recipe.dag.episode.record import Call
from recipe.dag.errors import HookFault, described

GO_ON = "Go on."
"""What an agent without a hook is told where nothing was said since its last call."""


@dataclass(slots=True)
class Conversation:
    """What one node of an agent was asked and answered so far in an episode."""

    last: Call | None = None
    """The node's latest call that is over."""
    known: list[Any] = field(default_factory=list)
    """Calls and results that it was shown; compared by identity."""

    def default_messages(
        self, context: Context, dependencies: tuple[str, ...], peers: tuple[str, ...]
    ) -> list[Message]:
        """Return the default prompt for the first call; for a later one, a message with what the default prompt shows
        and the conversation does not hold: no problem, no words of the node's own, no text a second time."""
        said = heard(context, dependencies, peers)
        if self.last is None:
            messages = default_prompt(context, dependencies, peers)
        else:
            fresh = [
                text
                for name, source, text in said
                if name != context.node and not any(source is seen for seen in self.known)
            ]
            messages = [{"role": "user", "content": "\n\n".join(fresh) or GO_ON}]
        self.known += [source for _, source, _ in said if source is not None]
        return messages

    def said(self, prompt: Prompt) -> list[Message]:
        """Return what a hook's `prompt` adds to the conversation: its messages, in later calls without the system's at
        their head. Raises HookFault for token ids, and where nothing is left."""
        if not isinstance(prompt[0], dict):
            raise HookFault(f"returned {described(prompt)}: `memory: chat` needs messages, which it appends")
        if self.last is None:
            return prompt
        start = next((i for i, message in enumerate(prompt) if message["role"] != "system"), len(prompt))
        if start == len(prompt):
            raise HookFault("returned system messages alone where the conversation goes on: say something to the agent")
        return prompt[start:]

    def ids(self, end_of_turn: int) -> list[int]:
        """Return the conversation up to the end of the last answer, which a limit or a stop string may have cut off
        before its end-of-turn token."""
        ids = self.last.prompt_ids + self.last.response_ids
        return ids if self.last.response_ids[-1:] == [end_of_turn] else [*ids, end_of_turn]
