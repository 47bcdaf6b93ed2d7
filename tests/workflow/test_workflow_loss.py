from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text

WORKFLOW = """\
dag_id: alone
agents: [{{name: solver, policy: main{agent}}}]
policies: {{main: {{model: {{path: m}}}}}}
algorithm: {{{algorithm}}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, reward: rewards.py:score, after: solve}}
{nodes}"""
EXTRA = """\
  - {id: overlong, reward: rewards.py:score, after: solve}
"""
CHAIN = """  - {id: adv, train: advantage, after: reward}
  - {id: up, train: update, after: adv}
"""


@pytest.fixture
def load(load_text):
    def format_and_load(algorithm: str, *, nodes: str = "", agent: str = ""):
        return load_text(WORKFLOW.format(algorithm=algorithm, nodes=nodes, agent=agent))

    return format_and_load


def test_importance_weights_are_off_by_default_and_truncated_per_token_where_asked_for(load):
    assert load("").algorithm.importance is None
    importance = load("importance: {}").algorithm.importance
    assert (importance.cap, importance.level, importance.mode) == (2.0, "token", "truncate")


@pytest.mark.parametrize(
    ("algorithm", "shown"),
    [
        ("importance: {}", "importance ratios per token truncated at 2"),
        ("importance: {cap: 5, level: sequence, mode: mask}", "importance ratios per call masked at 5"),
        (
            "importance: {cap: 1.01, level: geometric, veto: 0.0001}",
            "importance ratios per call (geometric mean) truncated at 1.01, veto below 0.0001",
        ),
    ],
)
def test_the_plan_shows_what_weighs_the_loss(load, algorithm, shown):
    assert shown in to_text(make_plan(load(algorithm)))


def test_a_penalty_for_length_would_lose_its_size_under_gdpo_and_leave_the_range_of_a_binary_mixer(load):
    with pytest.raises(WorkflowError, match="overlong.penalty: gdpo divides each reward by its own deviation"):
        load("estimator: gdpo, overlong: {penalty: {buffer: 9}}", nodes=EXTRA.replace("overlong", "other"))
    with pytest.raises(WorkflowError, match="overlong.penalty: makes returns negative"):
        load("estimator: vdn, mixer: {loss: binary}, overlong: {penalty: {buffer: 9}}")
    with pytest.raises(WorkflowError, match="no node `overlong` pays a reward"):
        load("estimator: gdpo, weights: {overlong: 0.5}", nodes=EXTRA.replace("overlong", "other"))


def test_void_turns_can_be_dropped_where_an_agent_has_tools(load):
    assert load("drop_void_turns: true", agent=", tools: [code_interpreter]").algorithm.drop_void_turns


@pytest.mark.parametrize(
    ("algorithm", "more", "where", "what"),
    [
        ("importance: {}, old_log_probs: rollout", {}, "4:13: algorithm.importance:", "relative to the server already"),
        ("importance: {}", {"nodes": CHAIN}, "4:13: algorithm.importance:", "`train: old_log_probs`"),
        ("importance: {cap: 1}", {}, "algorithm.importance.cap", "a number above 1"),
        ("importance: {level: turn}", {}, "algorithm.importance.level", "`token`"),
        ("importance: {veto: 1}", {}, "algorithm.importance.veto", "a number below 1"),
        ("overlong: {mask: true, agents: [sovler]}", {}, "algorithm.overlong.agents[0]", "did you mean `solver`?"),
        ("mean_return_between: [0, 1]", {}, "algorithm.mean_return_between", "add that, or remove this"),
        (
            "drop_zero_variance: true, mean_return_between: [1, 0]",
            {},
            "algorithm.mean_return_between",
            "no number is above 1 and below 0",
        ),
        ("importance: {threshold: 2}", {}, "algorithm.importance.threshold", "unknown key"),
        ("overlong: {}", {}, "4:13: algorithm.overlong:", "so it does nothing"),
        ("overlong: {mask: false}", {}, "4:13: algorithm.overlong:", "so it does nothing"),
        ("overlong: {penalty: {}}", {}, "algorithm.overlong.penalty", "buffer"),
        ("overlong: {penalty: {buffer: 513}}", {}, "4:42: algorithm.overlong.penalty.buffer:", "at most 512 tokens"),
        ("overlong: {penalty: {buffer: 9}}", {"nodes": EXTRA}, "nodes[2].id", "give this node another name"),
        ("drop_void_turns: true", {}, "4:13: algorithm.drop_void_turns:", "no trained agent has tools"),
        ("agent_weights: equal", {}, "algorithm.agent_weights", "no trained policy has several agents"),
    ],
)
def test_a_weight_that_nothing_could_compute_is_an_error_at_its_place(load, algorithm, more, where, what):
    with pytest.raises(WorkflowError) as error:
        load(algorithm, **more)
    assert where in str(error.value) and what in str(error.value)
    assert len(error.value.problems) == 1
