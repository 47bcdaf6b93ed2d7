"""The hooks of MARFT's reasoner and actor, and the node that turns the env's reward into an episode's outcome.

Invariant: a hook is stateless and hands over text alone, without chat markup; what was sampled stays in the engine as
token ids and is never encoded again. Every option is a named argument, so one that nobody reads is an error.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.episode.context import Context, Message, Output, required
from recipe.dag.episode.record import Call
from recipe.dag.errors import UserError
from recipe.dag.reward.outcome import env_outcome, final_answer, written_in
from recipe.marft import prompts

__all__ = ["Actor", "Reasoner", "env_outcome"]


class _Role:
    """Fields of `pre_chat_template`: `${prompt}`, all that the agent has to go by: the problem, its own last attempt
    with what the env said to it, and what the agents before it wrote in this turn; and the same one by one:
    `${problem}`, `${feedback}`, `${reasoning}`."""

    templates: dict[str, str]

    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        task: str = "math",
        pre_chat_template: str | None = None,
        system: str | None = None,
    ) -> list[Message]:
        """`task` (math or code) chooses the built-in texts, `pre_chat_template` and `system` replace them;
        `system: ""` leaves the system message out."""
        context = required(context)
        where = f"node '{context.node}': pre_process_kwargs"
        if task not in self.templates:
            raise UserError(f"{where}.task: {task!r} is unknown; choose one of {', '.join(self.templates)}")
        template = self.templates[task] if pre_chat_template is None else pre_chat_template
        system = prompts.SYSTEMS[task] if system is None else system
        user = prompts.render(template, _fields(context, obs), f"{where}.pre_chat_template")
        messages = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages

    def post_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        response_ids: list[int],
        *,
        context: Context | None = None,
        post_chat_template: str = "",
    ) -> Output:
        """`post_chat_template` is put, as it is, before what the agent hands over."""
        call = required(context).call
        # A tool call that nothing followed is no action: the env must not grade what stands in it.
        text = "" if call.ended_in_tool_call else written_in(call)
        return Output(text=post_chat_template + text, parsed=self.parse(call))

    def parse(self, call: Call) -> dict[str, Any]:
        return {}


class Reasoner(_Role):
    """Works out the steps."""

    templates = prompts.REASONERS


class Actor(_Role):
    """Answers, from the problem and the steps. `parsed["answer"]`: what stands in its last box, if there is one."""

    templates = prompts.ACTORS

    def parse(self, call: Call) -> dict[str, Any]:
        answer = final_answer(call)
        return {} if answer is None else {"answer": answer}


def _fields(context: Context, obs: Any) -> dict[str, str]:
    now = [call.text for call in context.upstream.values() if call.turn == context.turn]
    reasoning = "\n\n".join(text.strip("\n") for text in now)
    feedback = f"{prompts.EARLIER}{obs}\n\n" if obs is not None else ""
    parts = [context.problem, feedback.strip("\n"), reasoning]
    return {
        "prompt": "\n\n".join(part for part in parts if part),
        "problem": context.problem,
        "feedback": feedback,
        "reasoning": reasoning,
    }
