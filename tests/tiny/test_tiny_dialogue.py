"""Dialogues of several turns: what the nodes see of the turns before, and where a dialogue ends."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow
from recipe.tiny.arithmetic import Problem
from recipe.tiny.dialogue import Dialogue, Script

PROBLEM = Problem("How many?", "2 + 2", 4, "test", (2, 2))
HOOK = """
from recipe.dag.types.context import Output


def text(calls):
    return " ".join(f"{call.turn}{call.node}={call.text}" for call in calls)


class Player:
    def pre_process(self, tokenizer, prompt_ids, obs, *, context):
        seen = f"{text(context.upstream.values())}|{text(context.history)}|{text(context.calls)}"
        return [{"role": "user", "content": seen}]

    def post_process(self, tokenizer, prompt_ids, response_ids, *, context):
        return Output(done=context.call.text == "stop")
"""


@pytest.fixture
def dialogue(tmp_path) -> Dialogue:
    """ask -> reply, both by one agent, for two turns."""
    (tmp_path / "player.py").write_text(HOOK)
    (tmp_path / "workflow.yaml").touch()
    node = {"agent": "talker", "hooks": "player.py:Player"}
    workflow = Workflow(
        path=str(tmp_path / "workflow.yaml"),
        dag_id="talk",
        agents=[{"name": "talker", "policy": "main"}],
        policies={"main": {"model": {"path": "m"}}},
        nodes=[{"id": "ask", **node}, {"id": "reply", "after": ["ask"], **node}],
        episode={"max_turns": 2},
    )
    return Dialogue(workflow)


def test_a_node_sees_this_turn_of_those_before_it_and_the_last_turn_of_the_others(dialogue):
    turns = (Script(["a", "b"]), Script(["c", lambda prompt: prompt[0]["content"][:3]]))
    demonstrations = asyncio.run(dialogue.demonstrate(PROBLEM, *turns))
    assert [(d.role, d.turn, d.answer) for d in demonstrations] == [
        ("ask", 0, "a"),
        ("reply", 0, "b"),
        ("ask", 1, "c"),
        ("reply", 1, "1as"),
    ]
    assert [d.messages[0]["content"] for d in demonstrations] == [
        "||",
        "0ask=a|0ask=a|0ask=a",
        "0ask=a 0reply=b|0ask=a 0reply=b|0ask=a 0reply=b",
        "1ask=c 0reply=b|0ask=a 0reply=b 1ask=c|0ask=a 0reply=b 1ask=c",
    ]


@pytest.mark.parametrize(
    ("turns", "last"),
    [([["a", "stop"], ["b", "c"]], 0), ([["stop", "b"], ["b", "c"]], 0), ([["a", "b"], ["c", "d"], ["e", "f"]], 1)],
)
def test_a_teacher_that_speaks_after_the_end_is_an_error(dialogue, turns, last):
    with pytest.raises(UserError, match=f"ends after turn {last}, and the teacher speaks in {len(turns)} turns"):
        asyncio.run(dialogue.demonstrate(PROBLEM, *map(Script, turns)))
