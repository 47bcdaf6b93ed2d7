"""Runs one call of an agent: its `prompt`, the model's answer with tool calls, its `parse`.

Invariant: the agent's code and its tools are called here, the policy through one of two models (`TokenModel`,
`ChatModel`), which alone know what a prompt and a response consist of.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from recipe.dag.core.errors import EnvFault, Fault, HookFault, TimeoutFault, UserError, boundary
from recipe.dag.core.tasks import limited
from recipe.dag.core.time_limit import TimeLimit, innermost
from recipe.dag.endpoint.client import Endpoint, PolicyEndpoint
from recipe.dag.episode.attempt import Attempt
from recipe.dag.episode.chat_model import ChatModel
from recipe.dag.episode.conversation import Conversation, conversation_of, prompt_of
from recipe.dag.episode.graph import EpisodeNode
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.token_model import TokenModel
from recipe.dag.episode.tool_loop import Request, run_requests
from recipe.dag.episode.toolset import Toolset
from recipe.dag.types.context import Context, Message, Output
from recipe.dag.types.record import Call, ToolResult
from recipe.dag.types.tokens import Tokens
from recipe.dag.types.tool import Tool
from recipe.dag.workflow.schema import Workflow


class AgentRunner:
    """Runs the calls of one rollout node. Shared by all episodes, so it keeps no state of any."""

    def __init__(self, node: EpisodeNode, workflow: Workflow, endpoint: Endpoint, tools: dict[str, Tool]) -> None:
        """`tools` by `ToolSpec.key`. Raises UserError for hooks, tools or chat templates that cannot work."""
        assert node.agent is not None  # an AgentRunner is made for rollout nodes only
        self.node, self.agent = node, node.agent
        self.trained = not workflow.policies[node.agent.policy].frozen
        self.tools = Toolset(self.agent, tools)
        self.hooks = load_hooks(node.spec, workflow)
        self.limits = workflow.episode
        self.where = f"node {node.id}"
        if self.agent.tool_loop is not None and not self.tools.names:
            raise UserError(f"agent {self.agent.name}: a tool_loop needs at least one tool in `tools`")
        if self.hooks.code.private and self.agent.memory == "shared":
            raise UserError(
                f"{self.where}: its code is private, so no other agent may read it; remove `memory: shared`"
            )
        if isinstance(endpoint, PolicyEndpoint):
            self.model = TokenModel(self.agent, self.limits, endpoint, self.tools, self.where)
        else:
            self.hooks.check_messages(self.agent.policy)
            self.model = ChatModel(self.agent, self.limits, endpoint, self.tools)

    async def run(self, call: Call, context: Context, attempt: Attempt) -> Output:
        """Fill `call` in. Raises Faults; the call then holds everything up to the failure."""
        async with self.timed(call, attempt) as limit:
            conversation = await self.prompt(call, context, attempt)
            return await self.finish(call, context, attempt, limit, conversation)

    @asynccontextmanager
    async def timed(self, call: Call, attempt: Attempt) -> AsyncIterator[TimeLimit]:
        started = time.perf_counter()
        if not call.start_seconds:
            call.start_seconds = started - attempt.started
        try:
            async with limited(self.limits.call_timeout_s, TimeoutFault, "the call", self.where) as limit:
                yield limit
        finally:
            call.seconds += time.perf_counter() - started

    async def prompt(self, call: Call, context: Context, attempt: Attempt) -> Conversation | None:
        """Fill in the call's prompt. Return the conversation that it continues, of an agent with memory."""
        if context.obs is not None:
            with boundary(EnvFault, self.where):
                call.observation = str(context.obs)
        conversation = conversation_of(self.agent, context, attempt.conversations)
        prompt = await prompt_of(self.hooks, context, conversation)
        with self.hooks.guard():
            await self.model.read(call, prompt, conversation)
        return conversation

    async def finish(
        self, call: Call, context: Context, attempt: Attempt, limit: TimeLimit, conversation: Conversation | None
    ) -> Output:
        """Fill in the rest of a call that has its prompt."""
        await self.model.respond(call, attempt, limit, partial(self._run_calls, call, attempt))
        if conversation is not None:
            conversation.keep(call, attempt.conversations)
        context.call = call
        output = await self.hooks.parse(context)
        if output.text is not None and output.text != call.text:
            call.completion, call.text = call.text, output.text
        call.parsed, call.train = output.parsed, output.train
        return output

    async def call_tool(self, call: Call, attempt: Attempt, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one of the agent's tools for a hook and record it in `call`."""
        tool = self.tools.name_of(name)
        if tool is None:
            declared = ", ".join(self.tools.names) or "none"
            problem = f"called the tool {name!r}, which agent {self.agent.name} does not declare ({declared})"
            raise HookFault(problem, where=self.where)
        return await self._run_tool(call, attempt, tool, arguments, call.tool_results.append, by_model=False)

    def tokens(self, attempt: Attempt, obs: Mapping[str, Mapping[str, Any]]) -> Tokens | None:
        """Return the `context.tokens` of a call. `obs`: the observations that it sees, by node and agent."""
        if isinstance(self.model, TokenModel) and self.hooks.code.needs_tokens:
            return self.model.tokens(attempt, obs)
        return None

    def may_skip(self, fault: Fault) -> bool:
        """Return whether the episode goes on without this call after `fault`. A bug in the user's code would hide in
        skipped calls, and a fork is no longer one of its episode."""
        return self.agent.on_failure == "skip" and fault.cause not in ("user_code", "unrepeated")

    async def ask(self, call: Call, attempt: Attempt, messages: Sequence[Message]) -> str:
        """Return the model's answer to a further prompt of the call, for a hook. Raises UserError for a policy that is
        trained, since no row holds the answer."""
        if self.trained:
            raise UserError(
                f"{self.where}: context.ask is for agents whose policy is not trained, and policy {self.agent.policy} "
                "is; make the request a node"
            )
        limit = innermost()
        if limit is None:  # a hook that asks from its own thread
            elapsed = time.perf_counter() - attempt.started - call.start_seconds
            limit = TimeLimit(self.limits.call_timeout_s - elapsed)
        with boundary(HookFault, self.where):
            sent = json.loads(json.dumps(list(messages)))
        answer = await self.model.reply(call, attempt, limit, sent)
        # a prompt that goes on from the recorded messages is not recorded twice
        earlier = len(call.messages) if sent[: len(call.messages)] == call.messages else 0
        new = [*sent[earlier:], answer]
        call.asked += range(len(call.messages), len(call.messages) + len(new))
        call.messages += new
        return answer.get("content") or ""

    async def _run_calls(self, call: Call, attempt: Attempt, requests: list[Request]) -> tuple[list[Message], bool]:
        loop = self.agent.tool_loop
        assert loop is not None  # without one, a model reads no tool calls
        earlier = len(call.tool_results)
        messages = await run_requests(requests, loop, partial(self._run_tool, call, attempt), call.tool_results)
        results = call.tool_results[earlier:]
        for result in results:  # those that were refused before they ran, too
            result.generation = call.generations
        return messages, not results or any(result.status != "invalid" for result in results)

    async def _run_tool(
        self,
        call: Call,
        attempt: Attempt,
        name: str,
        arguments: dict[str, Any],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool = True,
    ) -> ToolResult:
        sample, added = attempt.episode.sample, attempt.env_tool_state.get(name)
        asked = time.perf_counter() - attempt.started

        def keep_dated(result: ToolResult) -> None:
            result.start_seconds, result.generation = asked, call.generations
            keep(result)

        state = attempt.tool_state
        return await self.tools.call(name, arguments, sample, state, keep_dated, by_model=by_model, added=added)
