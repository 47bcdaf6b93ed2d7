"""One agent's move: hook, generations with tool calls between them, hook.

Invariant: `response_ids` holds what was sampled, as it was sampled, and between two generations what the chat template
puts there; the mask tells them apart. Prompt and response together never outgrow the policy's context.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipe.dag.episode.chat import continuation_ids, continue_off_loop, end_of_turn_id, render_off_loop
from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.context import Context
from recipe.dag.episode.conversation import Conversation
from recipe.dag.episode.generation import cut_at_stop, generate
from recipe.dag.episode.graph import EpisodeNode
from recipe.dag.episode.hooks import Answer, load_hooks
from recipe.dag.episode.markup import OPEN_TAG
from recipe.dag.episode.record import Call, Episode, Generation, ToolResult
from recipe.dag.episode.seeds import generation_seed
from recipe.dag.episode.tasks import limited
from recipe.dag.episode.tool_loop import answer, requests_in
from recipe.dag.episode.toolset import Toolset
from recipe.dag.errors import EnvFault, HookFault, TimeoutFault, UserError, boundary
from recipe.dag.tools.tool import Tool
from recipe.dag.workflow.schema import Workflow

_TAIL = 16
"""Tokens that hold <think> and the white space behind it, in whatever vocabulary."""


@dataclass(slots=True)
class Attempt:
    """What all calls of one run of an episode share."""

    episode: Episode
    seed: int
    step: int
    validate: bool
    started: float = field(default_factory=time.perf_counter)
    """When the episode's first attempt started, on `time.perf_counter`."""
    tool_state: dict[str, dict] = field(default_factory=dict)
    """By `ToolSpec.key`."""
    sample_ids: dict[str, list[int]] = field(default_factory=dict)
    """The sample's messages as an agent's template renders them, by agent name."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """By node id, of agents with `memory: chat`."""


class Caller:
    """A rollout node with all that its calls need; shared by all episodes, holds nothing of any."""

    def __init__(
        self, place: EpisodeNode, workflow: Workflow, endpoint: PolicyEndpoint, tools: dict[str, Tool]
    ) -> None:
        """`tools` by `ToolSpec.key`. Raises UserError for hooks, tools or chat templates that cannot work."""
        self.place, self.agent, self.endpoint = place, place.agent, endpoint
        self.tools = Toolset(self.agent, tools)
        self.hooks = load_hooks(place.node, workflow)
        self.spec = workflow.episode
        self.where = f"node {place.id}"
        self._shown_schemas = None
        self._end_of_turn = None
        if self.agent.tool_loop is not None:
            self._prepare_tool_loop()
        if self.agent.memory == "chat":
            self._prepare_continuation("user")

    def _prepare_tool_loop(self) -> None:
        if not self.tools.names:
            raise UserError(f"agent {self.agent.name}: a tool_loop needs at least one tool in `tools`")
        hermes = self.agent.tool_loop.format == "hermes"
        self._shown_schemas = self.tools.schemas if hermes else None
        self._prepare_continuation("tool" if hermes else "user")

    def _prepare_continuation(self, role: str) -> None:
        try:
            self._end_of_turn = end_of_turn_id(self.endpoint.tokenizer, **self.agent.chat_template_kwargs)
            messages = [{"role": role, "content": "-"}]
            continuation_ids(self.endpoint.tokenizer, messages, **self._continuation_options())
        except UserError as error:
            raise UserError(f"policy {self.agent.policy}: {error}") from error

    async def move(self, call: Call, context: Context, attempt: Attempt, transcript: str | None) -> Answer:
        """Fill `call` in. `transcript`: what a hook in siiRL's form gets as prompt_ids in place of the sample's
        messages. Raises Faults; the call then holds what was done until then."""
        started = time.perf_counter()
        call.start_seconds = started - attempt.started
        deadline = asyncio.get_running_loop().time() + self.spec.call_timeout_s
        try:
            async with limited(self.spec.call_timeout_s, TimeoutFault, "the call", self.where):
                await self._prompt(call, context, attempt, transcript)
                await self._respond(call, attempt, deadline)
                if self.agent.memory == "chat":
                    attempt.conversations[self.place.id].last = call
                context.call = call
                result = await self.hooks.post_process(
                    self.endpoint.tokenizer, list(call.prompt_ids), list(call.response_ids), context
                )
        finally:
            call.seconds = time.perf_counter() - started
        output = result.output
        if output.text is not None and output.text != call.text:
            call.completion, call.text = call.text, output.text
        call.parsed, call.train = output.parsed, output.train
        return result

    async def call_tool(self, call: Call, attempt: Attempt, name: str, arguments: dict[str, Any]) -> ToolResult:
        """For hooks: run one of the agent's tools and record it in `call`."""
        tool = self.tools.name_of(name)
        if tool is None:
            known = ", ".join(self.tools.names) or "none"
            problem = f"called the tool {name!r}, which agent {self.agent.name} does not declare ({known})"
            raise HookFault(problem, where=self.where)
        return await self._run(attempt, tool, arguments, call.tool_results.append, by_model=False)

    async def _run(
        self,
        attempt: Attempt,
        name: str,
        arguments: dict[str, Any],
        keep: Callable[[ToolResult], None],
        *,
        by_model: bool = True,
    ) -> ToolResult:
        sample = attempt.episode.sample
        return await self.tools.call(name, arguments, sample, attempt.tool_state, keep, by_model=by_model)

    async def _prompt(self, call: Call, context: Context, attempt: Attempt, transcript: str | None) -> None:
        tokenizer = self.endpoint.tokenizer
        given: list[int] = []
        if context.obs is not None:
            with boundary(EnvFault, self.where):
                call.observation = str(context.obs)
        if self.hooks.pre is not None and transcript is not None and not self.hooks.pre.names_context:
            given = await self.endpoint.codec.encode(transcript)
        elif self.hooks.pre is not None and self.hooks.pre.reads_prompt_ids:
            if self.agent.name not in attempt.sample_ids:
                attempt.sample_ids[self.agent.name] = await self._render(attempt.episode.sample["prompt"])
            given = list(attempt.sample_ids[self.agent.name])
        if self.agent.memory == "chat":
            call.prompt_ids = await self._go_on(given, context, attempt)
        else:
            prompt = await self.hooks.pre_process(tokenizer, given, context)
            call.prompt_ids = await self._render(prompt) if isinstance(prompt[0], dict) else prompt
        call.prompt_text = partial(self.endpoint.codec.decode, call.prompt_ids, skip_special_tokens=False)

    async def _go_on(self, given: list[int], context: Context, attempt: Attempt) -> list[int]:
        """Return the conversation's ids, with what is said to the agent now."""
        conversation, hooks = attempt.conversations.setdefault(self.place.id, Conversation()), self.hooks
        context.continues = conversation.last is not None
        if hooks.pre is None:
            messages = conversation.default_messages(context, hooks.dependencies, hooks.peers)
        else:
            prompt = await hooks.pre_process(self.endpoint.tokenizer, given, context)
            with boundary(HookFault, hooks.pre.where, hooks.pre.function):
                messages = conversation.said(prompt)
        if conversation.last is None:
            return await self._render(messages)
        return conversation.ids(self._end_of_turn) + await self._continuation(messages)

    async def _render(self, messages: list[dict]) -> list[int]:
        endpoint, options = self.endpoint, self.agent.chat_template_kwargs
        with boundary(HookFault, f"{self.where}, chat template of policy {self.agent.policy}"):
            return await render_off_loop(
                endpoint.codec, endpoint.tokenizer, messages, tools=self._shown_schemas, **options
            )

    async def _respond(self, call: Call, attempt: Attempt, deadline: float) -> None:
        loop, decode = self.agent.tool_loop, self.endpoint.codec.decode
        if self._room(call) < 1:
            info = attempt.episode.info
            info["prompt_too_long"] = info.get("prompt_too_long", 0) + 1
            call.stop_reason = "length"
            return
        limit = loop.max_generations if loop else 1
        while True:
            made, stopped = await self._generation(call, attempt, deadline)
            call.text = decode(made.response_ids, skip_special_tokens=True)
            ended = made.response_ids[-1:] == [self._end_of_turn]
            if loop is None or made.stop_reason != "stop" or not (ended or stopped):
                return
            # With special tokens: in some vocabularies the tool call's tags are special.
            said = made.response_ids[:-1] if ended else made.response_ids
            raw = decode(said, skip_special_tokens=False)
            requests = requests_in(raw, loop, self.tools.names, opened_thinking=call.opened_thinking)
            if not requests:
                return
            if call.generations == limit:
                call.stop_reason, call.ended_in_tool_call = "max_generations", True
                return
            shown = await answer(requests, loop, partial(self._run, attempt), call.tool_results)
            # A stop string ended the generation before the token that ends the turn.
            between = ([] if ended else [self._end_of_turn]) + await self._continuation(shown)
            if self._room(call) - len(between) < 1:
                call.stop_reason, call.ended_in_tool_call = "length", True
                return
            _append(call, between, [0.0] * len(between), sampled=0)

    async def _generation(self, call: Call, attempt: Attempt, deadline: float) -> tuple[Generation, bool]:
        """Ask the server, append its answer to `call`, and return it, and whether a stop string ended it."""
        episode, agent = attempt.episode, self.agent
        call.opened_thinking = self._opens_thinking(call)
        sampling = agent.sampling.model_dump()
        if attempt.validate:
            sampling |= agent.validation.model_dump(exclude_none=True)
        stop = sampling["stop"] = list(sampling["stop"])
        sampling["max_tokens"] = min(sampling["max_tokens"], self._room(call))
        sampling["seed"] = generation_seed(
            attempt.seed,
            step=attempt.step,
            validate=attempt.validate,
            uid=episode.uid,
            index=episode.index,
            node=call.node,
            turn=call.turn,
            round=call.round,
            generation=call.generations,
        )
        started = time.perf_counter()
        try:
            made = await generate(
                self.endpoint.client,
                f"{episode.uid}-{episode.index}-{agent.name}",
                call.prompt_ids + call.response_ids,
                sampling,
                deadline=deadline,
                limit_s=self.spec.generation_timeout_s,
                where=f"{self.where}, policy {agent.policy}",
                faults=episode.faults,
            )
        finally:
            call.generation_seconds += time.perf_counter() - started
        made, stopped = cut_at_stop(made, self.endpoint.tokenizer, stop)
        _append(call, made.response_ids, made.log_probs, sampled=1)
        call.stop_reason, call.temperature = made.stop_reason, sampling["temperature"]
        # The oldest weights: staleness is counted from them.
        call.weight_version = min(made.weight_version, call.weight_version) if call.generations else made.weight_version
        call.generations += 1
        return made, stopped

    def _opens_thinking(self, call: Call) -> bool:
        """Whether the generation prompt ends with <think>, as templates of reasoning models do."""
        tail = (call.response_ids or call.prompt_ids)[-_TAIL:]
        return self.endpoint.codec.decode(tail, skip_special_tokens=False).rstrip().endswith(OPEN_TAG)

    async def _continuation(self, messages: list[dict]) -> list[int]:
        endpoint = self.endpoint
        return await continue_off_loop(endpoint.codec, endpoint.tokenizer, messages, **self._continuation_options())

    def _continuation_options(self) -> dict[str, Any]:
        return {"end_of_turn": self._end_of_turn, "tools": self._shown_schemas, **self.agent.chat_template_kwargs}

    def _room(self, call: Call) -> int:
        return self.endpoint.max_model_len - len(call.prompt_ids) - len(call.response_ids)


def _append(call: Call, ids: list[int], log_probs: list[float], *, sampled: int) -> None:
    call.response_ids += map(int, ids)
    call.rollout_log_probs += map(float, log_probs)
    call.response_mask += [sampled] * len(ids)
