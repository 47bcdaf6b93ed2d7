"""Plays a teacher's answers through a workflow, which yields the prompts and answers that a tiny model learns first.

Invariant: every prompt is built by the workflow's agents from the earlier calls of the same dialogue, so the warm start
sees exactly the prompts that reinforcement learning will.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from recipe.dag.episode.graph import episode_graph
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.view import Turn, TurnState, View, carry_over, node_reader, view
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
    """One training example: a chat prompt and its answer. `role`: the node's id; `turn` counts from 0."""

    role: str
    messages: tuple[Message, ...]
    answer: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """A teacher's answers in one turn.

    `answers` has one entry per rollout node, in the workflow's order: a text, a function of the prompt, or None for a
    node that is skipped. `call_tool` replaces the agents' tools.
    """

    answers: Sequence[str | Callable[[Sequence[Message]], str] | None]
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

    async def demonstrate(self, problem: Problem, *turns: Script) -> list[Demonstration]:
        """Return one demonstration for each node that answers, in that order.

        Raises ValueError for a turn that the episode would not reach: a node ended it, or `max_turns` is smaller.
        """
        sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        demonstrations: list[Demonstration] = []
        memory = TurnState()
        earlier_calls: list[Call] = []
        for number, script in enumerate(turns):
            turn = Turn(number)
            calls: list[Call] = []
            names = [node.node_id for node in self._workflow.rollout_nodes]
            if len(script.answers) != len(names):
                wanted = f"give one per rollout node ({', '.join(names)}), None for one that is skipped"
                hint = "a tool loop is not played: make its further generations Demonstrations of another `role`"
                raise UserError(f"teacher: turn {number} has {len(script.answers)} answers; {wanted}; {hint}")
            for node, answer in zip(self._workflow.rollout_nodes, script.answers, strict=True):
                if answer is None:
                    continue
                visible = view(self._graph, node_reader(self._graph.by_id[node.node_id], 0), turn, memory)
                context = self._context(node, sample, number, visible, earlier_calls, script.call_tool)
                demonstration, call = await self._answer(node, answer, context, turn)
                demonstrations.append(demonstration)
                calls.append(call)
            memory = carry_over(self._graph, turn, memory)
            earlier_calls = [*earlier_calls, *calls]
            ended = bool(turn.done) or number + 1 == self._workflow.episode.max_turns
            if ended and number + 1 < len(turns):
                raise ValueError(f"the episode ends after turn {number}, and the teacher speaks in {len(turns)} turns")
        return demonstrations

    async def _answer(
        self, node: Node, answer: str | Callable[[Sequence[Message]], str], context: Context, turn: Turn
    ) -> tuple[Demonstration, Call]:
        """Build the node's prompt, answer it, and record the call in `turn`."""
        hooks = self._hooks[node.node_id]
        # cast: a prompt of token ids would need the tokenizer, which is built from these messages
        messages = cast(list[Message], await hooks.pre_process(None, [], context))
        text = answer if isinstance(answer, str) else answer(messages)
        context.call = call = self._call(node, text, context.turn)
        output = (await hooks.post_process(None, [], [], context)).output
        call.text, call.parsed = text if output.text is None else output.text, output.parsed
        turn.outputs[node.node_id, 0] = call
        if output.done:
            turn.done.add((node.node_id, 0))
        return Demonstration(node.node_id, tuple(messages), text, context.turn), call

    def _context(
        self, node: Node, sample: dict[str, Any], turn: int, visible: View, earlier: Sequence[Call], call_tool: Any
    ) -> Context:
        agent, calls = self._workflow.agent_of(node).name, [*earlier, *visible.calls]
        return Context(
            sample=sample,
            uid="",
            episode=0,
            turn=turn,
            max_turns=self._workflow.episode.max_turns,
            agent=agent,
            node=node.node_id,
            upstream={node_id: call for node_id, call in visible.outputs.items() if isinstance(call, Call)},
            history=[call for call in calls if call.agent == agent],
            obs=None,
            validate=False,
            call_tool=call_tool,
            calls=calls,
        )

    def _call(self, node: Node, text: str, turn: int) -> Call:
        agent = self._workflow.agent_of(node)
        return Call(node.node_id, agent.name, node.agent_group, agent.policy, turn, text=text, stop_reason="stop")
