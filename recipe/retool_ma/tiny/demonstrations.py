"""Dialogues of a careless teacher, in the workflow's own words.

Invariant: every prompt is made by the workflow's hooks from what came before it in the same dialogue, so the warm start
sees exactly what reinforcement learning will. The teacher keeps the format and gets the content wrong at fixed rates:
what it gets right by chance is what reinforcement learning must find.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from preprocess.arithmetic import Problem
from recipe.dag.episode.context import Context, Message
from recipe.dag.episode.record import Call, ToolResult
from recipe.dag.workflow.schema import Node, Workflow
from recipe.dag.workflow.user_code import load_object

WRONG_PLAN, BROKEN_CODE, WRONG_ANSWER = 0.47, 0.04, 0.04
"""How often the planner picks another formula, the executor forgets a bracket, the verifier misreads the output."""

FORMULAS = {
    2: ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} // {1}", "{0} % {1}", "({0} + {1}) // 2"),
    3: ("{0} + {1} - {2}", "{0} * {1} + {2}", "{0} * {1} - {2}", "({0} - {2}) * {1}", "{0} + {1} + {2}"),
}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One training example: a chat prompt and the answer to it."""

    role: str
    messages: tuple[Message, ...]
    answer: str


class Teacher:
    """Walks problems through a planner -> executor -> verifier workflow."""

    def __init__(self, workflow: Workflow, seed: int):
        self.rng = random.Random(seed)
        self.workflow = workflow
        self.hooks = {
            node.node_id: load_object(node.agent_options.process_path, workflow.path)()
            for node in workflow.rollout_nodes
        }

    def teach(self, problem: Problem) -> list[Demonstration]:
        """One demonstration for each rollout node, each made from the ones before it."""
        return asyncio.run(self._teach(problem))

    async def _teach(self, problem: Problem) -> list[Demonstration]:
        plan_node, execute_node, verify_node = self.workflow.rollout_nodes
        sample = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        upstream: dict[str, Call] = {}
        formula = self._formula(problem).replace(" ", "")  # each token less is a forward less
        broken = self.rng.random() < BROKEN_CODE
        stdout = str(eval(formula))  # a formula of ours, never a model's
        answers = {
            plan_node.node_id: f'{{"reasoning": "", "code_plan": "print({formula})", "expected_output": ""}}',
            execute_node.node_id: f"```python\nprint({formula}{'' if broken else ')'}\n```",
            verify_node.node_id: f"FINAL ANSWER: \\boxed{{{self._reading(problem, '' if broken else stdout)}}}",
        }
        run = _run(broken, stdout)
        demonstrations = []
        for node in (plan_node, execute_node, verify_node):
            context = _context(self.workflow, node, sample, upstream, run)
            hook, options = self.hooks[node.node_id], node.agent_options
            messages = hook.pre_process(None, [], None, context=context, **options.pre_process_kwargs)
            demonstrations.append(Demonstration(node.node_id, tuple(messages), answers[node.node_id]))
            context.call = call = _call(self.workflow, node, answers[node.node_id])
            output = hook.post_process(None, [], [], context=context, **options.post_process_kwargs)
            output = await output if asyncio.iscoroutine(output) else output
            call.text, call.parsed = output.text if output.text is not None else call.text, output.parsed
            upstream[node.node_id] = call
        return demonstrations

    def _formula(self, problem: Problem) -> str:
        if self.rng.random() >= WRONG_PLAN:
            return problem.expression
        others = [f.format(*problem.operands) for f in FORMULAS[len(problem.operands)]]
        return self.rng.choice([formula for formula in others if formula != problem.expression])

    def _reading(self, problem: Problem, stdout: str) -> str:
        if stdout and self.rng.random() >= WRONG_ANSWER:
            return stdout
        return str(self.rng.choice(problem.operands))


def _run(broken: bool, stdout: str):
    async def call_tool(name: str, **arguments: Any) -> ToolResult:
        if broken:
            error = "SyntaxError: '(' was never closed"
            return ToolResult(name, arguments, "failed", error, stderr=error, return_code=1)
        return ToolResult(name, arguments, "success", stdout + "\n", stdout=stdout + "\n", return_code=0)

    return call_tool


def _context(workflow: Workflow, node: Node, sample: dict, upstream: dict[str, Call], call_tool) -> Context:
    return Context(
        sample=sample,
        uid="",
        episode=0,
        turn=0,
        max_turns=workflow.episode.max_turns,
        agent=workflow.agent_of(node).name,
        node=node.node_id,
        upstream=dict(upstream),
        history=[],
        obs=None,
        validate=False,
        call_tool=call_tool,
    )


def _call(workflow: Workflow, node: Node, text: str) -> Call:
    agent = workflow.agent_of(node)
    return Call(node.node_id, agent.name, node.agent_group, agent.policy, 0, text=text, stop_reason="stop")
