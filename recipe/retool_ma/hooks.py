"""The agents of the ReTool-MA roles and of its single-agent baselines, and the reward functions that go with them.

Invariant: an agent keeps nothing of an episode; everything it knows comes from `context`. Every option of
`pre_process_kwargs` (of `prompt`) and `post_process_kwargs` (of `parse`) is a named argument here, so another one is an
error.

Shared options of every `prompt`: `prompt` and `system` replace the built-in texts (`system: ""` leaves the system
message out), and may use the fields that the role's class names. `examples`, a list of `{user: ..., assistant: ...}`,
are few-shot examples: messages between the system message and the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipe.dag import Agent, Call, Context, Message, Output, UserError
from recipe.dag.reward.outcome import final_answer, outcome_reward, team_reward, written_in
from recipe.retool_ma import prompts
from recipe.retool_ma.plan import parse_plan, plan_json, plan_of
from recipe.retool_ma.scoring import role_rewards
from recipe.retool_ma.snippet import EMPTY_CODE, execution_log, extract_code
from recipe.retool_ma.verdict import parse_verdict

__all__ = ["Executor", "Planner", "Reasoner", "Solver", "Verifier", "outcome_reward", "role_rewards", "team_reward"]


class Planner(Agent):
    """Fields: problem; in later turns also the last planner_plan, planner_reasoning, execution_log and feedback."""

    def prompt(
        self,
        context: Context,
        *,
        prompt: str | None = None,
        system: str = prompts.PLANNER_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        executor: str = "execute",
        verifier: str = "verify",
    ) -> list[Message]:
        last = next((call for call in reversed(context.history) if call.node == context.node), None)
        fields = {
            "problem": context.problem,
            **_plan_fields(last),
            "execution_log": _log(context.upstream.get(executor)),
            "feedback": _feedback(context, verifier),
        }
        default = prompts.PLANNER_AGAIN if fields["feedback"] else prompts.PLANNER
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def parse(self, context: Context) -> Output:
        plan, parsed_ok = parse_plan(written_in(context.call))
        return Output(text=plan_json(plan), parsed={"plan": plan, "parsed_ok": parsed_ok})


class Executor(Agent):
    """Fields: problem, planner_plan, planner_reasoning, feedback. Runs the code that the model wrote, once."""

    def prompt(
        self,
        context: Context,
        *,
        prompt: str = prompts.EXECUTOR,
        system: str = prompts.EXECUTOR_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        planner: str = "plan",
        verifier: str = "verify",
    ) -> list[Message]:
        fields = {
            "problem": context.problem,
            **_plan_fields(_upstream(context, "planner", planner)),
            "feedback": _feedback(context, verifier),
        }
        return _messages(context, prompt, system, fields, examples)

    async def parse(self, context: Context, *, tool: str = "code_interpreter", code_timeout: float = 20.0) -> Output:
        """`code_timeout`: seconds. An answer without code is a failed run."""
        code = extract_code(written_in(context.call))
        # The tool is called without code too: it refuses, and the refusal is recorded as an invalid call.
        result = await context.call_tool(tool, code=code, timeout=code_timeout)
        if code:
            run = {"code": code, "status": result.status, "stdout": result.stdout, "stderr": result.stderr}
        else:
            run = {"code": "", "status": "failed", "stdout": "", "stderr": EMPTY_CODE}
        log = execution_log(**run)
        return Output(text=log, parsed={**run, "log": log})


class Verifier(Agent):
    """Fields: problem, planner_plan, planner_reasoning, execution_log, feedback (its own of the last turn).

    While turns are left, it may ask for another one; an answer ends the episode.
    """

    def prompt(
        self,
        context: Context,
        *,
        prompt: str | None = None,
        system: str = prompts.VERIFIER_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        planner: str = "plan",
        executor: str = "execute",
    ) -> list[Message]:
        fields = {
            "problem": context.problem,
            **_plan_fields(_upstream(context, "planner", planner)),
            "execution_log": _log(_upstream(context, "executor", executor)),
            "feedback": _feedback(context, context.node),
        }
        default = prompts.VERIFIER_MAY_REVISE if _may_revise(context) else prompts.VERIFIER
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def parse(self, context: Context, *, compat: bool = False) -> Output:
        """`compat`: without a box, take the last number for the answer, as was published."""
        call, text = context.call, written_in(context.call)
        if call.ended_in_tool_call and not compat:
            text = ""
        complete = call.stop_reason != "length"
        verdict = parse_verdict(text, may_revise=_may_revise(context), complete=complete, compat=compat)
        parsed = {"answer": verdict.answer, "verdict": verdict.kind, "feedback": verdict.feedback}
        return Output(parsed=parsed, done=verdict.kind == "final")


class _Alone(Agent):
    """An agent that answers by itself. Field: problem."""

    template: str
    instructions: str

    def prompt(
        self,
        context: Context,
        *,
        prompt: str | None = None,
        system: str | None = None,
        examples: Sequence[Mapping[str, str]] = (),
    ) -> list[Message]:
        template = self.template if prompt is None else prompt
        system = self.instructions if system is None else system
        return _messages(context, template, system, {"problem": context.problem}, examples)

    def parse(self, context: Context, *, compat: bool = False, answer_tag: bool = False) -> Output:
        """`compat`: without a box, take the last number for the answer, as was published. `answer_tag`: prefer what
        stands in <answer>...</answer>."""
        return Output(parsed={"answer": final_answer(context.call, compat=compat, tagged=answer_tag)})


class Solver(_Alone):
    """The single-agent tool baseline; its agent has `tool_loop: {format: fenced}`. Field: problem."""

    template, instructions = prompts.SOLVER, prompts.SOLVER_SYSTEM


class Reasoner(_Alone):
    """The baseline without a tool. Field: problem."""

    template, instructions = prompts.REASONER, prompts.REASONER_SYSTEM


def _messages(
    context: Context, prompt: str, system: str, fields: dict[str, str], examples: Sequence[Mapping[str, str]]
) -> list[Message]:
    where = f"node '{context.node}': pre_process_kwargs"
    messages = [{"role": "system", "content": prompts.render(system, fields, f"{where}.system")}] if system else []
    messages += prompts.exchanges(examples, f"{where}.examples")
    return [*messages, {"role": "user", "content": prompts.render(prompt, fields, f"{where}.prompt")}]


def _upstream(context: Context, role: str, node: str) -> Call:
    call = context.upstream.get(node)
    if call is None:
        ran = ", ".join(context.upstream) or "none"
        raise UserError(
            f"node '{context.node}': node '{node}' has not run before it; nodes that have: {ran}; "
            f"name the {role}'s node in pre_process_kwargs.{role} and make it a dependency"
        )
    return call


def _plan_fields(call: Call | None) -> dict[str, str]:
    if call is None:
        return {"planner_plan": "", "planner_reasoning": ""}
    plan = plan_of(call)
    return {"planner_plan": plan_json(plan), "planner_reasoning": plan["reasoning"]}


def _log(call: Call | None) -> str:
    return "" if call is None else call.parsed.get("log", call.text)


def _feedback(context: Context, verifier: str) -> str:
    """What the verifier asked for in the turn before; "" in the first turn."""
    call = context.upstream.get(verifier)
    return call.parsed.get("feedback", "") if call is not None and call.turn < context.turn else ""


def _may_revise(context: Context) -> bool:
    return context.turn + 1 < context.max_turns
