from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.loading.workflow_file import load_workflow

WORKFLOW = Path(__file__).parents[2] / "examples" / "add_an_agent" / "workflow_critic.yaml"


@pytest.fixture
def hooks():
    return load_object("hooks.py", WORKFLOW)


def context(**given):
    fields = {"problem": "2 + {x}?", "turn": 0, "max_turns": 1, "node": "verify"}
    fields |= {"history": [], "upstream": {}, "call": None, "continues": False, "remembers": lambda call: False}
    return SimpleNamespace(**{**fields, **given})


def call(text, **parsed):
    return SimpleNamespace(text=text, parsed=parsed, turn=0)


def test_the_critic_works_while_the_executor_does():
    dependencies = {node.id: set(node.after) for node in load_workflow(WORKFLOW).rollout_nodes}
    assert dependencies["criticize"] == dependencies["execute"] == {"plan"}
    assert dependencies["verify"] == {"plan", "execute", "criticize"}


def test_the_critic_sees_problem_and_plan_as_they_are(hooks):
    (message,) = hooks.Critic().prompt(context(upstream={"plan": call("print({problem})")}))
    assert "2 + {x}?" in message["content"] and "print({problem})" in message["content"]
    with pytest.raises(UserError, match="reads node 'plan'; add `after: plan`"):
        hooks.Critic().prompt(context())


@pytest.mark.parametrize(
    ("text", "approves"),
    [("Fine.\nVERDICT: good", True), ("verdict: GOOD\nNo.\nVerdict: bad", False), ("It is good.", None)],
)
def test_the_last_verdict_counts(hooks, text, approves):
    output = hooks.Critic().parse(context(call=call(text)))
    assert output.parsed == {"approves": approves}


def test_the_verifier_reads_the_critique_before_its_instructions(hooks):
    upstream = {
        "plan": call("{}", plan={"reasoning": "", "code_plan": "add", "expected_output": ""}),
        "execute": call("log", log="Status: success"),
        "criticize": call("It forgets x."),
    }
    messages = hooks.VerifierWithCritique().prompt(context(upstream=upstream))
    assert [message["role"] for message in messages] == ["system", "user"]
    text = messages[-1]["content"]
    assert text.index("It forgets x.") < text.index("Status: success") < text.index("FINAL ANSWER:")


@pytest.mark.parametrize(
    ("outcome", "approves", "reward"), [(1.0, True, 0.5), (1.0, False, -0.5), (0.0, False, 0.5), (0.0, None, 0.0)]
)
def test_the_critic_is_paid_for_being_right(hooks, outcome, approves, reward):
    episode = SimpleNamespace(outcome=outcome, calls_of=lambda agent: [call("", approves=approves)])
    assert hooks.critic_reward(episode) == {"critic": [reward]}


def test_the_critic_is_judged_after_the_grading(hooks):
    with pytest.raises(UserError, match="not graded yet"):
        hooks.critic_reward(SimpleNamespace(outcome=None))
