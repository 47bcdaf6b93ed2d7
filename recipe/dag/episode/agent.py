"""The class that users derive their agents from.

Invariant: an agent is shared by all episodes and keeps nothing of any: what it knows comes from `context`, and what it
found out goes into the Output that `parse` returns.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.episode.context import Context, Message, Output
from recipe.dag.errors import UserError


class Agent:
    """What an agent reads and how its text is understood. Override `prompt`, `parse` or both; either may be async.

    `options` are the node's `pre_process_kwargs` for `prompt` and its `post_process_kwargs` for `parse`; name them as
    keyword arguments, and a workflow with another option is refused. Functions `prompt` and `parse` in a file of their
    own, without a class, work the same way.
    """

    def prompt(self, context: Context, **options: Any) -> list[Message] | list[int]:
        """Return the messages that the model reads, or token ids that are fed as they are. Without it: the sample's
        messages, followed by what the node's dependencies said. That default knows the node, so it is the engine's, and
        calling this one raises UserError."""
        raise UserError(f"{type(self).__name__}: Agent.prompt has no messages to return; build them from `context`")

    def parse(self, context: Context, **options: Any) -> Output | str | None:
        """Return what the call hands over, given `context.call`: its text, an Output with `parsed` data, or None to
        leave the text as it is, as without it."""
        return None
