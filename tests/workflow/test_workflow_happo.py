from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.workflow.graph import agents_heard

WORKFLOW = """\
dag_id: two
agents: [{{name: left, policy: {left}}}, {{name: right, policy: b}}, {{name: judge, policy: fixed}}]
policies: {{a: {{model: {{path: m}}{extra}}}, b: {{model: {{path: m}}}}, fixed: {{model: {{path: m}}, frozen: true}}}}
algorithm: {{happo: {{{happo}}}{algorithm}}}
nodes:
  - {{id: l, agent: left}}
  - {{id: j, agent: judge, after: l}}
  - {{id: r, agent: right, after: j}}
  {node}
  - {{id: reward, reward: rewards.py:score, after: r}}
"""
AGAIN = "- {id: l2, agent: left, after: r}"
UPDATES = "\n  ".join(
    f"- {{id: {name}_{p}, train: {step}, policy: {p}, after: {after}}}"
    for p in "ab"
    for name, step, after in (("adv", "advantage", "reward"), ("up", "update", f"adv_{p}"))
)


@pytest.fixture
def load(load_text):
    def format_and_load(happo="", *, left="a", extra="", algorithm="", node=""):
        return load_text(WORKFLOW.format(happo=happo, left=left, extra=extra, algorithm=algorithm, node=node))

    return format_and_load


def test_a_policy_per_agent_loads(load):
    workflow = load("order: reverse_topological, ratio: clamped, bound: 1.5")
    assert (workflow.algorithm.happo.order, workflow.algorithm.happo.bound) == ("reverse_topological", 1.5)
    assert (load().algorithm.happo.ratio, load().algorithm.happo.bound) == ("clamped", 4.0)
    assert agents_heard(workflow.episode_nodes) == {"left": (), "judge": ("left",), "right": ("left", "judge")}


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"left": "b", "extra": ", frozen: true"}, "algorithm.happo", "left, right share policy `b`"),
        ({"extra": ", frozen: true"}, "algorithm.happo", "at least two trained policies"),
        ({"extra": ", train_cycle: 1"}, "policies.a.train_cycle", "every policy learns in every step"),
        ({"happo": "ratio: sequence_sum, bound: 1.5"}, "algorithm.happo.bound", "only `ratio: clamped` reads this"),
        ({"algorithm": ", old_log_probs: rollout"}, "algorithm.old_log_probs", "before and after an update"),
        (
            {"happo": "order: reverse_topological", "node": AGAIN},
            "algorithm.happo.order",
            "hear each other: left -> right",
        ),
        ({"happo": "order: sorted"}, "algorithm.happo.order", "expected one of `random`"),
        ({"algorithm": ", drop_zero_variance: true"}, "algorithm.drop_zero_variance", "needs every call of an episode"),
        (
            {"algorithm": "}\nepisode: {max_turns: 2, train_turns: last"},
            "episode.train_turns",
            "needs the calls of all turns",
        ),
        ({"node": UPDATES}, "algorithm.happo", "train: old_log_probs"),
    ],
)
def test_what_the_compound_factor_does_not_allow_is_an_error_at_its_place(load, change, where, what):
    with pytest.raises(WorkflowError) as error:
        load(**change)
    assert where in str(error.value) and what in str(error.value)
