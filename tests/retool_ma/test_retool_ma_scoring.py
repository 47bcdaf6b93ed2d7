"""Reward nodes on hand-made episodes: who gets what, in which call, and what a failing grader does."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward import outcome
from recipe.dag.types.record import Call, Episode
from recipe.retool_ma.scoring import role_rewards


def call(node: str, agent: str, turn: int = 0, text: str = "", **parsed) -> Call:
    return Call(node=node, agent=agent, agent_group=0, policy="main", turn=turn, text=text, parsed=parsed)


def plan(turn: int = 0, expected: str = "", code_plan: str = "numbers", node: str = "plan", agent: str = "planner"):
    fields = {"reasoning": "", "code_plan": code_plan, "expected_output": expected}
    return call(node, agent, turn, plan=fields, parsed_ok=True)


def execute(turn: int = 0, status: str = "success", stdout: str = "42", code: str = "numbers", node: str = "execute"):
    return call(node, "executor", turn, status=status, stdout=stdout, stderr="", code=code, log="")


def verify(turn: int = 0, answer: str | None = "42", node: str = "verify", agent: str = "verifier"):
    return call(node, agent, turn, answer=answer, verdict="final", feedback="")


def episode(*calls: Call, truth: str | None = "42") -> Episode:
    return Episode(uid="u", index=0, sample={"prompt": [], "ground_truth": truth}, calls=list(calls))


def rewards(case: Episode, **options) -> dict[str, list[float]]:
    return asyncio.run(role_rewards(case, **options))


@pytest.fixture
def timeout(monkeypatch):
    async def grade(prediction, truth, timeout_s):
        raise GraderFault("timed out")

    monkeypatch.setattr(outcome, "grade", grade)


def test_a_solved_episode():
    case = episode(plan(expected="42"), execute(), verify())
    assert rewards(case) == {"planner": [0.8], "executor": [1.0], "verifier": [1.0]}
    assert case.outcome == 1.0
    assert case.info == {"final_reward": 1.0, "answer": "42", "plan_parsed": 1.0, "plan_overlap": 1.0}
    assert [c.reward for c in case.calls] == [None] * 3


@pytest.mark.parametrize("status", ["failed", "timeout", "invalid"])
def test_a_run_that_is_no_success(status):
    case = episode(plan(expected="42"), execute(status=status), verify(answer="41"))
    assert rewards(case) == {"planner": [-0.2], "executor": [0.0], "verifier": [0.0]}
    assert case.outcome == 0.0


def test_compat_reaches_the_roles():
    case = episode(plan(expected="41.0"), execute(stdout="41"), verify())
    assert rewards(case) == {"planner": [0.8], "executor": [1.0], "verifier": [1.0]}
    assert rewards(case, compat=True) == {"planner": [0.4], "executor": [1.0], "verifier": [0.5]}


def test_no_answer_is_wrong_without_grading(timeout):
    case = episode(plan(), execute(), verify(answer=None))
    assert rewards(case)["verifier"] == [-0.3]
    assert (case.outcome, case.info["answer"]) == (0.0, "")


def test_a_grader_timeout_is_no_reward(timeout):
    case = episode(plan(), execute(), verify())
    with pytest.raises(GraderFault):
        rewards(case)
    assert case.outcome is None
    assert case.info == {}


def test_a_grader_timeout_is_minus_one_in_compat_mode(timeout):
    case = episode(plan(), execute(stdout="41"), verify())
    assert rewards(case, compat=True)["verifier"] == [-1.0]
    assert (case.outcome, case.info["final_reward"]) == (0.0, -1.0)


def test_each_turn_is_judged_by_its_own_run_for_its_share_and_the_review_by_the_last():
    case = episode(
        *(plan(0, expected="42"), execute(0, "failed"), verify(0, None)),
        *(plan(1, expected="42"), execute(1), verify(1, None)),
        *(plan(2, code_plan="numbers primes"), execute(2, stdout="41"), verify(2)),
    )
    assert rewards(case) == {
        "planner": [pytest.approx(reward / 3) for reward in (-0.2, 0.8, 0.4)],
        "executor": [pytest.approx(reward / 3) for reward in (0.0, 1.0, 0.8)],
        "verifier": [0.0, 0.0, 1.0],
    }


def test_a_further_turn_pays_nothing_by_itself():
    once = episode(plan(), execute(), verify())
    twice = episode(plan(0), execute(0), verify(0, None), plan(1), execute(1), verify(1))
    assert {name: sum(paid) for name, paid in rewards(once).items()} == pytest.approx(
        {name: sum(paid) for name, paid in rewards(twice).items()}
    )


def test_a_turn_without_a_run_is_a_failed_plan():
    case = episode(plan(0), execute(0), verify(0, None), plan(1), verify(1))
    assert rewards(case) == {"planner": [0.2, -0.1], "executor": [1.0], "verifier": [0.0, 1.0]}


def test_other_node_ids_and_agents_that_share_a_role():
    case = episode(plan(node="p", agent="thinker"), execute(node="x"), verify(node="v", agent="thinker"))
    assert rewards(case, planner="p", executor="x", verifier="v") == {"thinker": [0.4, 1.0], "executor": [1.0]}


def test_another_agent_gets_no_reward_and_an_agents_other_call_gets_none():
    case = episode(plan(), execute(), call("critique", "critic", text="hm"), call("recap", "planner"), verify())
    assert rewards(case) == {"planner": [0.4, 0.0], "executor": [1.0], "verifier": [1.0]}


def test_upstream_hooks_of_the_users_own():
    own_plan = call("plan", "planner", text='{"code_plan": "numbers", "expected_output": "42"}')
    case = episode(own_plan, execute(), call("verify", "verifier", text="so \\boxed{42}"))
    assert rewards(case) == {"planner": [0.8], "executor": [1.0], "verifier": [1.0]}
    assert case.info["plan_parsed"] == 0.0


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (episode(plan(), verify()), {}, "node 'execute' has not run; nodes that have: plan, verify"),
        (episode(), {}, "node 'plan' has not run; nodes that have: none"),
        (episode(plan(), execute(), verify()), {"verifier": "judge"}, "node 'judge' has not run"),
        (episode(plan(), call("execute", "executor"), verify()), {}, "node 'execute' has no execution result"),
        (episode(plan(), execute(), verify(), truth=None), {}, "sample u: no ground_truth"),
        (episode(plan(), execute(), verify()), {"planer": "p"}, "planer: unknown"),
    ],
)
def test_wiring_mistakes_are_one_line(case, options, message):
    with pytest.raises(UserError) as error:
        rewards(case, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
