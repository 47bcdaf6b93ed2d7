from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow

WORKFLOW = """\
dag_id: two
agents: [{{name: pioneer, policy: a}}, {{name: observer, policy: b}}, {{name: echo, policy: b}}]
policies: {{a: {{model: {{path: m}}{extra}}}, b: {{model: {{path: m}}}}}}
algorithm: {{cory: {{{cory}}}}}
nodes:
  - {{id: first, agent: pioneer}}
  - {{id: second, agent: observer, after: first}}
  - {{id: third, agent: echo, after: second}}
  - {{id: reward, reward: score.py:score, after: third}}
"""


ENV = """
class Env:
    def step(self, actions, ground_truth):
        return "", 0.0, True
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n" + ENV)

    def write_and_load(cory, extra="", edits=()):
        path, text = tmp_path / "workflow.yaml", WORKFLOW.format(cory=cory, extra=extra)
        for old, new in edits:
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text)
        return load_workflow(path)

    return write_and_load


def test_different_agents_with_different_policies_load(load):
    assert load("roles: [pioneer, observer], every: 3").algorithm.cory.every == 3
    assert load("roles: [pioneer, observer]").algorithm.cory.every == 5


@pytest.mark.parametrize(
    ("cory", "extra", "where", "what"),
    [
        ("roles: [pioneer]", "", "algorithm.cory.roles", "at least two agents"),
        ("roles: [pioneer, observr]", "", "algorithm.cory.roles[1]", "no agent `observr`; did you mean `observer`?"),
        ("roles: [observer, echo]", "", "algorithm.cory.roles[1]", "`echo` has the same policy as `observer` (`b`)"),
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


def test_a_role_with_an_unknown_policy_is_one_problem(load):
    with pytest.raises(WorkflowError) as error:
        load("roles: [pioneer, observer]", edits=[("observer, policy: b", "observer, policy: bb")])
    assert [problem.where for problem in error.value.problems] == ["agents[1].policy"]


ALONE = ("score.py:score", '"recipe.dag.reward.outcome:outcome_reward", args: {agent: observer}')
DEAF = ("agent: observer, after: first", "agent: observer")
ITSELF = ("agent: echo, after: second", "agent: observer, after: second")
PLAYS = ("agent: pioneer}", "agent: pioneer, env: score.py:Env, env_pays: true}")
NOT_HEARD = "algorithm.cory.roles[1]: `observer` hears none of the other roles; let one of its nodes depend on theirs"
NOT_SHARED = (
    "algorithm.cory: each role is paid only for its own calls; add a REWARD node `recipe.dag.reward.credit:shaped` "
    "with `{shaping: shared}`"
)


def shaped(name):
    node = f"  - {{id: team, after: reward, reward: 'recipe.dag.reward.credit:shaped', args: {{shaping: {name}}}}}\n"
    return ("  - {id: reward", node + "  - {id: reward")


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([], []),  # a function of the user's may share
        ([DEAF], [NOT_HEARD]),
        ([DEAF, ITSELF, (", {name: echo, policy: b}", "")], [NOT_HEARD]),
        ([DEAF, ("nodes:", "loops: {talk: {nodes: [first, second], max_rounds: 2}}\nnodes:")], []),
        ([DEAF, ("nodes:", "episode: {max_turns: 2}\nnodes:")], []),
        ([ALONE], [NOT_SHARED]),
        ([ALONE, shaped("margin")], [NOT_SHARED]),
        ([ALONE, shaped("shared")], []),
        ([ALONE, PLAYS], []),
        ([ALONE, ("algorithm: {", "algorithm: {share_reward_in_agent: true, ")], []),
    ],
)
def test_roles_that_certainly_learn_nothing_of_each_other_are_warned_of(load, edits, expected):
    found = load("roles: [pioneer, observer]", edits=edits).warnings
    assert [f"{problem.where}: {problem.message}" for problem in found] == expected
