"""What a teacher shows a tiny model: chat prompts and answers, in the workflow's own words.

Invariant: every prompt is made by the workflow's hooks from what came before it in the same dialogue, so the warm start
sees exactly what reinforcement learning will.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recipe.dag.episode.context import Context, Message
from recipe.dag.episode.record import Call, ToolResult
from recipe.dag.workflow.graph import ancestors, graph_of
from recipe.dag.workflow.schema import Node, Workflow
from recipe.dag.workflow.user_code import load_object


class Problem(Protocol):
    """`preprocess.arithmetic.Problem` is one."""

    text: str
    answer: int


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a chat prompt and the answer to it. `role`: the node's id."""

    role: str
    messages: tuple[Message, ...]
    answer: str


class Teacher(Protocol):
    """Made with (workflow, seed); raises UserError for a workflow that it does not know."""

    def problems(self, count: int, test_size: int) -> list[Problem]:
        """The first `count` of the training split whose test split has `test_size`."""

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each rollout node that speaks."""


class Dialogue:
    """Plays a teacher's answers through a workflow's rollout nodes, one turn."""

    def __init__(self, workflow: Workflow):
        self._workflow, self._graph = workflow, graph_of(workflow.nodes)
        self._hooks = {
            node.node_id: load_object(node.agent_options.process_path, workflow.path)()
            for node in workflow.rollout_nodes
        }

    async def demonstrate(
        self,
        problem: Problem,
        answers: Sequence[str | Callable[[Sequence[Message]], str] | None],
        call_tool: Callable[..., Awaitable[ToolResult]] | None = None,
    ) -> list[Demonstration]:
        """`answers`: one per rollout node, in their order: a text, a function of the prompt, or None for a node that is
        skipped; `call_tool` stands in for the agents' tools."""
        sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        upstream: dict[str, Call] = {}
        demonstrations = []
        for node, answer in zip(self._workflow.rollout_nodes, answers, strict=True):
            if answer is None:
                continue
            before = ancestors(self._graph, node.node_id)
            context = self._context(node, sample, {n: c for n, c in upstream.items() if n in before}, call_tool)
            hook, options = self._hooks[node.node_id], node.agent_options
            messages = hook.pre_process(None, [], None, context=context, **options.pre_process_kwargs)
            answer = answer if isinstance(answer, str) else answer(messages)
            demonstrations.append(Demonstration(node.node_id, tuple(messages), answer))
            context.call = call = self._call(node, answer)
            output = hook.post_process(None, [], [], context=context, **options.post_process_kwargs)
            output = await output if asyncio.iscoroutine(output) else output
            call.text, call.parsed = output.text if output.text is not None else call.text, output.parsed
            upstream[node.node_id] = call
        return demonstrations

    def _context(self, node: Node, sample: dict[str, Any], upstream: dict[str, Call], call_tool: Any) -> Context:
        return Context(
            sample=sample,
            uid="",
            episode=0,
            turn=0,
            max_turns=self._workflow.episode.max_turns,
            agent=self._workflow.agent_of(node).name,
            node=node.node_id,
            upstream=dict(upstream),
            history=[],
            obs=None,
            validate=False,
            call_tool=call_tool,
            calls=list(upstream.values()),
        )

    def _call(self, node: Node, text: str) -> Call:
        agent = self._workflow.agent_of(node)
        return Call(node.node_id, agent.name, node.agent_group, agent.policy, 0, text=text, stop_reason="stop")
