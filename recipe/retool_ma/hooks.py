"""Agents of ReTool-MA's roles and of its single-agent baselines, and their reward functions.

Invariant: agents are stateless; all they know comes from `context`. Each option of `prompt` (`prompt_options` in
the workflow) and of `parse` (`parse_options`) is a named argument, so an unknown option is an error.

Every `prompt` has these options: `prompt` and `system` replace the built-in texts and may contain the fields listed in
the class docstring; `system: ""` omits the system message. `examples`, a list of `{user: ..., assistant: ...}`, adds
few-shot messages between the system message and the prompt. In a conversation that contains the texts of the roles
before (`memory: shared`), the built-in prompts do not repeat them, and the text of `system` begins the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag import Agent, Call, Context, Episode, Message, Output, UserError
from recipe.dag.reward.outcome import final_answer, outcome_reward, team_reward, written_in
from recipe.retool_ma import prompts
from recipe.retool_ma.plan import parse_plan, plan_json, plan_of
from recipe.retool_ma.scoring import role_rewards
from recipe.retool_ma.snippet import EMPTY_CODE, execution_log, extract_code
from recipe.retool_ma.verdict import parse_verdict

__all__ = ["Executor", "Planner", "Reasoner", "Solver", "Verifier", "outcome_reward", "role_rewards", "team_reward"]


class Planner(Agent):
    """Writes the plan.

    Prompt fields: problem, and from the last turn (empty in the first) planner_plan, planner_reasoning, execution_log
    and feedback.
    """

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
        last_plan = next((call for call in reversed(context.history) if call.node == context.node), None)
        fields = {
            "problem": context.problem,
            **_plan_fields(last_plan),
            "execution_log": _log(context.upstream.get(executor)),
            "feedback": _feedback(context, verifier),
        }
        default = prompts.PLANNER_AGAIN if fields["feedback"] else prompts.PLANNER
        if _remembers(context, last_plan, context.upstream.get(verifier)):
            default = prompts.PLANNER_NEXT
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def parse(self, context: Context) -> Output:
        plan, parsed_ok = parse_plan(written_in(context.call))
        return Output(text=plan_json(plan), parsed={"plan": plan, "parsed_ok": parsed_ok})

    @staticmethod
    def results_metadata(call: Call, episode: Episode) -> dict[str, Any]:
        """Return the plan, under the key of the published code."""
        return {"parsed_plan": call.parsed.get("plan", call.parsed)}


class Executor(Agent):
    """Writes a program and runs it once. Prompt fields: problem, planner_plan, planner_reasoning, feedback."""

    def prompt(
        self,
        context: Context,
        *,
        prompt: str | None = None,
        system: str = prompts.EXECUTOR_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        planner: str = "plan",
        verifier: str = "verify",
    ) -> list[Message]:
        plan = _upstream(context, "planner", planner)
        fields = {"problem": context.problem, **_plan_fields(plan), "feedback": _feedback(context, verifier)}
        default = prompts.EXECUTOR_NEXT if _remembers(context, plan) else prompts.EXECUTOR
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    async def parse(
        self, context: Context, *, tool: str = "code_interpreter", code_timeout: float | None = None
    ) -> Output:
        """Run the model's code for at most `code_timeout` seconds, by default the tool's; a text without code counts as
        a failed run."""
        code = extract_code(written_in(context.call))
        # Empty code is passed on as well: the tool refuses it, which records the call as invalid.
        limit = {} if code_timeout is None else {"timeout": code_timeout}
        result = await context.call_tool(tool, code=code, **limit)
        if code:
            run = {"code": code, "status": result.status, "stdout": result.stdout, "stderr": result.stderr}
        else:
            run = {"code": "", "status": "failed", "stdout": "", "stderr": EMPTY_CODE}
        log = execution_log(**run)
        return Output(text=log, parsed={**run, "log": log})

    @staticmethod
    def results_metadata(call: Call, episode: Episode) -> dict[str, Any]:
        """Return the program and the result of its run, under the keys of the published code."""
        if not call.tool_results:
            return {"code": call.parsed.get("code", ""), "tool_metadata": {}, "tool_response": ""}
        run = call.tool_results[-1]
        return {
            "code": run.arguments.get("code", ""),
            "tool_metadata": {
                "status": "success" if run.ok else "failed",
                "timeout": run.status == "timeout",
                "return_code": run.return_code,
                "stdout": run.stdout,
                "stderr": run.stderr,
            },
            "tool_response": run.text,
        }


class Verifier(Agent):
    """Gives the answer, which ends the episode, or asks for another turn while turns are left.

    Prompt fields: problem, planner_plan, planner_reasoning, execution_log, and feedback (the verifier's, last turn).
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
        plan, run = _upstream(context, "planner", planner), _upstream(context, "executor", executor)
        fields = {
            "problem": context.problem,
            **_plan_fields(plan),
            "execution_log": _log(run),
            "feedback": _feedback(context, context.node),
        }
        if _remembers(context, plan, run):
            default = prompts.VERIFIER_NEXT_MAY_REVISE if _may_revise(context) else prompts.VERIFIER_NEXT
        else:
            default = prompts.VERIFIER_MAY_REVISE if _may_revise(context) else prompts.VERIFIER
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def parse(self, context: Context, *, compat: bool = False) -> Output:
        """Read the verdict. `compat`: if nothing is boxed, the last number is the answer, as in the published code."""
        call, text = context.call, written_in(context.call)
        if call.ended_in_tool_call and not compat:
            text = ""
        complete = call.stop_reason != "length"
        verdict = parse_verdict(text, may_revise=_may_revise(context), complete=complete, compat=compat)
        parsed = {"answer": verdict.answer, "verdict": verdict.kind, "feedback": verdict.feedback}
        return Output(parsed=parsed, done=verdict.kind == "final")

    @staticmethod
    def results_metadata(call: Call, episode: Episode) -> dict[str, Any]:
        """Return the episode's reward, under the key of the published code."""
        return {"reward": None if episode.fault is not None else episode.info.get("final_reward", episode.outcome)}


class _SingleAgent(Agent):
    """Answers alone. Prompt field: problem."""

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
        """Read the answer. `compat`: if nothing is boxed, the last number is the answer, as in the published code.
        `answer_tag`: prefer the content of <answer>...</answer>."""
        return Output(parsed={"answer": final_answer(context.call, compat=compat, tagged=answer_tag)})


class Solver(_SingleAgent):
    """The baseline with a tool: its agent needs `tool_loop: {format: fenced}`. Prompt field: problem."""

    template, instructions = prompts.SOLVER, prompts.SOLVER_SYSTEM


class Reasoner(_SingleAgent):
    """The baseline without a tool. Prompt field: problem."""

    template, instructions = prompts.REASONER, prompts.REASONER_SYSTEM


def _messages(
    context: Context, prompt: str, system: str, fields: dict[str, str], examples: Sequence[Mapping[str, str]]
) -> list[Message]:
    """Return the system message (unless empty), the few-shot examples and the prompt, fields filled in. Where another
    role has spoken before in the same conversation, the prompt begins with the text of the system message."""
    where = f"node '{context.node}': prompt_options"
    system = prompts.render(system, fields, f"{where}.system")
    prompt = prompts.render(prompt, fields, f"{where}.prompt")
    if system and context.continues and context.continued[-1].node != context.node:
        system, prompt = "", f"{system}\n\n{prompt}"
    messages = [{"role": "system", "content": system}] if system else []
    messages += prompts.exchanges(examples, f"{where}.examples")
    return [*messages, {"role": "user", "content": prompt}]


def _remembers(context: Context, *calls: Call | None) -> bool:
    """Return whether the conversation that the prompt is appended to contains all these calls."""
    return all(call is not None and context.remembers(call) for call in calls)


def _upstream(context: Context, role: str, node: str) -> Call:
    """Return the call of `node`. Raises UserError if it has not run."""
    call = context.upstream.get(node)
    if call is None:
        ran = ", ".join(context.upstream) or "none"
        raise UserError(
            f"node '{context.node}': node '{node}' has not run before it; nodes that have: {ran}; "
            f"set prompt_options.{role} to the {role}'s node, and list that node under `after`"
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
    """Return the verifier's feedback from the previous turn; "" in the first turn."""
    call = context.upstream.get(verifier)
    return call.parsed.get("feedback", "") if call is not None and call.turn < context.turn else ""


def _may_revise(context: Context) -> bool:
    return context.turn + 1 < context.max_turns
