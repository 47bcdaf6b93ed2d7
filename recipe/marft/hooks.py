"""MARFT's reasoner and actor, and the reward node that turns the env's reward into an episode's outcome.

Invariant: agents are stateless and hand over plain text without chat markup; sampled tokens stay in the engine and are
never encoded again. Each option is a named argument, so an unknown option is an error.
"""

from __future__ import annotations

from typing import Any

from recipe.dag import Agent, Call, Context, Message, Output, UserError
from recipe.dag.reward.outcome import env_outcome, final_answer, written_in
from recipe.marft import prompts

__all__ = ["Actor", "Reasoner", "env_outcome"]


class _Role(Agent):
    """Fills a template, and hands over the text.

    Fields of the template: `${problem}`; `${feedback}`, the agent's last attempt with the env's observation;
    `${reasoning}`, the texts of this turn's earlier agents; and `${prompt}`, which joins the three.
    """

    templates: dict[str, str]
    """Task -> built-in template."""

    def prompt(
        self,
        context: Context,
        *,
        task: str = "math",
        pre_chat_template: str | None = None,
        system: str | None = None,
    ) -> list[Message]:
        """Return the messages. `task` (math or code) selects the built-in texts, which `pre_chat_template` and `system`
        replace; `system: ""` omits the system message."""
        where = f"node '{context.node}': prompt_options"
        if task not in self.templates:
            raise UserError(f"{where}.task: {task!r} is unknown; choose one of {', '.join(self.templates)}")
        template = self.templates[task] if pre_chat_template is None else pre_chat_template
        system = prompts.SYSTEMS[task] if system is None else system
        user = prompts.render(template, _fields(context), f"{where}.pre_chat_template")
        messages = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def parse(self, context: Context, *, post_chat_template: str = "") -> Output:
        """Hand over the text, preceded by `post_chat_template` as it is."""
        call = context.call
        # An unanswered tool call is not an action: the env must not grade its content.
        text = "" if call.ended_in_tool_call else written_in(call)
        return Output(text=post_chat_template + text, parsed=self.parsed(call))

    def parsed(self, call: Call) -> dict[str, Any]:
        """Return the call's `parsed` data."""
        return {}


class Reasoner(_Role):
    """Works out the steps of the solution."""

    templates = prompts.REASONERS


class Actor(_Role):
    """Answers, given the problem and the steps. `parsed["answer"]` is the content of the last box, if any."""

    templates = prompts.ACTORS

    def parsed(self, call: Call) -> dict[str, Any]:
        answer = final_answer(call)
        return {} if answer is None else {"answer": answer}


def _fields(context: Context) -> dict[str, str]:
    texts = [call.text.strip("\n") for call in context.upstream.values() if call.turn == context.turn]
    reasoning = "\n\n".join(texts)
    feedback = "" if context.obs is None else f"{prompts.EARLIER}{context.obs}\n\n"
    parts = [context.problem, feedback.strip("\n"), reasoning]
    return {
        "prompt": "\n\n".join(part for part in parts if part),
        "problem": context.problem,
        "feedback": feedback,
        "reasoning": reasoning,
    }
