"""The hook classes with a context of their own: what each role is shown, and what is made of its answer."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.types.context import Context, Output
from recipe.dag.types.record import Call, ToolResult
from recipe.retool_ma.hooks import Executor, Planner, Reasoner, Solver, Verifier
from tests.contexts import context_of

PROBLEM = r"Find $x_{max}$ in $\{a\}$, {feedback} and \boxed{planner_plan}."
PLAN = {"reasoning": "why", "code_plan": "count \\pi", "expected_output": "42"}
RUN = {"code": "print(42)", "status": "success", "stdout": "42\n", "stderr": "", "log": "THE LOG"}


class Tool:
    """Answers every call with `result` and keeps the arguments."""

    def __init__(self, **result):
        self.result = {"status": "success", "text": "", **result}
        self.calls: list[tuple[str, dict]] = []

    async def __call__(self, name: str, **arguments) -> ToolResult:
        self.calls.append((name, arguments))
        return ToolResult(name=name, arguments=arguments, **self.result)


def call(node: str, text: str = "", turn: int = 0, **parsed) -> Call:
    return Call(node=node, agent=node, agent_group=0, policy="main", turn=turn, text=text, parsed=parsed)


def context(node: str, *upstream: Call, text: str = "", turn: int = 0, max_turns: int = 1, tool=None) -> Context:
    own = {"turn": turn, "max_turns": max_turns, "call_tool": tool or Tool(), "call": call(node, text, turn)}
    return context_of(node, PROBLEM, *upstream, **own)


def after(view: Context, *calls: Call) -> Context:
    """The context of a call that continues these calls."""
    view.continued = calls
    return view


def prompt(hook, view: Context, **options) -> str:
    messages = hook.prompt(view, **options)
    assert [message["role"] for message in messages] == ["system", "user"]
    return messages[1]["content"]


def answer(hook, view: Context, **options) -> Output:
    result = hook.parse(view, **options)
    return asyncio.run(result) if inspect.isawaitable(result) else result


def test_every_role_sees_the_problem_as_it_is():
    before = (call("plan", plan=PLAN), call("execute", **RUN))
    for hook, node in ((Planner, "plan"), (Executor, "execute"), (Verifier, "verify"), (Solver, "s"), (Reasoner, "r")):
        upstream = before if node in ("execute", "verify") else ()
        assert PROBLEM in prompt(hook(), context(node, *upstream))


def test_the_prompt_and_the_system_message_can_be_replaced():
    view = context("execute", call("plan", plan=PLAN))
    own = prompt(Executor(), view, prompt="{problem}|{planner_reasoning}|{planner_plan}|{feedback}|\\boxed{value}")
    assert own == PROBLEM + "|why|" + json.dumps(PLAN) + "||\\boxed{value}"
    messages = Executor().prompt(view, system="As for {planner_reasoning}:")
    assert messages[0] == {"role": "system", "content": "As for why:"}
    messages = Executor().prompt(view, system="", prompt="x")
    assert messages == [{"role": "user", "content": "x"}]
    assert Solver().prompt(view, system="", prompt="") == [{"role": "user", "content": ""}]


def test_in_one_conversation_a_role_says_its_instruction_and_what_is_new():
    plan, run, review = call("plan", plan=PLAN), call("execute", **RUN), call("verify", "REVISE: x", feedback="x")
    (said,) = Executor().prompt(after(context("execute", plan), plan))
    assert said["role"] == "user" and said["content"].startswith(
        "You turn plans into correct Python programs.\n\nWrite"
    )
    assert PROBLEM not in said["content"] and json.dumps(PLAN) not in said["content"]
    for turns, asks in ((1, False), (2, True)):
        (said,) = Verifier().prompt(after(context("verify", plan, run, max_turns=turns), plan, run))
        assert said["content"].startswith("You check the work of others") and "THE LOG" in said["content"]
        assert PROBLEM not in said["content"] and json.dumps(PLAN) not in said["content"]
        assert ("REVISE" in said["content"]) == asks and r"FINAL ANSWER: \boxed{value}" in said["content"]
    (said,) = Planner().prompt(after(context("plan", plan, run, review, turn=1, max_turns=2), plan, run, review))
    assert said["content"].startswith("You plan how to solve") and "Plan again" in said["content"]
    assert not any(text in said["content"] for text in (PROBLEM, "THE LOG", json.dumps(PLAN)))
    (said,) = Executor().prompt(
        after(context("execute", plan), plan), prompt="{problem}|{planner_reasoning}", system="S"
    )
    assert said["content"] == f"S\n\n{PROBLEM}|why"


def test_what_a_conversation_lacks_is_said_in_full():
    """An agent's own conversation (`memory: chat`), and one that goes on from another branch."""
    plan, run, earlier = call("plan", plan=PLAN), call("execute", **RUN), call("verify", turn=0)
    for own, node in ((earlier, "verify"), (run, "execute")):
        view = after(context(node, plan, run, turn=1), own)
        said = prompt(Verifier() if node == "verify" else Executor(), view)  # with a system message
        assert PROBLEM in said and json.dumps(PLAN) in said
    for branch in (plan, run):
        (said,) = Verifier().prompt(after(context("verify", plan, run), branch))
        assert said["role"] == "user" and PROBLEM in said["content"]
    review = call("verify", feedback="shorter")
    said = prompt(Planner(), after(context("plan", plan, run, review, turn=1, max_turns=2), plan))
    assert all(text in said for text in (PROBLEM, json.dumps(PLAN), "THE LOG", "shorter"))


@pytest.mark.parametrize("hook", [Planner, Executor, Verifier, Solver, Reasoner])
def test_examples_come_between_the_system_message_and_the_prompt_as_they_are(hook):
    view = context("here", call("plan", plan=PLAN), call("execute", **RUN))
    plain = hook().prompt(view)
    examples = [{"user": "1 + {problem}?", "assistant": "{2}"}, {"assistant": "3", "user": "1 + 2?"}]
    messages = hook().prompt(view, examples=examples)
    assert messages == [
        plain[0],
        {"role": "user", "content": "1 + {problem}?"},
        {"role": "assistant", "content": "{2}"},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "3"},
        plain[1],
    ]


@pytest.mark.parametrize(
    ("examples", "named"),
    [
        ("text", "examples: must be a list of"),
        ({"user": "a", "assistant": "b"}, "examples: must be a list of"),
        ([{"user": "a", "assistant": "b"}, {"user": "a"}], r"examples\[1\]: must be"),
        ([{"user": "a", "assistant": 7}], r"examples\[0\]: must be"),
        ([["a", "b"]], r"examples\[0\]: must be"),
    ],
)
def test_examples_of_another_form_are_one_line(examples, named):
    with pytest.raises(UserError, match=rf"node 'here': prompt_options.{named}"):
        Solver().prompt(context("here"), examples=examples)


@pytest.mark.parametrize("option", ["prompt", "system"])
@pytest.mark.parametrize("hook", [Planner, Executor, Verifier, Solver, Reasoner])
def test_an_unknown_field_names_node_and_option(hook, option):
    view = context("here", call("plan", plan=PLAN), call("execute", **RUN))
    with pytest.raises(UserError, match=rf"node 'here': prompt_options.{option}: unknown field \{{plan\}}"):
        hook().prompt(view, **{option: "{plan}"})


def test_a_missing_upstream_node_is_named():
    with pytest.raises(UserError, match="node 'execute': node 'plan' has not run before it; nodes that have: draft"):
        prompt(Executor(), context("execute", call("draft")))
    with pytest.raises(UserError, match="prompt_options.executor"):
        prompt(Verifier(), context("verify", call("plan", plan=PLAN)))


def test_node_ids_can_be_renamed():
    view = context("verify", call("p", plan=PLAN), call("x", **RUN))
    assert "THE LOG" in prompt(Verifier(), view, planner="p", executor="x")


def test_upstream_hooks_of_the_users_own_are_read_as_text():
    view = context("verify", call("plan", text='{"reasoning": "mine"}'), call("execute", text="it printed 3"))
    shown = prompt(Verifier(), view)
    assert '{"reasoning": "mine", "code_plan": "", "expected_output": ""}' in shown
    assert "it printed 3" in shown


def test_planner_hands_over_its_plan_as_json():
    output = answer(Planner(), context("plan", text=f"<think>{{}}</think>```json\n{json.dumps(PLAN)}\n```"))
    assert output.parsed == {"plan": PLAN, "parsed_ok": True}
    assert json.loads(output.text) == PLAN
    broken = answer(Planner(), context("plan", text="just count"))
    assert broken.parsed == {"plan": dict.fromkeys(PLAN, "just count"), "parsed_ok": False}


def test_executor_runs_its_code_with_its_timeout():
    tool = Tool(status="failed", stdout="o" * 600, stderr="E")
    view = context("execute", text="```python\nprint(42)\n```", tool=tool)
    output = answer(Executor(), view, code_timeout=3, tool="python")
    assert tool.calls == [("python", {"code": "print(42)", "timeout": 3})]
    log = output.parsed.pop("log")
    assert output.parsed == {"code": "print(42)", "status": "failed", "stdout": "o" * 600, "stderr": "E"}
    assert output.text == log
    assert log == f"Code:\nprint(42)\nStatus:\nfailed\nStdout:\n{'o' * 512}\nStderr:\nE"
    assert answer(Executor(), view).parsed["status"] == "failed"
    assert tool.calls[1] == ("code_interpreter", {"code": "print(42)"})


@pytest.mark.parametrize("text", ["", "```python\n\n```", "<think>```python\nprint(1)\n```", "a</think>  "])
@pytest.mark.parametrize("status", ["invalid", "success"])
def test_no_code_is_a_failed_run_and_the_tool_is_told(text, status):
    tool = Tool(status=status, text="no code", stdout="odd")
    output = answer(Executor(), context("execute", text=text, tool=tool))
    assert output.parsed["status"] == "failed"
    assert (output.parsed["code"], output.parsed["stdout"], output.parsed["stderr"]) == ("", "", "empty_code")
    assert "[none]" in output.parsed["log"]
    assert [arguments["code"] for _, arguments in tool.calls] == [""]


def test_code_that_could_not_be_run_is_a_fault():
    async def unreachable(name: str, **arguments):
        raise SandboxFault("unreachable")

    with pytest.raises(SandboxFault, match="unreachable"):
        answer(Executor(), context("execute", text="print(1)", tool=unreachable))


def test_verifier_ends_the_episode_with_its_answer():
    output = answer(Verifier(), context("verify", text="Fine.\nFINAL ANSWER: \\boxed{42}", max_turns=3))
    assert output == Output(parsed={"answer": "42", "verdict": "final", "feedback": ""}, done=True)


def test_verifier_may_ask_for_another_turn_while_there_is_one():
    before = (call("plan", plan=PLAN), call("execute", **RUN))
    offers = {
        (turn, turns): "REVISE" in prompt(Verifier(), context("verify", *before, turn=turn, max_turns=turns))
        for turn, turns in ((0, 1), (0, 2), (1, 2), (1, 3))
    }
    assert offers == {(0, 1): False, (0, 2): True, (1, 2): False, (1, 3): True}
    asked = answer(Verifier(), context("verify", text="REVISE: use 4", max_turns=2))
    assert asked == Output(parsed={"answer": None, "verdict": "revise", "feedback": "use 4"}, done=False)
    last = context("verify", text="REVISE: use 4", turn=1, max_turns=2)
    late = answer(Verifier(), last)
    assert (late.parsed["verdict"], late.parsed["answer"], late.done) == ("none", None, False)
    published = answer(Verifier(), last, compat=True)
    assert (published.parsed["verdict"], published.parsed["answer"], published.done) == ("final", "4", True)


@pytest.mark.parametrize(
    ("text", "ending", "expected"),
    [
        ("FINAL ANSWER: \\boxed{4}", {"stop_reason": "stop"}, "4"),
        ("FINAL ANSWER: \\boxed{4} as", {"stop_reason": "length"}, "4"),
        ("FINAL ANSWER: \\boxed 4", {"stop_reason": "length"}, None),
        ("then 12 and", {"stop_reason": "length"}, None),
        ("\\boxed{17}", {"stop_reason": "max_generations", "ended_in_tool_call": True}, None),
        ("\\boxed{17}", {"stop_reason": "stop", "opened_thinking": True}, None),
    ],
)
@pytest.mark.parametrize("hook", [Solver, Reasoner, Verifier])
def test_no_hook_takes_an_answer_that_was_not_given(hook, text, ending, expected):
    view = context("solve", text=text)
    for name, value in ending.items():
        setattr(view.call, name, value)
    assert answer(hook(), view).parsed["answer"] == expected


def test_the_next_turns_planner_and_executor_see_the_feedback():
    last = (call("plan", plan=PLAN), call("execute", **RUN), call("verify", feedback="use four"))
    view = context("plan", *last, turn=1, max_turns=2)
    shown = prompt(Planner(), view)
    assert all(part in shown for part in ("use four", "THE LOG", json.dumps(PLAN)))
    assert prompt(Executor(), context("execute", *last, turn=1, max_turns=2), prompt="{feedback}") == "use four"
    assert prompt(Verifier(), context("verify", *last, turn=1, max_turns=2), prompt="{feedback}") == "use four"
    assert prompt(Planner(), context("plan"), prompt="<{feedback}{planner_plan}{execution_log}>") == "<>"


def test_feedback_of_this_turn_is_not_the_last_turns():
    view = context("plan", call("verify", feedback="now", turn=1), turn=1, max_turns=3)
    assert prompt(Planner(), view, prompt="<{feedback}>") == "<>"


@pytest.mark.parametrize("hook", [Solver, Reasoner])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FINAL ANSWER: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("3, so 4", None),
        ("<think>so \\boxed{4}", None),
        ("", None),
    ],
)
def test_baselines_extract_their_answer(hook, text, expected):
    assert answer(hook(), context("solve", text=text)) == Output(parsed={"answer": expected})


@pytest.mark.parametrize("hook", [Solver, Reasoner])
def test_baselines_can_read_the_answer_tag_or_as_was_published(hook):
    view = context("solve", text="\\boxed{1} <answer>2</answer> or 3")
    read = [answer(hook(), view, **options).parsed["answer"] for options in ({}, {"answer_tag": True})]
    assert read == ["1", "2"]
    assert answer(hook(), context("solve", text="3, so 4"), compat=True).parsed["answer"] == "4"


def test_the_file_loads_by_path():
    path = Path(__file__).resolve().parents[2] / "recipe" / "retool_ma" / "hooks.py"
    spec = importlib.util.spec_from_file_location("user_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.role_rewards)
    assert callable(module.outcome_reward)
    assert PROBLEM in prompt(module.Planner(), context("plan"))
