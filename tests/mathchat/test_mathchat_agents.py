"""The three agents: what each reads, what counts as a program, a result and an answer, and what is handed over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.types.context import Context, Output
from recipe.dag.types.record import Call, ToolResult
from recipe.mathchat.agents import BETWEEN, Coder, Solver, Verifier, programs
from recipe.mathchat.teacher import Teacher
from tests.contexts import context_of

WORKFLOW = Path(__file__).parents[2] / "workflows" / "workflow_mathchat.yaml"

PROBLEM = "What is {x} in $\\frac{1}{2}$?"


class Tool:
    """Answers every call with `result`, and keeps the programs."""

    def __init__(self, **result):
        self.result, self.codes = {"status": "success", "text": "42\n", **result}, []

    async def __call__(self, name: str, *, code: str, timeout: float | None = None) -> ToolResult:
        self.codes.append(code)
        return ToolResult(name, {"code": code}, **self.result)


def call(node: str, text: str = "", *, round_index: int = 0, hand_over: str = "all", **parsed) -> Call:
    keys = {"round": round_index, "text": text, "parsed": parsed, "hand_over": hand_over, "stop_reason": "stop"}
    return Call(node=node, agent=node, agent_group=0, policy="main", turn=0, **keys)


def context(node: str, *calls: Call, text: str = "", round_index: int = 0, tool=None) -> Context:
    own = {"call_tool": tool or Tool(), "call": call(node, text, round_index=round_index), "round": round_index}
    rounds = {"max_rounds": 2 if node == "code" else 1, "continued": calls if round_index else ()}
    return context_of(node, PROBLEM, *calls, **own, **rounds)


def act(text: str, *, tool: Tool | None = None, stop_reason: str = "stop", **options) -> Output:
    view = context("code", call("solve", "idea"), text=text, tool=tool)
    view.call.stop_reason = stop_reason
    return asyncio.run(Coder().parse(view, **options))


def test_each_prompt_names_the_chain_the_own_place_and_the_token_limit():
    views = [context("solve"), context("code", call("solve")), context("verify", call("solve"), call("code"))]
    for agent, view, place in zip((Solver, Coder, Verifier), views, ("first", "second", "last"), strict=True):
        system, user = agent().prompt(view, token_limit=321)
        assert "Three agents" in system["content"] and f"the {place} of them" in system["content"]
        assert "321 tokens" in system["content"] and PROBLEM in user["content"]
        assert len(agent().prompt(view, token_limit=321, system="")) == 1


@pytest.mark.parametrize("agent", [Solver, Coder, Verifier])
def test_by_default_a_prompt_states_the_agents_own_limit(agent):
    edits = split_edits(["workflow.agents.*.sampling.max_tokens=77"])[1]
    workflow = load_edited(WORKFLOW, edits)
    names = {Solver: "solve", Coder: "code", Verifier: "verify"}
    hooks = agent()
    hooks.prepare(workflow, workflow.node(names[agent]))
    view = context(names[agent], call("solve"), call("code"))
    assert "at most 77 tokens" in hooks.prompt(view)[0]["content"]


def test_the_coder_reads_the_solution_first_and_then_only_what_its_program_printed():
    first = Coder().prompt(context("code", call("solve", "Use 6 * 7.")), token_limit=9)[-1]["content"]
    assert "The problem solver wrote:\nUse 6 * 7." in first
    earlier = call("code", "a program", output="42")
    later = Coder().prompt(context("code", call("solve", "idea"), earlier, round_index=1), token_limit=9)
    assert [m["role"] for m in later] == ["user"] and "<tool_response>\n42\n</tool_response>" in later[0]["content"]
    assert "idea" not in later[0]["content"]


def test_the_verifier_reads_all_outputs_or_the_code_agents_only():
    calls = (
        call("solve", "idea"),
        call("code", "prog", over=False, output="41"),
        call("code", "It is 41.", round_index=1, over=True, output=""),
    )
    view = context("verify", *calls)
    both = Verifier().prompt(view, token_limit=9)[-1]["content"]
    for shown in ("wrote:\nidea", "wrote:\nIt is 41.", "printed:\n41"):
        assert shown in both
    published = Verifier().prompt(view, token_limit=9, solver=None)[-1]["content"]
    assert "idea" not in published and "printed:\n41" in published
    without = Verifier().prompt(
        context("verify", calls[0], call("code", "I guess", over=True, output="")), token_limit=9
    )
    assert "printed:" not in without[-1]["content"]


def test_the_verifier_is_shown_the_last_programs_output_and_no_older_one():
    runs = call("code", "prog", over=False, output="41"), call("code", "x = 1", round_index=1, over=False, output="")
    shown = Verifier().prompt(context("verify", call("solve"), *runs), token_limit=9)[-1]["content"]
    assert "printed:" in shown and "41" not in shown


@pytest.mark.parametrize(("hand_over", "seen"), [("all", True), ("answer", False)])
def test_thoughts_are_handed_over_only_where_all_is(hand_over, seen):
    thought = call("solve", "<think>secret plan</think>\nUse 6 * 7.", hand_over=hand_over)
    read = Coder().prompt(context("code", thought), token_limit=9)[-1]["content"]
    assert "Use 6 * 7." in read and ("secret plan" in read) == seen


def test_a_verdict_that_the_node_may_read_is_shown_once():
    idea = call("solve", "idea")
    coach = call("coach_solve", process=3.0, outcome=None, reasoning="It forgets a factor.")
    read = Coder().prompt(context("code", idea, coach), token_limit=9)[-1]["content"]
    assert "A coach wrote about it:\nIt forgets a factor." in read
    failed = Coder().prompt(context("code", idea, call("coach_solve", failed="503")), token_limit=9)[-1]["content"]
    assert "coach" not in failed
    acts = call("code", "prog", output="1"), call("coach_code", process=9.0, outcome=None, reasoning="It runs.")
    later = Coder().prompt(context("code", idea, coach, *acts, round_index=1), token_limit=9)[-1]["content"]
    assert "It runs." in later and "factor" not in later
    last = Verifier().prompt(context("verify", idea, coach, *acts), token_limit=9)[-1]["content"]
    assert "It runs." in last and "factor" in last


def test_the_engine_shows_a_verdict_to_those_that_wait_for_its_coach():
    flow = ["workflow.nodes.code.after=[solve, coach_solve]"]
    for edits, shown in (([], False), (flow, True)):
        workflow = load_edited(WORKFLOW, split_edits(edits)[1])
        tutor = Teacher(workflow, 0, coaches=True)
        lessons = [lesson for problem in tutor.problems(3, 8) for lesson in tutor.teach(problem)]
        read = {lesson.role: lesson.messages[1]["content"] for lesson in lessons if lesson.role in ("code", "verify")}
        assert ("A coach wrote" in read["code"], "A coach wrote" in read["verify"]) == (shown, False)


def test_programs_are_run_in_order_and_their_outputs_joined():
    tool = Tool()
    output = act("```python\nprint(1)\n```\nand\n```python\nprint(2)\n```", tool=tool)
    assert tool.codes == ["print(1)\n", "print(2)\n"]
    assert output.parsed == {"over": False, "output": f"42{BETWEEN}42"}
    assert act("The result is 42.").parsed == {"over": True, "output": ""}


def test_code_in_a_thought_or_in_a_text_that_was_cut_off_is_not_run():
    tool = Tool()
    thought = "<think>\n```python\nprint(1)\n```\n</think>\nThe result is 1."
    assert act(thought, tool=tool).parsed["over"] and tool.codes == []
    assert act("<think>```python\nprint(1)\n```", tool=tool).parsed["over"] and tool.codes == []
    assert act("```python\nprint(1", tool=tool, stop_reason="length").parsed["over"] and tool.codes == []


def test_limits_of_programs_and_of_their_output():
    tool = Tool(text="x" * 100)
    output = act("```python\nprint(1)\n```\n" * 9, tool=tool, max_programs=2, max_output_chars=50)
    assert len(tool.codes) == 2 and output.parsed["output"] == "x" * 50


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(3)"}}</tool_call>', ["print(3)"]),
        ('<tool_call>{"name": "x", "arguments": "{\\"code\\": \\"a\\"}"}</tool_call>', ["a"]),
        ("<tool_call>{'code': 1}</tool_call>", [""]),
        ('<tool_call>{"arguments": {"code": 3}}</tool_call>', [""]),
        ('<tool_call>{"arguments": [1]}</tool_call>', [""]),
        ("no program", []),
        ("```python\nprint(4)\n```", ["print(4)\n"]),
    ],
)
def test_programs_in_a_text(text, codes):
    assert programs(text) == codes


def test_an_unreadable_call_is_told_so():
    output = act("<tool_call>{</tool_call>", tool=Tool(status="invalid", text="empty_code"))
    assert output.parsed == {"over": False, "output": "[unreadable tool call or empty program]"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} or rather \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<think>\\boxed{3}</think> I do not know.", None),
        ("The answer is 7.", None),
        ("```python\nprint('\\boxed{5}')\n```", None),
    ],
)
def test_the_answer_is_the_last_box_outside_of_thoughts_and_programs(text, answer):
    assert Verifier().parse(context("verify", text=text)).parsed == {"answer": answer}


def test_a_node_that_has_not_run_is_named():
    with pytest.raises(UserError, match="node 'plan' has not run before it; nodes that have: solve"):
        Coder().prompt(context("code", call("solve")), token_limit=9, solver="plan")
