"""What counts as the ReTool agent's answer, and its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag import Call, Context
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.reward.answer import quick_equal
from recipe.retool.agent import SYSTEM, Solver, answer_in, given_answer

WORKFLOW = Path(__file__).parents[2] / "workflows" / "workflow_retool.yaml"
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(7)"}}\n</tool_call>'


def call(text: str, **fields) -> Call:
    return Call("solve", "solver", 0, "main", 0, text=text, stop_reason=fields.pop("stop_reason", "stop"), **fields)


def context(problem: str = "How many?") -> Context:
    sample = {"prompt": [{"role": "system", "content": "ignored"}, {"role": "user", "content": problem}]}
    return Context(sample, "0", 0, 0, 1, "solver", "solve", {}, [], None, False, None)  # pyright: ignore[reportArgumentType]


def test_the_shipped_workflow_takes_the_documented_switch_of_the_tools_format():
    _, edits = split_edits(["workflow.agents.*.tool_loop.format=tags"])
    (agent,) = load_edited(WORKFLOW, edits).agents
    assert agent.tool_loop.format == "tags" and agent.tool_loop.max_parallel == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>\\boxed{12}</answer>", "12"),
        ("so <answer>12</answer>", "12"),
        ("so <ANSWER> \\boxed{\\frac{1}{2}} </ANSWER>.", "\\frac{1}{2}"),
        ("\\boxed{1}, no, \\boxed{2}", "2"),
        ("<answer>\\boxed{1}</answer> and also \\boxed{2}", "1"),
        ("<answer>\\boxed{1}</answer><answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{3}</answer><answer> </answer>", "3"),
        ("\\boxed{4} and \\boxed{5", "4"),
        ("<answer>\\boxed{6}", "6"),
        ("the answer is 12", None),
        ("12", None),
        ("", None),
        ("\\boxed{}", None),
        ("<answer></answer>", None),
        ("<think>\\boxed{9}</think>", None),
        ("<think><answer>9</answer></think> 8", None),
        ("```python\nprint('\\boxed{9}')\n```", None),
        ('<tool_call>{"arguments": {"code": "print(\'<answer>9</answer>\')"}}</tool_call>', None),
        ("<tool_response>\n\\boxed{9}\n</tool_response>", None),
        ("<interpreter><answer>\\boxed{9}</answer></interpreter>", None),
        ("<interpreter>\\boxed{9}", None),
        ("<code>print('\\boxed{9}')", None),
        ("<code>print('\\boxed{9}')</code> <answer>\\boxed{8}</answer>", "8"),
        ("<tool_response>9</tool_response> <answer>\\boxed{8}</answer>", "8"),
    ],
)
def test_an_answer_is_only_what_the_model_gave_as_one(text, answer):
    assert given_answer(call(text)) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("long thoughts, 12, 13", None),
        ("\\boxed{12", None),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\boxed 12", None),
        ("<answer>\\boxed{1}</answer> no, <answer>\\boxed{2}", None),
        ("<answer>1", None),
        ("<answer>\\boxed{1}</answer> because", "1"),
        (f"{CALL} <answer>5</answer> and <tool_call>" + '{"arguments": "<answer>', "5"),
    ],
)
def test_a_text_that_was_cut_off_has_only_answers_that_were_finished(text, answer):
    assert given_answer(call(text, stop_reason="length")) == answer


def test_a_call_that_ended_in_a_tool_call_has_no_answer():
    text = f"<answer>\\boxed{{1}}</answer>{CALL}"
    assert given_answer(call(text, stop_reason="max_generations", ended_in_tool_call=True)) is None


def test_a_thought_that_the_prompt_opened_has_no_answer():
    assert given_answer(call("\\boxed{1}</think>\\boxed{2}", opened_thinking=True)) == "2"
    assert given_answer(call("\\boxed{1}", opened_thinking=True)) is None


def test_leading_zeros_do_not_matter():
    answer = answer_in("<answer>\\boxed{025}</answer>")
    assert answer == "025" and quick_equal(answer, "25") is True


@given(st.text(alphabet="<answer>/boxed{}\\ 12\n", max_size=200), st.booleans())
def test_any_text_is_read_without_an_error(text, complete):
    answer = answer_in(text, complete=complete)
    assert answer is None or (answer and answer in text)


def test_many_open_tags_are_read_in_linear_time():
    assert answer_in("<answer>" * 50_000, complete=False) is None
    assert answer_in("<answer>" * 50_000 + "7</answer>") == "7"


def test_the_prompt_asks_for_the_format_that_is_read():
    system, user = Solver().prompt(context())
    assert system == {"role": "system", "content": SYSTEM} and user == {"role": "user", "content": "How many?"}
    assert answer_in(SYSTEM) == "your answer"


def test_options_of_the_prompt():
    agent = Solver()
    assert agent.prompt(context(), system="", suffix=" Box it.") == [{"role": "user", "content": "How many? Box it."}]


def test_parse_passes_the_answer_on():
    seen = context()
    seen.call = call("<answer>\\boxed{3}</answer>")
    assert Solver().parse(seen).parsed == {"answer": "3"}
