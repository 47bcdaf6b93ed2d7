"""The outcome by rule: who is paid, what is reported beside it, and that the coach's opinion decides nothing."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import Call, Episode
from recipe.mathchat.reward import answer_outcome


def call(node: str, agent: str, **parsed) -> Call:
    return Call(node=node, agent=agent, agent_group=0, policy=agent, turn=0, parsed=parsed)


def episode(answer: str | None, opinion: float | None = None, *, verdict: dict | None = None) -> Episode:
    calls = [call("solve", "solver"), call("code", "coder"), call("code", "coder"), call("verify", "verifier")]
    calls[-1].parsed = {"answer": answer}
    said = {"process": 5.0, "outcome": opinion, "reasoning": ""} if verdict is None else verdict
    return Episode("u", 0, {"prompt": [], "ground_truth": "42"}, calls=[*calls, call("coach_verify", "coach", **said)])


def pay(played: Episode, **options) -> dict[str, list[float]]:
    return asyncio.run(answer_outcome(played, **options))


@pytest.mark.parametrize(("answer", "outcome"), [("42", 1.0), ("42.0", 1.0), ("41", 0.0), (None, 0.0)])
def test_every_action_is_paid_the_graders_outcome(answer, outcome):
    played = episode(answer)
    assert pay(played) == {"solver": [outcome], "coder": [outcome] * 2, "verifier": [outcome]}
    assert played.outcome == outcome and played.info["answer"] == (answer or "")


def test_the_weight_scales_the_reward_and_not_the_outcome():
    played = episode("42")
    assert pay(played, weight=0.0, agents=("verifier",)) == {"verifier": [0.0]} and played.outcome == 1.0


@pytest.mark.parametrize(("opinion", "agrees"), [(1.0, 0.0), (0.0, 1.0)])
def test_the_coachs_opinion_is_reported_and_decides_nothing(opinion, agrees):
    played = episode("41", opinion)
    assert set(pay(played)["verifier"]) == {0.0} and played.outcome == 0.0
    assert (played.info["coach_correct"], played.info["coach_agrees"]) == (opinion, agrees)


@pytest.mark.parametrize("verdict", [{"failed": "503"}, {"process": 3.0, "outcome": None}])
def test_an_opinion_that_the_coach_did_not_give_is_not_reported(verdict):
    played = episode("42", verdict=verdict)
    pay(played)
    assert "coach_correct" not in played.info and "coach_agrees" not in played.info
    pay(played, coach=None)


def test_a_node_that_made_no_call_is_named():
    with pytest.raises(
        UserError, match="node 'answer' made no call; nodes that did: solve, code, verify, coach_verify"
    ):
        pay(episode("42"), verifier="answer")
