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
  - {{node_id: l, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: left}}
  - {{node_id: j, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [l]}}
  - {{node_id: r, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: right, dependencies: [j]}}
  {node}
  - {{node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [r], executable_ref: rewards.py:score}}
"""
AGAIN = "- {node_id: l2, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: left, dependencies: [r]}"
UPDATES = "\n  ".join(
    f"- {{node_id: {kind}_{p}, node_type: {type_}, node_role: {role}, policy: {p}, dependencies: [{after}]}}"
    for p in "ab"
    for kind, type_, role, after in (
        ("adv", "COMPUTE", "ADVANTAGE", "reward"),
        ("up", "MODEL_TRAIN", "ACTOR", f"adv_{p}"),
    )
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
    assert agents_heard(workflow.episode_nodes) == {0: (), 2: (0,), 1: (0, 2)}


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
        ({"node": UPDATES}, "algorithm.happo", "only_forward_compute: true"),
    ],
)
def test_what_the_compound_factor_does_not_allow_is_an_error_at_its_place(load, change, where, what):
    with pytest.raises(WorkflowError) as error:
        load(**change)
    assert where in str(error.value) and what in str(error.value)
