"""Warnings about agents that hardly learn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from recipe.dag.report.starvation import PATIENCE, Starvation, trend

AGENTS = [SimpleNamespace(name=name, policy=policy) for name, policy in (("a", "one"), ("b", "one"), ("c", "two"))]


@pytest.fixture
def starvation():
    return Starvation(SimpleNamespace(agents=AGENTS))  # pyright: ignore


def test_an_agent_whose_weights_others_capture_is_named_once_it_lasts(starvation):
    metrics = {"agent/a/grad_mass": 0.99, "agent/b/grad_mass": 0.01, "agent/c/grad_mass": 0.001}
    lines = [list(starvation.lines(metrics)) for _ in range(3 * PATIENCE)]
    (line,) = lines[PATIENCE - 1]
    assert line.startswith("agent b has 1.0% of the gradient mass of policy one")
    assert sum(map(len, lines)) == 1


@pytest.mark.parametrize(
    ("reward", "accuracy", "warned"),
    [
        (lambda step: step / 20, lambda step: 0.3 + step % 2 / 50, True),
        (lambda step: step / 20, lambda step: 0.9 - step / 40, True),
        (lambda step: step / 20, lambda step: 0.3 + step / 40, False),
        (lambda step: step / 20, lambda step: 0.95, False),
        (lambda step: step % 2, lambda step: 0.3, False),
        (lambda step: step / 20, lambda step: None, False),
    ],
)
def test_a_reward_that_rises_while_accuracy_does_not_is_named_once(starvation, reward, accuracy, warned):
    lines = []
    for step in range(20):
        metrics = {"agent/a/reward/mean": reward(step) + step * 7 % 3 / 100, "episode/accuracy": accuracy(step)}
        lines += starvation.lines({key: value for key, value in metrics.items() if value is not None})
    assert len(lines) == warned and all(line.startswith("the reward of agent a rises by ") for line in lines)


def test_a_trend_is_in_standard_errors_of_its_slope():
    values = [1.0, 2.0, 2.0, 4.0, 4.0, 5.0, 8.0, 7.0, 9.0, 9.0]
    (slope, _), covariance = np.polyfit(range(10), values, 1, cov=True)
    assert trend(values) == pytest.approx(slope / covariance[0, 0] ** 0.5)
    assert trend([2.0] * 8) == 0.0 and trend([float(step) for step in range(8)]) > 1e6


def test_a_step_in_between_starts_the_count_anew(starvation):
    for mass in (0.0, 0.0, 0.5, 0.0, 0.0):
        assert list(starvation.lines({"agent/b/grad_mass": mass})) == []
    assert list(starvation.lines({"agent/b/grad_mass": 0.0}))


def test_an_agent_whose_rewards_never_differ_starves_unless_all_is_solved(starvation):
    solved = {"agent/c/silent_groups": 1.0, "episode/accuracy": 0.95}
    assert [line for _ in range(PATIENCE + 1) for line in starvation.lines(solved)] == []
    unsolved = solved | {"episode/accuracy": 0.2}
    (line,) = [line for _ in range(PATIENCE + 1) for line in starvation.lines(unsolved)]
    assert line.startswith("agent c starves: in 100% of its groups")
    assert list(starvation.lines({})) == []
