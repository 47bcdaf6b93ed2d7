"""What the three agents are told: the folder, who did what, what is missing, and what they tried before."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import Call
from recipe.dsbench.agents import Analyst, Engineer, Modeler
from tests.contexts import context_of

START = "Files: test.csv (9 bytes), train.csv (12 bytes)"
SUMMARY = "---PREPROCESSING_SUMMARY---\ncolumns: a, b\n---END_SUMMARY---"


def call(agent: str, text: str = "", *, output: str = "", files: dict[str, int] | None = None, **keys: Any) -> Call:
    info = {"files": files or {}, "output": output, "missing": keys.pop("missing", [])}
    return Call(agent, agent, 0, "p", 0, text=text, env_info=info, **keys)


def told(kind, *calls: Call, round_index: int = 0, **options: Any) -> list[dict[str, Any]]:
    name = kind.__name__.lower()
    context = context_of(name, "Predict rent.", *calls, obs=START, round=round_index, max_rounds=4)
    return kind().prompt(context, **options)


def test_the_first_prompt_has_the_contract_the_task_and_the_files():
    system, user = told(Engineer)
    for name in ("X_train.pkl", "y_train.pkl", "X_test.pkl", "---PREPROCESSING_SUMMARY---", "fixed\nrandom_state"):
        assert name in system["content"]
    assert "Predict rent." in user["content"] and "test.csv (9 bytes), train.csv (12 bytes)" in user["content"]
    assert "Warning" not in user["content"] and user["content"].endswith("Write the program now.")
    assert "---MODEL_SUMMARY---" in told(Modeler)[0]["content"]
    assert "submission.csv" in told(Analyst)[0]["content"]


def test_later_agents_read_the_files_and_summaries_of_the_earlier_ones():
    engineer = call("engineer", output=f"stdout:\n{SUMMARY}", files={"X_train.pkl": 5, "y_train.pkl": 6})
    text = told(Modeler, engineer)[1]["content"]
    assert "# Summary by the engineer\ncolumns: a, b\n" in text
    assert "X_train.pkl (5 bytes), y_train.pkl (6 bytes)" in text and "train.csv" not in text
    again = call("engineer", output="nothing new", files={"X_train.pkl": 5})
    assert "columns: a, b" in told(Modeler, engineer, again)[1]["content"], "an earlier action's summary stays"


def test_missing_files_of_others_are_a_warning():
    engineer = call("engineer", files={"X_train.pkl": 5})
    assert "no file's name contains y_train." in told(Modeler, engineer)[1]["content"]
    assert "no file's name contains x_test or model." in told(Analyst, engineer)[1]["content"]
    done = call("modeler", files={"my_x_test.npy": 1, "model.joblib": 1})
    assert "Warning" not in told(Analyst, engineer, done)[1]["content"]


def test_an_agent_reads_its_own_programs_and_what_they_printed_but_not_its_thoughts():
    first = call(
        "engineer",
        "<think>I could ```python\nbad\n```</think>Now:\n```python\nprint(1)\n```",
        output="The program of engineer failed with exit code 1.\nstderr:\nNameError",
        missing=["X_test.pkl", "y_train.pkl"],
    )
    text = told(Engineer, first, round_index=1)[1]["content"]
    assert "# Your action 1\n```python\nprint(1)\n```\nIt printed:\nThe program of engineer failed" in text
    assert "bad" not in text and "I could" not in text
    assert "X_test.pkl, y_train.pkl still missing or unusable. Write the next program: action 2 of 4." in text
    assert "# no program" in told(Engineer, call("engineer", "Hello."), round_index=1)[1]["content"]


def test_a_draft_in_a_thought_that_a_limit_cut_is_no_program():
    cut = call("engineer", "I could write ```python\nbad\n```", opened_thinking=True)
    text = told(Engineer, cut, round_index=1)[1]["content"]
    assert "bad" not in text and "# no program" in text


def test_long_outputs_keep_their_beginning_and_their_end():
    long = "A" * 5000 + "the error"
    first, second = (call("engineer", output=long) for _ in range(2))
    text = told(Engineer, first, second, round_index=2, keep_output=1000, keep_earlier=100)[1]["content"]
    one, two = text.split("# Your action 2")
    assert one.endswith("the error\n\n") and one.count("A" * 50) == 1 and "...(truncated)..." in one
    assert "the error" in two and two.count("A" * 450) == 2 and len(two) < 1300


def test_prompts_can_be_replaced_and_unknown_fields_are_refused():
    messages = told(Engineer, prompt="{problem}|{names}|{output}|{action}", system="")
    assert [m["role"] for m in messages] == ["user"]
    assert messages[0]["content"] == "Predict rent.|test.csv, train.csv||Write the program now."
    with pytest.raises(UserError, match="prompt_options.prompt: unknown field {files_available}"):
        told(Engineer, prompt="{files_available}")
