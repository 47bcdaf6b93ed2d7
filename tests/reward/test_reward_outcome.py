"""Reward nodes for any workflow, on hand-made episodes."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward import outcome as outcomes
from recipe.dag.reward.outcome import env_outcome, outcome_reward, team_reward
from recipe.dag.types.record import Call, Episode


def call(node: str, agent: str, reward: float | None = None, **parsed) -> Call:
    return Call(node=node, agent=agent, agent_group=0, policy="main", turn=0, reward=reward, parsed=parsed)


def episode(*calls: Call) -> Episode:
    return Episode(uid="u", index=0, sample={"prompt": [], "ground_truth": "42"}, calls=list(calls))


@pytest.mark.parametrize(("answer", "reward"), [("42.0", 1.0), ("41", 0.0), (None, 0.0)])
def test_outcome_reward(answer, reward):
    case = episode(call("solve", "solver"), call("solve", "solver", answer=answer))
    assert asyncio.run(outcome_reward(case)) == {"solver": reward}
    assert (case.outcome, case.info) == (reward, {"final_reward": reward, "answer": answer or ""})


def test_outcome_reward_of_an_agent_that_is_not_there(monkeypatch):
    async def grade(prediction, truth, timeout_s):
        raise GraderFault("timed out")

    monkeypatch.setattr(outcomes, "grade", grade)
    case = episode(call("solve", "reasoner", answer="42"))
    with pytest.raises(UserError, match="agent 'solver' made no call; agents that did: reasoner"):
        asyncio.run(outcome_reward(case))
    with pytest.raises(GraderFault):
        asyncio.run(outcome_reward(case, agent="reasoner"))
    assert case.outcome is None


@pytest.mark.parametrize(
    ("reward", "solved_at", "outcome"), [(1.0, 1.0, 1.0), (0.5, 1.0, 0.0), (0.5, 0.5, 1.0), (0.0, 1.0, 0.0)]
)
def test_the_envs_last_reward_is_the_outcome(reward, solved_at, outcome):
    case = episode(call("reason", "reasoner", 0.0), call("act", "actor", reward))
    assert env_outcome(case, solved_at=solved_at) == {}
    assert (case.outcome, case.info) == (outcome, {"final_reward": reward})


def test_an_env_that_rewards_nobody_is_the_users_mistake():
    with pytest.raises(UserError, match="env_pays"):
        env_outcome(episode(call("act", "actor")))


def test_the_team_is_paid_for_a_solved_episode():
    case = episode(call("plan", "planner"), call("execute", "executor"), call("plan", "planner"))
    with pytest.raises(UserError, match="not graded yet"):
        team_reward(case)
    case.outcome = 1.0
    assert team_reward(case, weight=0.25) == {"planner": 0.25, "executor": 0.25}
    assert team_reward(case, agents=["executor"]) == {"executor": 0.5}
    with pytest.raises(UserError, match="agent 'judge' made no call; agents that did: planner, executor"):
        team_reward(case, agents=["judge"])
