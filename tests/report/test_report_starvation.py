"""Warnings about agents that hardly learn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipe.dag.report.starvation import PATIENCE, Starvation

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
