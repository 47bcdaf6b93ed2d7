"""The hooks of the ReTool-MA roles and of its single-agent baselines, and the reward functions that go with them.

Invariant: a hook is stateless; everything it knows of the episode comes from `context`. Every option of
`pre_process_kwargs` and `post_process_kwargs` is a named argument here, so one that nobody reads is an error.

Shared options of every `pre_process`: `prompt` and `system` replace the built-in texts (`system: ""` leaves the system
message out), and may use the fields that the role's class names. `examples`, a list of `{user: ..., assistant: ...}`,
come before the prompt as an exchange that went before, and show a small model what is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.episode.context import Context, Message, Output, required
from recipe.dag.episode.markup import after_thinking
from recipe.dag.episode.record import Call
from recipe.dag.errors import UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.outcome import final_answer, outcome_reward, team_reward, written_in
from recipe.retool_ma import prompts
from recipe.retool_ma.plan import parse_plan, plan_json, plan_of
from recipe.retool_ma.scoring import role_rewards
from recipe.retool_ma.snippet import EMPTY_CODE, execution_log, extract_code
from recipe.retool_ma.verdict import parse_verdict

__all__ = ["Executor", "Planner", "Reasoner", "Solver", "Verifier", "outcome_reward", "role_rewards", "team_reward"]


class Planner:
    """Fields: problem; in later turns also the last planner_plan, planner_reasoning, execution_log and feedback."""

    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        prompt: str | None = None,
        system: str = prompts.PLANNER_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        executor: str = "execute",
        verifier: str = "verify",
    ) -> list[Message]:
        context = required(context)
        last = next((call for call in reversed(context.history) if call.node == context.node), None)
        fields = {
            "problem": context.problem,
            **_plan_fields(last),
            "execution_log": _log(context.upstream.get(executor)),
            "feedback": _feedback(context, verifier),
        }
        default = prompts.PLANNER_AGAIN if fields["feedback"] else prompts.PLANNER
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def post_process(
        self, tokenizer: Any, prompt_ids: Any, response_ids: list[int], *, context: Context | None = None
    ) -> Output:
        plan, parsed_ok = parse_plan(_answer_text(tokenizer, response_ids, context))
        return Output(text=plan_json(plan), parsed={"plan": plan, "parsed_ok": parsed_ok})


class Executor:
    """Fields: problem, planner_plan, planner_reasoning, feedback. Runs the code that the model wrote, once."""

    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        prompt: str = prompts.EXECUTOR,
        system: str = prompts.EXECUTOR_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        planner: str = "plan",
        verifier: str = "verify",
    ) -> list[Message]:
        context = required(context)
        fields = {
            "problem": context.problem,
            **_plan_fields(_upstream(context, "planner", planner)),
            "feedback": _feedback(context, verifier),
        }
        return _messages(context, prompt, system, fields, examples)

    async def post_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        response_ids: list[int],
        *,
        context: Context | None = None,
        tool: str = "code_interpreter",
        code_timeout: float = 20.0,
    ) -> Output:
        """`code_timeout`: seconds. An answer without code is a failed run."""
        context = required(context)
        code = extract_code(_answer_text(tokenizer, response_ids, context))
        # The tool is called without code too: it refuses, and the refusal is recorded as an invalid call.
        result = await context.call_tool(tool, code=code, timeout=code_timeout)
        if code:
            run = {"code": code, "status": result.status, "stdout": result.stdout, "stderr": result.stderr}
        else:
            run = {"code": "", "status": "failed", "stdout": "", "stderr": EMPTY_CODE}
        log = execution_log(**run)
        return Output(text=log, parsed={**run, "log": log})


class Verifier:
    """Fields: problem, planner_plan, planner_reasoning, execution_log, feedback (its own of the last turn).

    While turns are left, it may ask for another one; an answer ends the episode.
    """

    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        prompt: str | None = None,
        system: str = prompts.VERIFIER_SYSTEM,
        examples: Sequence[Mapping[str, str]] = (),
        planner: str = "plan",
        executor: str = "execute",
    ) -> list[Message]:
        context = required(context)
        fields = {
            "problem": context.problem,
            **_plan_fields(_upstream(context, "planner", planner)),
            "execution_log": _log(_upstream(context, "executor", executor)),
            "feedback": _feedback(context, context.node),
        }
        default = prompts.VERIFIER_MAY_REVISE if _may_revise(context) else prompts.VERIFIER
        return _messages(context, default if prompt is None else prompt, system, fields, examples)

    def post_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        response_ids: list[int],
        *,
        context: Context | None = None,
        compat: bool = False,
    ) -> Output:
        """`compat`: without a box, take the last number for the answer, as was published."""
        context = required(context)
        call, text = context.call, _answer_text(tokenizer, response_ids, context)
        if call is not None and call.ended_in_tool_call and not compat:
            text = ""
        complete = call is None or call.stop_reason != "length"
        verdict = parse_verdict(text, may_revise=_may_revise(context), complete=complete, compat=compat)
        parsed = {"answer": verdict.answer, "verdict": verdict.kind, "feedback": verdict.feedback}
        return Output(parsed=parsed, done=verdict.kind == "final")


class _Alone:
    """An agent that answers by itself. Field: problem."""

    prompt: str
    system: str

    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        prompt: str | None = None,
        system: str | None = None,
        examples: Sequence[Mapping[str, str]] = (),
    ) -> list[Message]:
        context = required(context)
        template, system = self.prompt if prompt is None else prompt, self.system if system is None else system
        return _messages(context, template, system, {"problem": context.problem}, examples)

    def post_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        response_ids: list[int],
        *,
        context: Context | None = None,
        compat: bool = False,
        answer_tag: bool = False,
    ) -> Output:
        """`compat`: without a box, take the last number for the answer, as was published. `answer_tag`: prefer what
        stands in <answer>...</answer>."""
        if context is not None and context.call is not None:
            answer = final_answer(context.call, compat=compat, tagged=answer_tag)
        else:
            text = _answer_text(tokenizer, response_ids, context)
            answer = extract_answer(text, strict=not compat, tagged=answer_tag)
        return Output(parsed={"answer": answer})


class Solver(_Alone):
    """The single-agent tool baseline; its agent has `tool_loop: {format: fenced}`. Field: problem."""

    prompt, system = prompts.SOLVER, prompts.SOLVER_SYSTEM


class Reasoner(_Alone):
    """The baseline without a tool. Field: problem."""

    prompt, system = prompts.REASONER, prompts.REASONER_SYSTEM


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


def _answer_text(tokenizer: Any, response_ids: list[int], context: Context | None) -> str:
    """Return the model's text without its thoughts."""
    if context is not None and context.call is not None:
        return written_in(context.call)
    return after_thinking(tokenizer.decode(response_ids, skip_special_tokens=True))
