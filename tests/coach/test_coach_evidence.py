"""What a coach is shown: the whole context of the action, files, earlier actions; the truth only if asked for."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.dag.coach.evidence import Keep, evidence
from recipe.dag.coach.template import VARIABLES
from recipe.dag.types.context import Context
from recipe.dag.types.record import Call, ToolResult


def acted(agent: str, text: str, *, turn: int = 0, round_index: int = 0, **fields: Any) -> Call:
    prompt = f"<{agent} {turn}.{round_index} was shown this>"
    fields |= {"round": round_index, "text": text, "generations": 1, "prompt_text": prompt}
    return Call(agent, agent, 0, "main", turn, **fields)


def context_of(*calls: Call, **extra: Any) -> Context:
    sample = {"prompt": [{"role": "user", "content": "How many?"}], "ground_truth": "42", "extra_info": extra}

    async def no_tool(*_: Any, **__: Any) -> Any: ...

    return Context(sample, "u", 0, 0, 1, "coach", "coach", {}, [], None, False, no_tool, calls=list(calls))


def shown(
    *calls: Call, judged: int = -1, truth: bool = False, keep: Keep | None = None, **extra: Any
) -> dict[str, str]:
    values = evidence(context_of(*calls, **extra), calls[judged], keep or Keep(), truth=truth)
    assert values.keys() == VARIABLES.keys() and all(isinstance(value, str) for value in values.values())
    return values


def test_the_first_action_of_an_episode():
    values = shown(acted("solver", "42"))
    assert values["problem"] == values["task"] == "How many?"
    assert values["agent_name"] == values["agent_role"] == "solver"
    assert values["agent_input"] == "<solver 0.0 was shown this>" and values["agent_output"] == "42"
    assert values["tool_observation"] == values["all_tool_observations"] == "N/A (no tools used)"
    assert values["previous_actions"] == values["previous_outputs"] == "none"
    assert values["files_available"] == values["files_missing"] == values["files_from_previous_agents"] == "none"


def test_the_truth_is_shown_only_if_it_is_asked_for():
    call = acted("solver", "41")
    hidden = shown(call, label="forty-two")
    assert hidden["ground_truth_answer"] == hidden["label"] == "N/A" and "42" not in "".join(hidden.values())
    open_values = shown(call, truth=True, label="forty-two")
    assert (open_values["ground_truth_answer"], open_values["label"]) == ("42", "forty-two")
    assert shown(call, truth=True)["label"] == "42"


def test_the_task_of_the_data_set_is_the_raw_one():
    assert shown(acted("a", "x"), task="Predict the price.")["task"] == "Predict the price."


def test_a_later_action_comes_with_its_own_context_and_all_before_it():
    tool = ToolResult("t", {}, "success", "tool")
    calls = [
        acted("planner", "first A, then B", role="lead"),
        acted("coder", "print(1)", next_observation="1"),
        acted("coach", "PROCESS_SCORE: 3"),
        acted("coder", "print(2)", round_index=1, next_observation="2", tool_results=[tool]),
        acted("checker", "later"),
    ]
    values = shown(*calls, judged=3)
    assert values["agent_input"] == "<coder 0.1 was shown this>"
    assert values["tool_observation"] == "tool\n------\n2"
    assert values["all_tool_observations"] == "Action 1:\n1\n\nAction 2:\ntool\n------\n2"
    assert values["previous_actions"] == "Action 1:\nprint(1)"
    # neither what the coach said nor what came later
    assert values["previous_outputs"] == "planner:\nfirst A, then B"
    assert shown(*calls, judged=0)["agent_role"] == "lead"


def test_a_thought_that_the_prompt_opened_is_marked_as_one():
    assert shown(acted("coder", "hm, 4", opened_thinking=True))["agent_output"] == "<think>hm, 4"


def test_the_action_is_the_text_of_the_model_and_not_that_of_its_hook():
    call = acted("coder", "42", completion="<think>hm</think>The answer is 42.")
    assert shown(call)["agent_output"] == "<think>hm</think>The answer is 42."


def test_failed_calls_are_no_outputs():
    assert shown(acted("helper", "", parsed={"failed": "down"}), acted("a", "x"))["previous_outputs"] == "none"


@pytest.mark.parametrize(
    ("files", "listing"),
    [
        ({"train.csv": 12, "X.pkl": 3}, "train.csv (12 bytes), X.pkl (3 bytes)"),
        (["train.csv"], "train.csv"),
        ([{"name": "train.csv", "size": 12}, {"name": "b"}], "train.csv (12 bytes), b"),
        ({}, "none"),
        (None, "none"),
    ],
)
def test_files_are_listed(files, listing):
    values = shown(acted("coder", "x", env_info={"files": files, "missing": ["model.pkl"]}))
    assert values["files_available"] == listing and values["files_missing"] == "model.pkl"


def test_files_of_previous_agents_are_those_before_the_agents_first_action():
    calls = [
        acted("engineer", "x", env_info={"files": {"X.pkl": 1}}),
        acted("modeler", "y", env_info={"files": {"X.pkl": 1, "half.pkl": 1}}),
        acted("modeler", "z", round_index=1, env_info={"files": {"X.pkl": 1, "model.pkl": 2}, "missing": []}),
    ]
    values = shown(*calls)
    assert values["files_from_previous_agents"] == "X.pkl (1 bytes)"
    assert values["files_available"] == "X.pkl (1 bytes), model.pkl (2 bytes)" and values["files_missing"] == "none"
    assert shown(*calls, judged=0)["files_from_previous_agents"] == "none"


def test_an_env_that_a_later_player_steps_answers_for_the_action():
    assert shown(acted("a", "x"), acted("b", "y", env_info={"files": ["f"]}), judged=0)["files_available"] == "f"


def test_texts_are_shortened_where_it_is_wanted_and_the_cut_is_marked():
    calls = [acted("a", "0123456789"), acted("a", "abcdefghij", round_index=1, next_observation="9876543210")]
    values = shown(*calls, keep=Keep(observation=4, earlier=3, output=2, input=5))
    assert values["tool_observation"] == "9876\n[... 6 characters cut]"
    assert values["previous_actions"] == "Action 1:\n012\n[... 7 characters cut]"
    assert values["agent_output"] == "ab\n[... 8 characters cut]"
    assert values["agent_input"] == "[17 characters cut ...]\nthis>"
    whole = shown(*calls, keep=Keep(observation=None))
    assert whole["tool_observation"] == "9876543210" and whole["agent_output"] == "abcdefghij"
