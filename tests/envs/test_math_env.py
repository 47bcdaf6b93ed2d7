"""The mathematics env: what is a right answer, who is paid, what is said."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward import grader
from verl_dag.envs.math_env import RIGHT, WRONG, MathEnv


def step(actions: list[str], truth: object = "42"):
    return asyncio.run(MathEnv().step(actions, truth))


@pytest.mark.parametrize(
    ("answer", "truth", "solved"),
    [
        (r"so \boxed{42}", "42", True),
        (r"\boxed{41}, no, \boxed{42.0}", "42", True),
        (r"\boxed{42}, no, \boxed{41}", "42", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{42}", 42, True),
        ("the answer is 42", "42", False),
        (r"\boxed{}", "42", False),
        (r"<think>\boxed{42}</think> no", "42", False),
        ("```python\nprint(r'\\boxed{42}')\n```", "42", False),
        (r"so \boxed{42", "42", False),
        ("", "42", False),
    ],
)
def test_the_last_box_of_the_last_action_decides(answer, truth, solved):
    obs, rewards, done = step([r"I get \boxed{42}.", answer], truth)
    assert (rewards, done) == ([0.0, float(solved)], solved)
    verdict = RIGHT if solved else WRONG
    assert obs == [f"I get \\boxed{{42}}.\n\n{verdict}", f"{answer}\n\n{verdict}"]


def test_the_truth_is_not_in_an_observation():
    obs, _, _ = step(["steps", r"\boxed{1}"], "123456789")
    assert not any("123456789" in text for text in obs)


def test_a_grader_that_cannot_run_is_a_fault(monkeypatch):
    async def broken(*args, **kwargs):
        raise GraderFault("grader worker: died", where="grader")

    monkeypatch.setattr("verl_dag.envs.math_env.grade", broken)
    with pytest.raises(GraderFault) as raised:
        step([r"\boxed{\sqrt{2}}"], r"2^{1/2}")
    assert raised.value.infra


def test_symbols_are_compared_in_the_graders_process():
    before = grader.counters["symbolic"]
    assert step([r"\boxed{\frac{\sqrt{8}}{2}}"], r"\sqrt{2}")[2] is True
    assert grader.counters["symbolic"] == before + 1


def test_a_sample_without_a_truth_is_the_users_mistake():
    MathEnv().reset({"ground_truth": "0"}, 0)
    with pytest.raises(UserError, match="reward_model.ground_truth"):
        MathEnv().reset({"prompt": []}, 0)
