from __future__ import annotations

import pytest

from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.problem import WorkflowError

WORKFLOW = """\
dag_id: two
agents: [{{name: pioneer, policy: a}}, {{name: observer, policy: b}}, {{name: echo, policy: b}}]
policies: {{a: {{model: {{path: m}}{extra}}}, b: {{model: {{path: m}}}}}}
algorithm: {{cory: {{{cory}}}}}
nodes:
  - {{node_id: first, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: pioneer}}
  - {{node_id: second, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: observer, dependencies: [first]}}
  - {{node_id: third, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: echo, dependencies: [second]}}
  - {{node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [third], executable_ref: score.py:score}}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")

    def write_and_load(cory, extra=""):
        path = tmp_path / "workflow.yaml"
        path.write_text(WORKFLOW.format(cory=cory, extra=extra))
        return load_workflow(path).algorithm.cory

    return write_and_load


def test_different_agents_with_different_policies_load(load):
    assert load("roles: [pioneer, observer], every: 3").every == 3
    assert load("roles: [pioneer, observer]").every == 5


@pytest.mark.parametrize(
    ("cory", "extra", "where", "what"),
    [
        ("roles: [pioneer]", "", "algorithm.cory.roles", "at least two agents"),
        ("roles: [pioneer, observr]", "", "algorithm.cory.roles[1]", "no agent `observr`; did you mean `observer`?"),
        ("roles: [observer, echo]", "", "algorithm.cory.roles[1]", "`echo` has policy `b`, like `observer`"),
        (
            "roles: [pioneer, observer]",
            ", frozen: true",
            "algorithm.cory.roles[0]",
            "policy `a` of `pioneer` is frozen",
        ),
        ("every: 3", "", "algorithm.cory.roles", "required"),
        ("roles: [pioneer, observer], every: 0", "", "algorithm.cory.every", "at least 1"),
    ],
)
def test_mistakes_are_named_at_their_place(load, cory, extra, where, what):
    with pytest.raises(WorkflowError) as error:
        load(cory, extra)
    assert where in str(error.value) and what in str(error.value)
