from __future__ import annotations

import pytest

from recipe.dag.train.alternation import actor_updates, actor_updates_at
from recipe.dag.workflow.schema import Workflow


def workflow(warmup: int = 0, **cycles: int | str | None) -> Workflow:
    """Policies by name: their train_cycle, None, or "frozen"."""
    policies = {
        name: {"model": {"path": "m"}, "frozen": True}
        if cycle == "frozen"
        else {"model": {"path": "m"}, "train_cycle": cycle}
        for name, cycle in cycles.items()
    }
    agents = [{"name": name, "policy": name} for name in policies]
    algorithm = {"estimator": "gae", "critic_warmup": warmup}
    return Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[], algorithm=algorithm)


def who_learns(flow: Workflow, steps: int) -> list[str]:
    return ["".join(name for name in flow.policies if actor_updates_at(flow, name, step)) for step in range(steps)]


@pytest.mark.parametrize(
    ("warmup", "cycles", "expected"),
    [
        (0, {"a": None, "b": None}, ["ab"] * 3),
        (0, {"a": 2, "b": 2}, ["a", "a", "b", "b", "a", "a", "b", "b"]),
        (0, {"a": 1, "x": None, "b": 1, "c": 1}, ["ax", "xb", "xc", "ax"]),
        (0, {"a": 2, "b": 3}, ["a", "a", "", "b", "ab", "ab", "", "", "a", "ab", "b", "b"]),
        (0, {"a": 1, "f": "frozen", "b": 1}, ["a", "b", "a", "b"]),
        (2, {"a": None, "b": None}, ["", "", "ab", "ab"]),
        (1, {"a": 1, "b": 1}, ["", "b", "a", "b"]),
    ],
)
def test_policies_with_a_cycle_take_turns_after_the_critics_warm_up(warmup, cycles, expected):
    assert who_learns(workflow(warmup, **cycles), len(expected)) == expected


@pytest.mark.parametrize(("steps", "updates"), [(0, 0), (5, 2), (6, 2), (7, 3)])
def test_a_schedule_counts_the_steps_in_which_the_actor_learns(steps, updates):
    assert actor_updates(workflow(warmup=1, a=1, b=1), "a", steps) == updates
