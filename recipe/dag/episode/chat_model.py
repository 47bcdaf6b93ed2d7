"""An agent's policy through messages: a chat API without a tokenizer, with tool calls between its answers.

Invariant: the call's `messages` are what was sent and received, in order; those of `Context.ask` are among them, but no
other request contains them. A call has no token ids, so it never becomes a training row. A tool call is read from
`tool_calls`, or from the text if the server leaves it there, by the rules of `tool_loop`. Each of the message's
`tool_calls` has an answer in `messages`, also one that was not run: with memory they are sent again, and strict
servers refuse a call without an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from recipe.dag.core.errors import HookFault, PromptTooLong, UserError, described
from recipe.dag.core.time_limit import TimeLimit
from recipe.dag.endpoint.client import ChatAnswer, ChatEndpoint
from recipe.dag.episode.attempt import Attempt
from recipe.dag.episode.conversation import Conversation
from recipe.dag.episode.generation import sampling_of
from recipe.dag.episode.hooks import Prompt, is_messages
from recipe.dag.episode.tool_loop import Request, RunTools, end_in_tool_call, requests_in
from recipe.dag.episode.toolset import Toolset
from recipe.dag.types.context import Message
from recipe.dag.types.inert import inert
from recipe.dag.types.record import Call
from recipe.dag.types.usage import added
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.schema import EpisodeSpec


class ChatModel:
    """The model of one agent. Shared by all episodes, so it keeps no state of any."""

    inert = staticmethod(inert)

    def __init__(self, agent: Agent, limits: EpisodeSpec, endpoint: ChatEndpoint, tools: Toolset) -> None:
        """Raises UserError for a tool loop that continues a message."""
        self._agent, self._limits, self._endpoint, self._tools = agent, limits, endpoint, tools
        loop = agent.tool_loop
        if loop is not None and loop.continues_message:
            raise UserError(
                f"agent {agent.name}: `tool_loop: {{format: {loop.format}}}` continues the model's message, which "
                f"policy {agent.policy} cannot, an API without `tokenizer`; use `format: hermes`, or name the tokenizer"
            )
        self._shown_tools = tools.schemas if loop is not None and loop.format == "hermes" else None

    async def read(self, call: Call, prompt: Prompt, conversation: Conversation | None) -> None:
        """Fill in the call's prompt, with memory as what follows its conversation."""
        if not is_messages(prompt):
            raise HookFault(
                f"returned {described(prompt)}: policy {self._agent.policy} is an API, which needs messages"
            )
        earlier = conversation.last.conversation if conversation is not None and conversation.last else []
        # a copy, so that the record neither shares the hook's objects nor holds what has no JSON form
        call.messages += [*earlier, *json.loads(json.dumps(prompt))]
        call.prompt_text = as_text(call.conversation)

    async def respond(self, call: Call, attempt: Attempt, limit: TimeLimit, run_tools: RunTools) -> None:
        """Fill in the response to the call's prompt."""
        loop, invalid_streak = self._agent.tool_loop, 0
        requests: list[Request] = []
        while True:
            try:
                answer = await self._complete(call, attempt, limit, call.conversation, _given(call, attempt))
            except PromptTooLong:
                attempt.end_without_room(call)
                call.ended_in_tool_call = bool(requests)
                return
            call.messages.append(answer.message)
            call.stop_reason = answer.stop_reason
            call.text = answer.message["content"]
            if loop is None or answer.stop_reason != "stop":
                cut_off = answer.stop_reason == "length"
                call.messages += _not_run(
                    answer.message, "the message was cut off" if cut_off else "there are no tools"
                )
                return
            requests = requests_in(_requested(answer.message), loop, self._tools.names)
            if not requests:
                call.messages += _not_run(answer.message, f"calls of `format: {loop.format}` only are run")
                return
            if call.generations >= loop.max_generations:  # more, if `prompt` asked the model before
                call.messages += _not_run(answer.message, "no further turn was left")
                return end_in_tool_call(call, "max_generations")
            results, ran = await run_tools(requests)
            call.messages += _addressed(results, answer.message)
            invalid_streak = 0 if ran else invalid_streak + 1
            if invalid_streak == loop.max_invalid_streak:
                return end_in_tool_call(call, "invalid_calls")

    async def reply(self, call: Call, attempt: Attempt, limit: TimeLimit, messages: list[Message]) -> Message:
        """Return the answer to a prompt besides the call's own."""
        answer = await self._complete(call, attempt, limit, messages)
        call.stop_reason = answer.stop_reason
        return answer.message

    def read_by(self, call: Call) -> str:
        """Return the text of all that the call's model had read before its last generation."""
        if not call.tool_results:
            return call.prompt_text
        messages = call.conversation
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return as_text(messages[: max(answers, default=len(messages))])

    async def _complete(
        self, call: Call, attempt: Attempt, limit: TimeLimit, messages: list[Message], given: ChatAnswer | None = None
    ) -> ChatAnswer:
        """Return the model's next message, or the one that a fork gives; count it in the call."""
        sampling = sampling_of(self._agent, attempt.validate, thinks=True)
        sampling["seed"] = attempt.seed_of(call)
        started = time.perf_counter()
        try:
            answer = given or await self._endpoint.complete(
                messages,
                sampling,
                timeout_s=self._limits.generation_timeout_s or limit.left_s / 2,
                tools=self._shown_tools,
                template=self._agent.chat_template_kwargs,
            )
        finally:
            call.generation_seconds += time.perf_counter() - started
        call.usage = added(call.usage, answer.usage)
        call.temperature = sampling["temperature"]
        call.generations += 1
        return answer


def _given(call: Call, attempt: Attempt) -> ChatAnswer | None:
    text = attempt.fork.text_of(call)
    if text is None:
        return attempt.fork.answer(call)
    return ChatAnswer({"role": "assistant", "content": text}, "stop", {})


def as_text(messages: Sequence[Message]) -> str:
    """Return messages for a reader."""
    return "\n\n".join(f"{message['role']}:\n{message.get('content') or ''}" for message in messages)


def _requested(message: Message) -> str:
    """Return the text from which tool calls are read: the message's `tool_calls`, as a model would write them, or else
    its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message["content"]
    return "\n".join(f"<tool_call>{_escaped(call['function'])}</tool_call>" for call in calls)


def _escaped(function: dict[str, Any]) -> str:
    """Return the call as JSON without `<`, so that no argument looks like a tag."""
    return json.dumps(function).replace("<", "\\u003c")


def _addressed(results: list[Message], message: Message) -> list[Message]:
    """Return tool results with the ids of the calls that they answer."""
    ids = [call["id"] for call in message.get("tool_calls") or ()] or [f"call_{n}" for n in range(len(results))]
    return [
        {**result, "tool_call_id": call_id} if result["role"] == "tool" else result
        for result, call_id in zip(results, ids, strict=False)
    ]


def _not_run(message: Message, reason: str) -> list[Message]:
    """Return an answer to each of the message's tool calls, which says why it was not run."""
    return [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": f"not run: {reason}"}
        for call in message.get("tool_calls") or ()
    ]
