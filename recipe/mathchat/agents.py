"""MathChat's agents: a problem solver, a code agent that acts in rounds, and a verifier.

Invariant: agents keep nothing of an episode. A program or an answer is only what the model wrote outside of its
thoughts, and a generation that a limit cut off runs no program. The code agent's calls are one conversation
(`memory: chat`), so each of them is trained with all that it had read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from recipe.dag import Agent, Call, Context, Message, Output, UserError
from recipe.dag.reward.outcome import final_answer, written_in
from recipe.dag.types.markup import TOOL_CALL, python_blocks
from recipe.dag.types.record import ToolResult
from recipe.mathchat import prompts

if TYPE_CHECKING:
    from recipe.dag.workflow.node import Node
    from recipe.dag.workflow.schema import Workflow

BETWEEN = "\n------\n"
"""Separates the outputs of several programs of one action."""


class Member(Agent):
    """An agent of the team. Its system message states how many tokens it may write: the option `token_limit`, by
    default the `max_tokens` of its agent."""

    _max_tokens = 0

    def prepare(self, workflow: Workflow, node: Node) -> None:
        self._max_tokens = workflow.agent_of(node).sampling.max_tokens

    def _messages(self, system: str, token_limit: int | None, *parts: str) -> list[Message]:
        messages: list[Message] = []
        if system:
            limit = self._max_tokens if token_limit is None else token_limit
            messages.append({"role": "system", "content": system.replace("{tokens}", str(limit))})
        return [*messages, {"role": "user", "content": _joined(*parts)}]


class Solver(Member):
    """Reasons about the problem, without a tool."""

    def prompt(
        self, context: Context, *, token_limit: int | None = None, system: str = prompts.SOLVER_SYSTEM
    ) -> list[Message]:
        return self._messages(system, token_limit, _problem(context), prompts.SOLVER_TASK)


class Coder(Member):
    """Writes programs, reads what they print, and states the result. Its node is in a loop; its agent needs
    `memory: chat` and the tool.

    Sets `parsed`: `over` (the call has no program, so the agent is done) and `output` (what its programs printed).
    """

    def prompt(
        self,
        context: Context,
        *,
        token_limit: int | None = None,
        system: str = prompts.CODER_SYSTEM,
        solver: str = "solve",
    ) -> list[Message]:
        """`solver`: the node whose output it reads."""
        if context.continues and context.round:
            return [{"role": "user", "content": _joined(self._result(context), *_feedback(context))}]
        solution = prompts.section(prompts.SOLUTION, _handed(context, solver))
        return self._messages(system, token_limit, _problem(context), solution, *_feedback(context), prompts.CODER_TASK)

    def _result(self, context: Context) -> str:
        output = context.history[-1].parsed.get("output", "")
        last = context.round + 1 == context.max_rounds
        return f"<tool_response>\n{output}\n</tool_response>\n{prompts.LAST if last else prompts.MORE}"

    async def parse(
        self,
        context: Context,
        *,
        tool: str = "code_interpreter",
        code_timeout: float | None = None,
        max_programs: int = 4,
        max_output_chars: int = 2000,
    ) -> Output:
        """Run the programs of this call one after the other, each in a fresh process of at most `code_timeout` seconds,
        by default the tool's. Of the joined outputs, the first `max_output_chars` are kept."""
        call = context.call
        codes = [] if call.stop_reason == "length" else programs(written_in(call))
        limit = {} if code_timeout is None else {"timeout": code_timeout}
        results = [await context.call_tool(tool, code=code, **limit) for code in codes[:max_programs]]
        output = BETWEEN.join(_shown(result) for result in results)[:max_output_chars]
        return Output(parsed={"over": not results, "output": output})


class Verifier(Member):
    """Gives the answer. Sets `parsed["answer"]`: the content of the last box outside of thoughts; None without one."""

    def prompt(
        self,
        context: Context,
        *,
        token_limit: int | None = None,
        system: str = prompts.VERIFIER_SYSTEM,
        solver: str | None = "solve",
        coder: str = "code",
    ) -> list[Message]:
        """`solver`: the node whose output it reads besides the code agent's; null: the code agent's only, as
        published."""
        sections = [] if solver is None else [prompts.section(prompts.SOLUTION, _handed(context, solver))]
        sections.append(prompts.section(prompts.CODE, _handed(context, coder)))
        output = _last_output(context, coder)
        sections += [] if output is None else [prompts.section(prompts.OUTPUT, output)]
        sections += _feedback(context)
        return self._messages(system, token_limit, _problem(context), *sections, prompts.VERIFIER_TASK)

    def parse(self, context: Context) -> Output:
        return Output(parsed={"answer": final_answer(context.call)})


def programs(text: str) -> list[str]:
    """Return the programs in a text without thoughts: those of its <tool_call>s if it has any, else its fenced Python
    blocks. A call that cannot be read is an empty program, which the tool refuses in its answer to the model."""
    blocks = TOOL_CALL.findall(text)
    return [_code_of(block) for block in blocks] if blocks else python_blocks(text)


def _code_of(block: str) -> str:
    try:
        arguments = json.loads(block)["arguments"]
        code = (json.loads(arguments) if isinstance(arguments, str) else arguments)["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return code if isinstance(code, str) else ""


def _shown(result: ToolResult) -> str:
    if result.status == "invalid":
        return "[unreadable tool call or empty program]"
    return result.text.strip("\n")


def _joined(*parts: str) -> str:
    return "\n\n".join(parts)


def _problem(context: Context) -> str:
    return prompts.section(prompts.PROBLEM, context.problem)


def _handed(context: Context, node: str) -> str:
    return _call_of(context, node).handed.strip()


def _call_of(context: Context, node: str) -> Call:
    call = context.upstream.get(node)
    if call is None:
        ran = ", ".join(context.upstream) or "none"
        where = f"node '{context.node}'"
        raise UserError(f"{where}: node '{node}' has not run before it; nodes that have: {ran}; list it under `after`")
    return call


def _last_output(context: Context, node: str) -> str | None:
    """Return what the last programs of `node` printed in this turn, be it nothing; None if it ran none."""
    for call in reversed(context.calls):
        if call.node == node and call.turn == context.turn and call.parsed.get("over") is False:
            return call.parsed["output"]
    return None


def _feedback(context: Context) -> list[str]:
    """Return a section for each verdict that the node may read and has not read yet. The engine shows a coach's verdict
    only to nodes that name the coach under `after`, or with the coach's option `feedback`."""
    own = [position for position, call in enumerate(context.calls) if call.node == context.node]
    fresh = context.calls[own[-1] + 1 if own else 0 :]
    return [prompts.section(prompts.FEEDBACK, call.parsed["reasoning"]) for call in fresh if _is_verdict(call)]


def _is_verdict(call: Call) -> bool:
    return "process" in call.parsed and bool(call.parsed.get("reasoning"))
