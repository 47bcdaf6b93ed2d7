"""What a teacher shows a tiny model: chat prompts and answers, in the workflow's own words.

Invariant: every prompt is made by the workflow's hooks from what came before it in the same dialogue, so the warm start
sees exactly what reinforcement learning will.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recipe.dag.episode.context import Context, Message
from recipe.dag.episode.graph import episode_graph
from recipe.dag.episode.hooks import load_hooks
from recipe.dag.episode.record import Call, ToolResult
from recipe.dag.episode.view import Memory, Turn, View, reader_of, remember, view
from recipe.dag.workflow.schema import Node, Workflow


class Problem(Protocol):
    """`preprocess.arithmetic.Problem` is one."""

    text: str
    answer: int


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a chat prompt and the answer to it. `role`: the node's id; `turn` counts from 0."""

    role: str
    messages: tuple[Message, ...]
    answer: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """What a teacher says in one turn. `answers`: one per rollout node, in their order: a text, a function of the
    prompt, or None for a node that is skipped; `call_tool` stands in for the agents' tools."""

    answers: Sequence[str | Callable[[Sequence[Message]], str] | None]
    call_tool: Callable[..., Awaitable[ToolResult]] | None = None


class Teacher(Protocol):
    """Made with (workflow, seed); raises UserError for a workflow that it does not know."""

    def problems(self, count: int, test_size: int) -> list[Problem]:
        """The first `count` of the training split whose test split has `test_size`."""

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each rollout node that speaks."""


class Dialogue:
    """Plays a teacher's answers through a workflow's rollout nodes, turn by turn."""

    def __init__(self, workflow: Workflow):
        self._workflow, self._graph = workflow, episode_graph(workflow)
        self._hooks = {node.node_id: load_hooks(node, workflow) for node in workflow.rollout_nodes}

    async def demonstrate(self, problem: Problem, *turns: Script) -> list[Demonstration]:
        """One demonstration for each node that speaks, in the order in which they do. Raises ValueError for a turn that
        an episode would not have: a node has ended it before, or the workflow has no more."""
        sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        demonstrations: list[Demonstration] = []
        memory, earlier = Memory(), []
        for number, script in enumerate(turns):
            turn = Turn(number)
            for node, answer in zip(self._workflow.rollout_nodes, script.answers, strict=True):
                if answer is None:
                    continue
                seen = view(self._graph, reader_of(self._graph.by_id[node.node_id], 0), turn, memory)
                context = self._context(node, sample, number, seen, earlier, script.call_tool)
                hooks = self._hooks[node.node_id]
                messages = await hooks.pre_process(None, [], context)
                answer = answer if isinstance(answer, str) else answer(messages)
                demonstrations.append(Demonstration(node.node_id, tuple(messages), answer, number))
                context.call = call = self._call(node, answer, number)
                output = (await hooks.post_process(None, [], [], context)).output
                call.text, call.parsed = output.text if output.text is not None else call.text, output.parsed
                turn.said[node.node_id, 0] = call
                if output.done:
                    turn.done.add((node.node_id, 0))
            memory, earlier = remember(self._graph, turn, memory), [*earlier, *turn.said.values()]
            ended = bool(turn.done) or number + 1 == self._workflow.episode.max_turns
            if ended and number + 1 < len(turns):
                raise ValueError(f"the episode ends after turn {number}, and the teacher speaks in {len(turns)} turns")
        return demonstrations

    def _context(
        self, node: Node, sample: dict[str, Any], turn: int, seen: View, earlier: Sequence[Call], call_tool: Any
    ) -> Context:
        agent, calls = self._workflow.agent_of(node).name, [*earlier, *seen.moves]
        return Context(
            sample=sample,
            uid="",
            episode=0,
            turn=turn,
            max_turns=self._workflow.episode.max_turns,
            agent=agent,
            node=node.node_id,
            upstream=dict(seen.said),
            history=[call for call in calls if call.agent == agent],
            obs=None,
            validate=False,
            call_tool=call_tool,
            calls=calls,
        )

    def _call(self, node: Node, text: str, turn: int) -> Call:
        agent = self._workflow.agent_of(node)
        return Call(node.node_id, agent.name, node.agent_group, agent.policy, turn, text=text, stop_reason="stop")
