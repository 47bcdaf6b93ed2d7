"""Runs one call of an agent: `prompt` hook, generations with tool calls between them, `parse` hook.

Invariant: `response_ids` holds the tokens as they were sampled and, between two generations, what the chat template
puts there; the mask tells them apart. Prompt and response together never exceed the policy's context, nor the response
its own limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipe.dag.core.errors import EnvFault, Fault, HookFault, PromptTooLong, TimeoutFault, UserError, boundary
from recipe.dag.core.tasks import limited
from recipe.dag.core.time_limit import TimeLimit, innermost
from recipe.dag.endpoint.chat import (
    continuation_ids,
    continue_off_loop,
    end_of_turn_id,
    render_off_loop,
    template_sources,
    unread_options,
)
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.conversation import Conversation
from recipe.dag.episode.generation import cut_at_stop, generate, sampling_of
from recipe.dag.episode.graph import EpisodeNode
from recipe.dag.episode.hooks import HookResult, is_messages, load_hooks
from recipe.dag.episode.seeds import generation_seed
from recipe.dag.episode.tool_loop import (
    Request,
    argument_between_tags,
    between_tags,
    calls_end,
    requests_in,
    run_requests,
)
from recipe.dag.episode.toolset import Toolset
from recipe.dag.types.context import Context, Message
from recipe.dag.types.inert import inert_for
from recipe.dag.types.record import PROMPT_TEXT, Call, Episode, Generation, ToolResult
from recipe.dag.types.thoughts import CLOSE_TAG, OPEN_TAG, ends_in_thought
from recipe.dag.types.tool import Tool
from recipe.dag.types.usage import added
from recipe.dag.workflow.agent_schema import ToolLoop
from recipe.dag.workflow.schema import Workflow

_TAIL = 16
"""Number of tokens that surely contains <think> and the white space after it, in any vocabulary."""


@dataclass(slots=True)
class Attempt:
    """State shared by all calls of one attempt to run an episode."""

    episode: Episode
    seed: int
    step: int
    validate: bool
    started: float = field(default_factory=time.perf_counter)
    """When the episode's first attempt started, on `time.perf_counter`."""
    tool_state: dict[str, dict] = field(default_factory=dict)
    """By `ToolSpec.key`."""
    env_tool_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the envs add to the state of tools before their first call, by tool name."""
    sample_ids: dict[str, list[int]] = field(default_factory=dict)
    """The sample's messages rendered by each agent's chat template, by agent name."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """By node id, for agents with `memory: chat`."""


class AgentRunner:
    """Runs the calls of one rollout node. Shared by all episodes, so it keeps no state of any."""

    def __init__(self, node: EpisodeNode, workflow: Workflow, endpoint: PolicyEndpoint, tools: dict[str, Tool]) -> None:
        """`tools` by `ToolSpec.key`. Raises UserError for hooks, tools or chat templates that cannot work."""
        assert node.agent is not None  # an AgentRunner is made for rollout nodes only
        self.node, self.agent, self.endpoint = node, node.agent, endpoint
        self.trained = not workflow.policies[node.agent.policy].frozen
        self.tools = Toolset(self.agent, tools)
        self.hooks = load_hooks(node.spec, workflow)
        self.limits = workflow.episode
        self.where = f"node {node.id}"
        self.inert = inert_for(endpoint.tokenizer)
        self._knows_thoughts = any(OPEN_TAG in source for source in template_sources(endpoint.tokenizer))
        self._template_tools: list[dict[str, Any]] | None = None
        """Schemas that the chat template renders."""
        self._end_of_turn: int | None = None
        """Set for agents that continue after an answer: with a tool loop whose results are messages of their own, or
        with `memory: chat`."""
        self._argument = "code"
        """The argument of the first tool, for calls between tags."""
        if unread := unread_options(self.endpoint.tokenizer, self.agent.chat_template_kwargs):
            raise UserError(
                f"agent {self.agent.name}: chat_template_kwargs.{unread[0]} has no effect: the chat template of policy "
                f"{self.agent.policy} does not read it; remove it, or choose a model whose template does"
            )
        if self.agent.tool_loop is not None:
            if not self.tools.names:
                raise UserError(f"agent {self.agent.name}: a tool_loop needs at least one tool in `tools`")
            self._prepare_loop(self.agent.tool_loop)
        if self.agent.memory == "chat":
            self._prepare_continuation("user")

    def _prepare_loop(self, loop: ToolLoop) -> None:
        if loop.continues_message:
            first = next(iter(self.tools.tools.values()))
            self._argument = argument_between_tags(first, f"agent {self.agent.name}")
            return
        hermes = loop.format == "hermes"
        self._template_tools = self.tools.schemas if hermes else None
        self._prepare_continuation("tool" if hermes else "user")

    def _prepare_continuation(self, role: str) -> None:
        """Check that the chat template can continue a conversation with a message of this role."""
        try:
            self._end_of_turn = end_of_turn_id(self.endpoint.tokenizer, **self.agent.chat_template_kwargs)
            messages = [{"role": role, "content": "-"}]
            continuation_ids(self.endpoint.tokenizer, messages, **self._continuation_options())
        except UserError as error:
            raise UserError(f"policy {self.agent.policy}: {error}") from error

    async def run(self, call: Call, context: Context, attempt: Attempt, transcript: str | None) -> HookResult:
        """Fill `call` in. `transcript`: the text that a hook in the token-level form gets as prompt_ids in place of the
        sample's messages. Raises Faults; the call then holds everything up to the failure."""
        async with self.timed(call, attempt) as limit:
            await self.prompt(call, context, attempt, transcript)
            return await self.finish(call, context, attempt, limit)

    @asynccontextmanager
    async def timed(self, call: Call, attempt: Attempt) -> AsyncIterator[TimeLimit]:
        """Limit the time of the call."""
        started = time.perf_counter()
        if not call.start_seconds:
            call.start_seconds = started - attempt.started
        try:
            async with limited(self.limits.call_timeout_s, TimeoutFault, "the call", self.where) as limit:
                yield limit
        finally:
            call.seconds += time.perf_counter() - started

    async def finish(self, call: Call, context: Context, attempt: Attempt, limit: TimeLimit) -> HookResult:
        """Fill in the rest of a call that has its prompt."""
        await self._respond(call, attempt, limit)
        if call.candidate is None:
            self.remember(call, attempt)
        context.call = call
        result = await self.hooks.post_process(
            self.endpoint.tokenizer, list(call.prompt_ids), list(call.response_ids), context
        )
        output = result.output
        if output.text is not None and output.text != call.text:
            call.completion, call.text = call.text, output.text
        call.parsed, call.train = output.parsed, output.train
        return result

    def remember(self, call: Call, attempt: Attempt) -> None:
        """Let the node's conversation, if it has one, go on from this call."""
        if self.agent.memory == "chat":
            attempt.conversations[self.node.id].last = call

    async def call_tool(self, call: Call, attempt: Attempt, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one of the agent's tools for a hook and record it in `call`."""
        tool = self.tools.name_of(name)
        if tool is None:
            declared = ", ".join(self.tools.names) or "none"
            problem = f"called the tool {name!r}, which agent {self.agent.name} does not declare ({declared})"
            raise HookFault(problem, where=self.where)
        return await self._run_tool(attempt, tool, arguments, call.tool_results.append, by_model=False)

    def may_skip(self, fault: Fault) -> bool:
        """Return whether the episode goes on without this call after `fault`. A bug in the user's code would hide in
        skipped calls."""
        return self.agent.on_failure == "skip" and fault.cause != "user_code"

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
        answer = await self._reply(call, attempt, sent, limit)
        # a prompt that goes on from the recorded messages is not recorded twice
        earlier = len(call.messages) if sent[: len(call.messages)] == call.messages else 0
        call.messages += [*sent[earlier:], answer]
        return answer.get("content") or ""

    async def _reply(self, call: Call, attempt: Attempt, messages: list[Message], limit: TimeLimit) -> Message:
        ids = await self._render(messages)
        room = self.endpoint.room(len(ids))
        if room < 1:
            raise PromptTooLong(f"a prompt of {len(ids)} tokens does not fit", where=self.where)
        generation, _ = await self._sample(call, attempt, limit, ids, room)
        text = self.endpoint.codec.decode(generation.response_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    def read_by(self, call: Call) -> str:
        """Return the text of all that the call's model had read before its last generation."""
        last = len(call.response_mask)
        while last and not call.response_mask[last - 1]:
            last -= 1
        while last and call.response_mask[last - 1]:
            last -= 1
        if not last:
            return call.prompt_text
        return self.endpoint.codec.decode(call.prompt_ids + call.response_ids[:last], skip_special_tokens=False)

    async def _run_tool(
        self,
        attempt: Attempt,
        name: str,
        arguments: dict[str, Any],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool = True,
    ) -> ToolResult:
        sample, added = attempt.episode.sample, attempt.env_tool_state.get(name)
        return await self.tools.call(name, arguments, sample, attempt.tool_state, keep, by_model=by_model, added=added)

    async def prompt(self, call: Call, context: Context, attempt: Attempt, transcript: str | None) -> None:
        """Fill in the call's prompt."""
        if context.obs is not None:
            with boundary(EnvFault, self.where):
                call.observation = str(context.obs)
        sample_ids = await self._hook_prompt_ids(attempt, transcript)
        if self.agent.memory == "chat":
            call.prompt_ids = await self._continue_conversation(sample_ids, context, attempt)
        else:
            prompt = await self.hooks.pre_process(self.endpoint.tokenizer, sample_ids, context)
            call.prompt_ids = await self._render(prompt) if is_messages(prompt) else prompt
        # Decoding a prompt is expensive and few prompts are looked at, so it waits for the first reader.
        PROMPT_TEXT.defer(call, partial(self.endpoint.codec.decode, call.prompt_ids, skip_special_tokens=False))

    async def _hook_prompt_ids(self, attempt: Attempt, transcript: str | None) -> list[int]:
        """Return the `prompt_ids` that a hook in the token-level form gets; empty if the hook does not read them."""
        hook = self.hooks.pre
        if hook is None:
            return []
        if transcript is not None and not hook.names_context:
            return await self.endpoint.codec.encode(transcript)
        if not hook.reads_prompt_ids:
            return []
        if self.agent.name not in attempt.sample_ids:
            attempt.sample_ids[self.agent.name] = await self._render(attempt.episode.sample["prompt"])
        return list(attempt.sample_ids[self.agent.name])

    async def _continue_conversation(self, sample_ids: list[int], context: Context, attempt: Attempt) -> list[int]:
        """Return the ids of the node's conversation so far, followed by the new messages."""
        conversation, hooks = attempt.conversations.setdefault(self.node.id, Conversation()), self.hooks
        context.continues = conversation.last is not None
        if hooks.pre is None:
            messages = conversation.default_messages(context, hooks.dependencies, hooks.peers)
        else:
            prompt = await hooks.pre_process(self.endpoint.tokenizer, sample_ids, context)
            with boundary(HookFault, hooks.pre.where, hooks.pre.function):
                messages = conversation.new_messages(prompt)
        if conversation.last is None:
            return await self._render(messages)
        assert self._end_of_turn is not None  # set in __init__ for `memory: chat`
        return conversation.ids(self._end_of_turn) + await self._continuation(messages)

    async def _render(self, messages: Sequence[Message]) -> list[int]:
        endpoint, options = self.endpoint, self.agent.chat_template_kwargs
        with boundary(HookFault, f"{self.where}, chat template of policy {self.agent.policy}"):
            return await render_off_loop(
                endpoint.codec, endpoint.tokenizer, messages, tools=self._template_tools, **options
            )

    async def _respond(self, call: Call, attempt: Attempt, limit: TimeLimit) -> None:
        loop, decode = self.agent.tool_loop, self.endpoint.codec.decode
        if not self._fits(call, attempt.episode):
            return
        thinking = self._opens_thinking(call)
        invalid_streak = 0
        while True:
            call.opened_thinking = thinking
            ids, room = call.prompt_ids + call.response_ids, self._room(call)
            generation, stopped = await self._sample(call, attempt, limit, ids, room)
            _append(call, generation.response_ids, generation.log_probs, sampled=1)
            call.text = decode(generation.response_ids, skip_special_tokens=True)
            ended = self._end_of_turn is not None and generation.response_ids[-1:] == [self._end_of_turn]
            if loop is None or generation.stop_reason != "stop" or not (ended or stopped):
                return
            # With special tokens: in some vocabularies the tool call's tags are special.
            raw = decode(generation.response_ids[:-1] if ended else generation.response_ids, skip_special_tokens=False)
            requests = requests_in(raw, loop, self.tools.names, opened_thinking=thinking, argument=self._argument)
            if loop.continues_message:
                thinking = ends_in_thought(raw, opened=thinking)
            # A closing tag in a thought calls nothing, but it ended the generation: the model goes on from it.
            if not requests and not (stopped and thinking and calls_end(raw, loop)):
                return
            if call.generations == loop.max_generations:
                call.stop_reason, call.ended_in_tool_call = "max_generations", True
                return
            messages, ran = await self._run_calls(requests, loop, call, attempt)
            invalid_streak = 0 if ran else invalid_streak + 1
            if invalid_streak == loop.max_invalid_streak:
                call.stop_reason, call.ended_in_tool_call = "invalid_calls", True
                return
            between = await self._between(messages, loop, raw, ended=ended)
            if self._room(call) - len(between) < 1:
                call.stop_reason, call.ended_in_tool_call = "length", True
                return
            _append(call, between, [0.0] * len(between), sampled=0)
            if not loop.continues_message:
                thinking = self._opens_thinking(call)

    async def _run_calls(
        self, requests: list[Request], loop: ToolLoop, call: Call, attempt: Attempt
    ) -> tuple[list[Message], bool]:
        """Run the tool calls of one generation; return the messages that present their results, and False if all calls
        were invalid."""
        earlier = len(call.tool_results)
        messages = await run_requests(requests, loop, partial(self._run_tool, attempt), call.tool_results)
        results = call.tool_results[earlier:]
        return messages, not results or any(result.status != "invalid" for result in results)

    def _fits(self, call: Call, episode: Episode) -> bool:
        """Return whether the prompt leaves room for a token; if not, the call has ended."""
        if self._room(call) >= 1:
            return True
        episode.info["prompt_too_long"] = episode.info.get("prompt_too_long", 0) + 1
        call.stop_reason = "length"
        return False

    async def _between(self, messages: Sequence[Message], loop: ToolLoop, raw: str, *, ended: bool) -> list[int]:
        """Return the ids between a generation that called tools and the next one. `raw`: the generation's text;
        `ended`: it has its end-of-turn token."""
        if loop.continues_message:
            return await self.endpoint.codec.encode("".join(between_tags(message, loop, raw) for message in messages))
        assert self._end_of_turn is not None  # set in __init__ for such a loop
        # A stop string ends the generation before the token that ends the turn.
        return ([] if ended else [self._end_of_turn]) + await self._continuation(messages)

    async def _sample(
        self, call: Call, attempt: Attempt, limit: TimeLimit, prompt_ids: list[int], room: int
    ) -> tuple[Generation, bool]:
        """Return one generation of at most `room` tokens, and whether a stop string ended it; count it in `call`."""
        episode, agent = attempt.episode, self.agent
        sampling = sampling_of(agent, attempt.validate, thinks=self._may_think(prompt_ids))
        stop = sampling["stop"]
        sampling["max_tokens"] = min(sampling["max_tokens"], room)
        sampling["seed"] = self._seed(call, attempt)
        started = time.perf_counter()
        try:
            generation = await generate(
                self.endpoint.client,
                f"{episode.uid}-{episode.index}-{agent.name}",
                prompt_ids,
                sampling,
                deadline=limit.end,
                limit_s=self.limits.generation_timeout_s,
                where=f"{self.where}, policy {agent.policy}",
                faults=episode.faults,
            )
        finally:
            call.generation_seconds += time.perf_counter() - started
        generation, stopped = cut_at_stop(generation, self.endpoint.tokenizer, stop)
        # A call counts as old as its oldest weights: staleness is computed from them.
        earlier = [call.weight_version] if call.generations else []
        call.weight_version = min([generation.weight_version, *earlier])
        call.stop_reason, call.temperature = generation.stop_reason, sampling["temperature"]
        call.generations += 1
        if generation.usage is not None:
            call.usage = added(call.usage, generation.usage)
        return generation, stopped

    def _seed(self, call: Call, attempt: Attempt) -> int:
        """Return the seed of the call's next generation."""
        return generation_seed(
            attempt.seed,
            step=attempt.step,
            validate=attempt.validate,
            uid=attempt.episode.uid,
            index=attempt.episode.index,
            node=call.node,
            turn=call.turn,
            round_index=call.round,
            generation=call.generations,
            candidate=call.candidate,
        )

    def _opens_thinking(self, call: Call) -> bool:
        """Return whether the generation prompt ends with <think>, as templates of reasoning models do."""
        return self._tail(call.response_ids or call.prompt_ids).endswith(OPEN_TAG)

    def _may_think(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the model's answer may begin with a thought: the prompt opened one, or else the chat template
        knows thoughts and the prompt has not closed an empty one."""
        if not self.agent.sampling.thinking_tokens:
            return False
        tail = self._tail(prompt_ids)
        return tail.endswith(OPEN_TAG) or (self._knows_thoughts and not tail.endswith(CLOSE_TAG))

    def _tail(self, ids: Sequence[int]) -> str:
        return self.endpoint.codec.decode(list(ids[-_TAIL:]), skip_special_tokens=False).rstrip()

    async def _continuation(self, messages: Sequence[Message]) -> list[int]:
        endpoint = self.endpoint
        return await continue_off_loop(endpoint.codec, endpoint.tokenizer, messages, **self._continuation_options())

    def _continuation_options(self) -> dict[str, Any]:
        return {"end_of_turn": self._end_of_turn, "tools": self._template_tools, **self.agent.chat_template_kwargs}

    def _room(self, call: Call) -> int:
        """Return how many tokens still fit into the call."""
        return self.endpoint.room(len(call.prompt_ids), len(call.response_ids))


def _append(call: Call, ids: list[int], log_probs: list[float], *, sampled: int) -> None:
    # Servers may return numpy scalars; records hold Python's own numbers.
    call.response_ids += map(int, ids)
    call.rollout_log_probs += map(float, log_probs)
    call.response_mask += [sampled] * len(ids)
