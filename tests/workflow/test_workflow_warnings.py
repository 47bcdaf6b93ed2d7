"""What is legal, yet seldom meant: it loads, and a warning says at which place."""

from __future__ import annotations

import pytest

from recipe.dag.workflow.loader import load_workflow

TEXT = """\
dag_id: demo
agents:
  - {name: left, policy: one, role: solver}
  - {name: right, policy: two, role: solver}
  - {name: judge, policy: two}
policies:
  one: {model: {path: m}, train_cycle: 5}
  two: {model: {path: m}, train_cycle: 5}
algorithm: {group_by: [uid, role]}
nodes:
  - {node_id: l, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: left}
  - {node_id: r, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: right}
  - {node_id: j, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [l, r]}
  - {node_id: pay, node_type: COMPUTE, node_role: REWARD, dependencies: [j], executable_ref: score.py:score}
"""
NOT_POOLED = "9:29: algorithm.group_by[1]: role `solver` has several policies (one, two), whose calls are not compared"
UNEVEN = (
    "8:27: policies.two.train_cycle: the train_cycles differ (one 5, two 3): in some steps several of these policies "
    "learn, in some none"
)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", [NOT_POOLED]),
        ("right, policy: two", "right, policy: one", []),
        ("role: solver}\n  - {name: right", "role: first}\n  - {name: right", []),
        ("m}, train_cycle: 5}\nalg", "m}, train_cycle: 3}\nalg", [UNEVEN, NOT_POOLED]),
    ],
)
def test_what_is_seldom_meant_is_warned_of(tmp_path, old, new, expected):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(TEXT.replace(old, new, 1))
    found = load_workflow(tmp_path / "flow.yaml").warnings
    assert [f"{p.line}:{p.column}: {p.where}: {p.message}" for p in found] == expected
