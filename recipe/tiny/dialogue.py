"""Plays a teacher's answers through a workflow, which yields the prompts and answers that a tiny model learns first.

Invariant: every prompt is built by the workflow's agents from the earlier calls of the same dialogue, so the warm start
sees exactly the prompts that reinforcement learning will.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, Protocol, cast

from recipe.dag.episode.graph import Slot, episode_graph
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.view import (
    Turn,
    TurnState,
    View,
    carry_over,
    node_reader,
    shows,
    view,
    without_private,
)
from recipe.dag.errors import UserError
from recipe.dag.types.context import Context, Message
from recipe.dag.types.record import Call, ToolResult
from recipe.dag.workflow.schema import Node, Workflow


class Problem(Protocol):
    """A question with a whole number as its answer, such as `preprocess.arithmetic.Problem`."""

    @property
    def text(self) -> str: ...

    @property
    def answer(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a chat prompt and its answer. `role`: the node's id; `turn` and `round` count from 0."""

    role: str
    messages: tuple[Message, ...]
    answer: str
    turn: int = 0
    round: int = 0


Answer = str | Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class Script:
    """A teacher's answers in one turn.

    `answers` has one entry per rollout node, in the workflow's order: a text, a function of the prompt, None for a node
    that is skipped, or for a node in a loop a list with one of these per round. `call_tool` replaces the agents' tools.
    """

    answers: Sequence[Answer | None | Sequence[Answer | None]]
    call_tool: Callable[..., Awaitable[ToolResult]] | None = None


class Teacher(Protocol):
    """Constructed with (workflow, seed); raises UserError for a workflow that it cannot demonstrate.

    An optional attribute `segments` lists texts that are to be one token each although no demonstration contains them.
    """

    def problems(self, count: int, test_size: int) -> Sequence[Any]:
        """Return the first `count` problems of the training split that belongs to a test split of `test_size`."""
        ...

    def teach(self, problem: Any) -> list[Demonstration]:
        """Return one demonstration for each rollout node that answers, for one of `problems`."""
        ...


class Dialogue:
    """Plays a teacher's answers through a workflow's rollout nodes, turn by turn."""

    def __init__(self, workflow: Workflow):
        self._workflow, self._graph = workflow, episode_graph(workflow)
        self._hooks = {node.node_id: load_hooks(node, workflow) for node in workflow.rollout_nodes}
        self._private = frozenset(name for name, hooks in self._hooks.items() if hooks.private)

    async def demonstrate(self, problem: Problem, *turns: Script) -> list[Demonstration]:
        """Return one demonstration for each answer, in causal order: loops round by round.

        Raises ValueError for a turn that the episode would not reach: a node ended it, or `max_turns` is smaller.
        """
        sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        demonstrations: list[Demonstration] = []
        conversations: dict[str, tuple[Message, ...]] = {}
        memory = TurnState()
        earlier_calls: list[Call] = []
        for number, script in enumerate(turns):
            turn = Turn(number)
            calls: list[Call] = []
            for slot, answer in self._slots(script, number):
                node = self._graph.by_id[slot[0]]
                visible = view(self._graph, node_reader(node, slot[1]), turn, memory)
                visible = without_private(visible, node, self._private)
                earlier = [call for call in earlier_calls if shows(node, call, self._private)]
                context = self._context(slot, sample, number, visible, earlier, script.call_tool)
                demonstration, call = await self._answer(slot, answer, context, turn, conversations)
                demonstrations.append(demonstration)
                calls.append(call)
            memory = carry_over(self._graph, turn, memory)
            earlier_calls = [*earlier_calls, *calls]
            ended = bool(turn.done) or number + 1 == self._workflow.episode.max_turns
            if ended and number + 1 < len(turns):
                raise ValueError(f"the episode ends after turn {number}, and the teacher speaks in {len(turns)} turns")
        return demonstrations

    def _slots(self, script: Script, turn: int) -> list[tuple[Slot, Answer]]:
        """Return the script's answers with their nodes and rounds, in causal order. Raises UserError."""
        names = [node.node_id for node in self._workflow.rollout_nodes]
        if len(script.answers) != len(names):
            wanted = f"give one per rollout node ({', '.join(names)}), None for one that is skipped"
            hint = "a tool loop is not played: make its further generations Demonstrations of another `role`"
            raise UserError(f"teacher: turn {turn} has {len(script.answers)} answers; {wanted}; {hint}")
        slots: list[tuple[Slot, Answer]] = []
        for name, entry in zip(names, script.answers, strict=True):
            rounds = [entry] if entry is None or isinstance(entry, str) or callable(entry) else entry
            most = self._rounds(name)
            if len(rounds) > most:
                raise UserError(
                    f"teacher: turn {turn} has {len(rounds)} answers of node '{name}', which has {most} round(s)"
                )
            slots += [((name, index), answer) for index, answer in enumerate(rounds) if answer is not None]
        return sorted(slots, key=lambda entry: self._graph.causal(entry[0]))

    def _rounds(self, name: str) -> int:
        loop = self._graph.by_id[name].loop
        return 1 if loop is None else self._graph.loops[loop].max_rounds

    async def _answer(
        self, slot: Slot, answer: Answer, context: Context, turn: Turn, conversations: dict[str, tuple[Message, ...]]
    ) -> tuple[Demonstration, Call]:
        """Build the node's prompt, answer it, and record the call in `turn`. With `memory: chat`, the prompt continues
        the node's conversation, which `conversations` keeps."""
        node = self._graph.by_id[slot[0]].spec
        remembers = self._workflow.agent_of(node).memory == "chat"
        hooks = self._hooks[node.node_id]
        before = conversations.get(node.node_id, ()) if remembers else ()
        context.continues = bool(before)
        # cast: a prompt of token ids would need the tokenizer, which is built from these messages
        messages = cast(list[Message], await hooks.pre_process(None, [], context))
        if before:  # as the engine does, see episode/conversation.py
            messages = list(dropwhile(lambda message: message["role"] == "system", messages))
        prompt = (*before, *messages)
        text = answer if isinstance(answer, str) else answer(list(prompt))
        conversations[node.node_id] = (*prompt, {"role": "assistant", "content": text})
        context.call = call = self._call(node, prompt, text, context.turn, slot[1])
        context.call_tool = _recording(context.call_tool, call)
        output = (await hooks.post_process(None, [], [], context)).output
        call.text, call.parsed = text if output.text is None else output.text, output.parsed
        turn.outputs[slot] = call
        if output.done:
            turn.done.add(slot)
        return Demonstration(node.node_id, prompt, text, context.turn, slot[1]), call

    def _context(
        self,
        slot: Slot,
        sample: dict[str, Any],
        turn: int,
        visible: View,
        earlier: Sequence[Call],
        call_tool: Callable[..., Awaitable[ToolResult]] | None,
    ) -> Context:
        agent, calls = self._graph.by_id[slot[0]].agent_name, [*earlier, *visible.calls]
        return Context(
            sample=sample,
            uid="",
            episode=0,
            turn=turn,
            max_turns=self._workflow.episode.max_turns,
            agent=agent,
            node=slot[0],
            upstream={node_id: call for node_id, call in visible.outputs.items() if isinstance(call, Call)},
            history=[call for call in calls if call.agent == agent],
            obs=None,
            validate=False,
            call_tool=cast(Callable[..., Awaitable[ToolResult]], call_tool),
            calls=calls,
            round=slot[1],
            max_rounds=self._rounds(slot[0]),
        )

    def _call(self, node: Node, prompt: Sequence[Message], text: str, turn: int, round_index: int) -> Call:
        agent = self._workflow.agent_of(node)
        return Call(
            *(node.node_id, agent.name, node.agent_group, agent.policy, turn),
            prompt_text="".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt),
            text=text,
            stop_reason="stop",
            generations=1,
            round=round_index,
            hand_over=agent.hand_over,
        )


def _recording(call_tool: Callable[..., Awaitable[ToolResult]], call: Call) -> Callable[..., Awaitable[ToolResult]]:
    """Return the tool with its results kept in the call, as the engine keeps them."""

    async def recorded(name: str, **arguments: Any) -> ToolResult:
        call.tool_results.append(await call_tool(name, **arguments))
        return call.tool_results[-1]

    return recorded
