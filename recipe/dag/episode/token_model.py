"""An agent's policy through token ids: the prompt rendered, generations with tool calls between them.

Invariant: `response_ids` holds the tokens as they were sampled and, between two generations, what the chat template
puts there; the mask tells them apart. Prompt and response together never exceed the policy's context, nor the response
its own limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from recipe.dag.core.errors import HookFault, PromptTooLong, UserError, boundary
from recipe.dag.core.time_limit import TimeLimit
from recipe.dag.endpoint.chat import (
    continuation_ids,
    continue_off_loop,
    end_of_turn_id,
    ignored_options,
    render_off_loop,
    template_sources,
)
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.attempt import Attempt
from recipe.dag.episode.conversation import Conversation
from recipe.dag.episode.generation import cut_at_stop, generate, sampling_of
from recipe.dag.episode.hooks import Prompt, is_messages
from recipe.dag.episode.tool_loop import (
    RunTools,
    argument_between_tags,
    between_tags,
    calls_end,
    end_in_tool_call,
    requests_in,
)
from recipe.dag.episode.toolset import Toolset
from recipe.dag.types.context import Message
from recipe.dag.types.inert import inert_for
from recipe.dag.types.markup import CLOSE_TAG, OPEN_TAG, ends_in_thought
from recipe.dag.types.record import PROMPT_TEXT, Call, Generation
from recipe.dag.types.tokens import Tokens
from recipe.dag.types.usage import added
from recipe.dag.workflow.agent_schema import Agent, ToolLoop
from recipe.dag.workflow.schema import EpisodeSpec

_TAIL = 16
"""Number of tokens that surely contains <think> and the white space after it, in any vocabulary."""


class TokenModel:
    """The model of one agent. Shared by all episodes, so it keeps no state of any."""

    def __init__(self, agent: Agent, limits: EpisodeSpec, endpoint: PolicyEndpoint, tools: Toolset, where: str) -> None:
        """`where`: the agent's node, for messages. Raises UserError for chat templates that cannot work."""
        self._agent, self._limits, self._endpoint, self._tools, self._where = agent, limits, endpoint, tools, where
        self.inert = inert_for(endpoint.tokenizer)
        self._knows_thoughts = any(OPEN_TAG in source for source in template_sources(endpoint.tokenizer))
        self._template_tools: list[dict[str, Any]] | None = None
        """Schemas that the chat template renders."""
        self._end_of_turn: int | None = None
        """Set for agents that continue after an answer: with a tool loop whose results are messages of their own, or
        with memory."""
        self._argument = "code"
        """The argument of the first tool, for calls between tags."""
        if agent.tool_loop is not None:
            self._prepare_loop(agent.tool_loop)
        if agent.memory != "none":
            self._prepare_continuation("user")

    def _prepare_loop(self, loop: ToolLoop) -> None:
        if loop.continues_message:
            first = next(iter(self._tools.tools.values()))
            self._argument = argument_between_tags(first, f"agent {self._agent.name}")
            return
        hermes = loop.format == "hermes"
        self._template_tools = self._tools.schemas if hermes else None
        self._prepare_continuation("tool" if hermes else "user")

    def _prepare_continuation(self, role: str) -> None:
        """Check that the chat template can continue a conversation with a message of this role."""
        try:
            self._end_of_turn = end_of_turn_id(self._endpoint.tokenizer, **self._agent.chat_template_kwargs)
            messages = [{"role": role, "content": "-"}]
            continuation_ids(self._endpoint.tokenizer, messages, **self._continuation_options())
        except UserError as error:
            raise UserError(f"policy {self._agent.policy}: {error}") from error

    async def read(self, call: Call, prompt: Prompt, conversation: Conversation | None) -> None:
        """Fill in the call's prompt, with memory as what follows its conversation."""
        if conversation is not None and conversation.last is not None and is_messages(prompt):
            assert self._end_of_turn is not None  # set in __init__ for agents with memory
            call.prompt_ids = conversation.ids(self._end_of_turn) + await self._continuation(prompt)
        else:
            call.prompt_ids = await self.render(prompt) if is_messages(prompt) else prompt
        # Decoding a prompt is expensive and few prompts are looked at, so it waits for the first reader.
        PROMPT_TEXT.defer(call, partial(self._endpoint.codec.decode, call.prompt_ids, skip_special_tokens=False))

    async def render(self, messages: Sequence[Message]) -> list[int]:
        """Return messages as token ids, through the policy's chat template."""
        endpoint, options = self._endpoint, self._agent.chat_template_kwargs
        with boundary(HookFault, f"{self._where}, chat template of policy {self._agent.policy}"):
            return await render_off_loop(
                endpoint.codec, endpoint.tokenizer, messages, tools=self._template_tools, **options
            )

    def tokens(self, attempt: Attempt, obs: Mapping[str, Mapping[str, Any]]) -> Tokens:
        """Return the token side of a call. `obs`: the observations that it sees, by node and agent."""
        return Tokens(
            self._endpoint.tokenizer,
            encode=self._endpoint.codec.encode,
            sample_ids=partial(self.render, attempt.episode.sample["prompt"]),
            observed=lambda call: obs.get(call.node, {}).get(call.agent),
            notes=attempt.notes,
        )

    async def respond(self, call: Call, attempt: Attempt, limit: TimeLimit, run_tools: RunTools) -> None:
        """Fill in the response to the call's prompt."""
        loop, decode = self._agent.tool_loop, self._endpoint.codec.decode
        if self._room(call) < 1:
            attempt.end_without_room(call)
            return
        thinking = self._opens_thinking(call)
        invalid_streak = 0
        while True:
            call.opened_thinking = thinking
            ids, room = call.prompt_ids + call.response_ids, self._room(call)
            given = await self._given(call, attempt)
            generation, stopped = await self._sample(call, attempt, limit, ids, room, given)
            call.cached_tokens = call.cached_tokens if call.response_ids else generation.cached_tokens
            _append(call, generation.response_ids, generation.log_probs, sampled=1)
            call.text = decode(generation.response_ids, skip_special_tokens=True)
            ended = self._end_of_turn is not None and generation.response_ids[-1:] == [self._end_of_turn]
            if loop is None or generation.stop_reason != "stop" or not (ended or stopped):
                return
            # With special tokens: in some vocabularies the tool call's tags are special.
            raw = decode(generation.response_ids[:-1] if ended else generation.response_ids, skip_special_tokens=False)
            requests = requests_in(raw, loop, self._tools.names, opened_thinking=thinking, argument=self._argument)
            if loop.continues_message:
                thinking = ends_in_thought(raw, opened=thinking)
            # A closing tag in a thought calls nothing, but it ended the generation: the model goes on from it.
            if not requests and not (stopped and thinking and calls_end(raw, loop)):
                return
            if call.generations >= loop.max_generations:  # more, if `prompt` asked the model before
                return end_in_tool_call(call, "max_generations")
            messages, ran = await run_tools(requests)
            invalid_streak = 0 if ran else invalid_streak + 1
            if invalid_streak == loop.max_invalid_streak:
                return end_in_tool_call(call, "invalid_calls")
            between = await self._between(messages, loop, raw, ended=ended)
            if self._room(call) - len(between) < 1:
                return end_in_tool_call(call, "length")
            _append(call, between, [0.0] * len(between), sampled=0)
            if not loop.continues_message:
                thinking = self._opens_thinking(call)

    async def reply(self, call: Call, attempt: Attempt, limit: TimeLimit, messages: list[Message]) -> Message:
        """Return the answer to a prompt besides the call's own."""
        ids = await self.render(messages)
        room = self._endpoint.room(len(ids))
        if room < 1:
            raise PromptTooLong(f"a prompt of {len(ids)} tokens does not fit", where=self._where)
        generation, _ = await self._sample(call, attempt, limit, ids, room)
        text = self._endpoint.codec.decode(generation.response_ids, skip_special_tokens=True)
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
        return self._endpoint.codec.decode(call.prompt_ids + call.response_ids[:last], skip_special_tokens=False)

    async def _between(self, messages: Sequence[Message], loop: ToolLoop, raw: str, *, ended: bool) -> list[int]:
        """Return the ids between a generation that called tools and the next one. `raw`: the generation's text;
        `ended`: it has its end-of-turn token."""
        if loop.continues_message:
            return await self._endpoint.codec.encode("".join(between_tags(message, loop, raw) for message in messages))
        assert self._end_of_turn is not None  # set in __init__ for such a loop
        # A stop string ends the generation before the token that ends the turn.
        return ([] if ended else [self._end_of_turn]) + await self._continuation(messages)

    async def _given(self, call: Call, attempt: Attempt) -> Generation | None:
        """Return what a fork gives the call as its next generation."""
        text = attempt.fork.text_of(call)
        if text is None:
            return attempt.fork.generation(call)
        end = self._endpoint.tokenizer.eos_token_id if self._end_of_turn is None else self._end_of_turn
        ids = [*(await self._endpoint.codec.encode(text)), end][: self._room(call)]
        return Generation(ids, [0.0] * len(ids), "stop" if ids[-1] == end else "length")

    async def _sample(
        self,
        call: Call,
        attempt: Attempt,
        limit: TimeLimit,
        prompt_ids: list[int],
        room: int,
        given: Generation | None = None,
    ) -> tuple[Generation, bool]:
        """Return one generation of at most `room` tokens, and whether a stop string ended it; count it in `call`.
        given: what stands in for a generation."""
        episode, agent = attempt.episode, self._agent
        sampling = sampling_of(agent, attempt.validate, thinks=self._may_think(prompt_ids))
        stop = sampling["stop"]
        sampling["max_tokens"] = min(sampling["max_tokens"], room)
        sampling["seed"] = attempt.seed_of(call)
        started = time.perf_counter()
        try:
            generation = given or await generate(
                self._endpoint.client,
                f"{episode.uid}-{episode.index}-{agent.name}",
                prompt_ids,
                sampling,
                deadline=limit.end,
                limit_s=self._limits.generation_timeout_s,
                where=f"{self._where}, policy {agent.policy}",
                faults=episode.faults,
            )
        finally:
            call.generation_seconds += time.perf_counter() - started
        generation, stopped = cut_at_stop(generation, self._endpoint.tokenizer, stop)
        # A call counts as old as its oldest weights: staleness is computed from them.
        earlier = [call.weight_version] if call.generations else []
        call.weight_version = min([generation.weight_version, *earlier])
        call.stop_reason, call.temperature = generation.stop_reason, sampling["temperature"]
        call.generations += 1
        if generation.usage is not None:
            call.usage = added(call.usage, generation.usage)
        return generation, stopped

    def _opens_thinking(self, call: Call) -> bool:
        """Return whether the generation prompt ends with <think>, as templates of reasoning models do."""
        return self._tail(call.response_ids or call.prompt_ids).endswith(OPEN_TAG)

    def _may_think(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the model's answer may begin with a thought: the prompt opened one, or else the chat template
        knows thoughts and the prompt has not closed an empty one."""
        if not self._agent.sampling.thinking_tokens:
            return False
        tail = self._tail(prompt_ids)
        return tail.endswith(OPEN_TAG) or (self._knows_thoughts and not tail.endswith(CLOSE_TAG))

    def _tail(self, ids: Sequence[int]) -> str:
        return self._endpoint.codec.decode(list(ids[-_TAIL:]), skip_special_tokens=False).rstrip()

    async def _continuation(self, messages: Sequence[Message]) -> list[int]:
        endpoint = self._endpoint
        return await continue_off_loop(endpoint.codec, endpoint.tokenizer, messages, **self._continuation_options())

    def _continuation_options(self) -> dict[str, Any]:
        return {"end_of_turn": self._end_of_turn, "tools": self._template_tools, **self._agent.chat_template_kwargs}

    def _room(self, call: Call) -> int:
        """Return how many tokens still fit into the call."""
        return self._endpoint.room(len(call.prompt_ids), len(call.response_ids))


def check_options(agent: Agent, tokenizers: Mapping[str, Any]) -> None:
    """Check that each option of the agent's chat template has an effect with one of its policies. `tokenizers`: by
    policy. Raises UserError."""
    unread = [set(ignored_options(tokenizer, agent.chat_template_kwargs)) for tokenizer in tokenizers.values()]
    if unread and (ignored := sorted(set.intersection(*unread))):
        names = " and ".join(tokenizers)
        unable = f"template of policy {names} does" if len(tokenizers) == 1 else f"templates of policies {names} do"
        raise UserError(
            f"agent {agent.name}: chat_template_kwargs.{ignored[0]} has no effect: the chat {unable} not read it; "
            "remove it, or choose a model whose template does"
        )


def _append(call: Call, ids: list[int], log_probs: list[float], *, sampled: int) -> None:
    # Servers may return numpy scalars; records hold Python's own numbers.
    call.response_ids += map(int, ids)
    call.rollout_log_probs += map(float, log_probs)
    call.response_mask += [sampled] * len(ids)
