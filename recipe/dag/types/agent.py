"""The base class of users' agents.

Invariant: one instance serves all episodes and keeps no state of any. What it needs to know comes from `context`; what
it finds out goes into the Output that `parse` returns.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from recipe.dag.core.errors import UserError
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call, Episode


class Agent:
    """Builds an agent's prompt and parses its answer. Override `prompt`, `parse` or both; either may be async::

        class Verifier(Agent):
            def prompt(self, context: Context, *, strict: bool = False) -> list[Message]:
                answer = context.upstream["solve"].text
                question = "Is every step correct?" if strict else "Is the answer correct?"
                return [{"role": "user", "content": f"{context.problem}\\n{answer}\\n{question} Reply yes or no."}]

            def parse(self, context: Context) -> Output:
                return Output(parsed={"approved": "yes" in context.call.text.lower()})

    A node names the class with `hooks: agents.py:Verifier`. Keyword arguments are options that the node sets with
    `prompt_options: {strict: true}` and `parse_options`; an option that no argument takes is refused before the run
    starts. A file with functions `prompt` and `parse` (without `self`) works the same way.
    """

    private = False
    """True: other nodes see its calls only if they name its node in `after`; otherwise a loop's later rounds, and later
    turns, show them to every agent. Conditions and rewards see them in any case."""

    Options: ClassVar[type[BaseModel] | None] = None
    """A class of the options in `prompt_options`, for agents with many: it checks their values before the run starts,
    `self.options` holds them, and `prompt` takes the context alone."""
    options: Any = None

    def prompt(self, context: Context, **options: Any) -> list[Message] | list[int]:
        """Return the messages that the model reads, or token ids to feed unchanged.

        If it is not overridden, the agent reads the sample's messages followed by the texts of the nodes that its node
        depends on. The engine builds that default because it knows the node; `super().prompt(...)` raises UserError.
        """
        raise UserError(f"{type(self).__name__}: Agent.prompt has no messages to return; build them from `context`")

    def prepare(self, workflow: Any, node: Any) -> None:
        """Called once, before the first episode, with the `Workflow` and the agent's `Node` of it
        (`recipe.dag.workflow.schema`): read files that its options name, and raise UserError for options that cannot
        work. `self.options` is set. Does nothing unless overridden."""

    def parse(self, context: Context, **options: Any) -> Output | str | None:
        """Return what the call `context.call` passes on: a text that replaces the model's, an Output with `parsed`
        data, or None to keep the text unchanged (the default)."""
        return None

    @staticmethod
    def results_metadata(call: Call, episode: Episode) -> dict[str, Any]:
        """Return the JSON-able `metadata` of a call of the agent in results.json: by default what `parse` returned."""
        return {"parsed": call.parsed}


def defines(holder: Any, name: str) -> bool:
    """Return whether an object or module has an attribute of that name that it does not just inherit from Agent."""
    function = getattr(holder, name, None)
    inherited = hasattr(Agent, name) and getattr(function, "__func__", None) is getattr(Agent, name)
    return function is not None and not inherited
