"""Reward nodes with the scope `group`: what is refused, at the marked place, and what the plan shows."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.settings.effects import check_samples
from recipe.dag.workflow.mermaid import to_mermaid
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text
from recipe.dag.workflow.to_yaml import to_yaml
from recipe.dag.workflow.user_files import user_files

GROUP = "recipe.dag.reward.group"
GOOD = """\
dag_id: demo
agents: [{name: solver, policy: p}, {name: judge, policy: p}]
policies: {p: {model: {path: m}}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver}
  - {id: judge, agent: judge, after: solve}
  - {id: rank, reward: group.py:rank, scope: group, args: {scale: 2.0}, after: judge}
"""
CODE = """
def rank(episodes, *, scale=1.0): return [{} for _ in episodes]
def score(episode, *, scale=1.0): return {}
def compare(first, second): return 0.5
def alone(first): return 0.5
"""


@pytest.fixture(autouse=True)
def code(folder):
    (folder / "group.py").write_text(CODE)


def rewarded(ref: str, args: str = "{}", scope: str = "group") -> tuple[tuple[str, str], ...]:
    return (("group.py:rank", ref), ("scope: group", f"scope: {scope}"), ("{scale: 2.0}", args))


def test_a_node_of_the_group_is_shown_and_written_again(load_text, folder):
    flow = load_text(GOOD)
    assert flow.node("rank").scope == "group" and flow.node("solve").scope == "episode"
    plan = make_plan(flow)
    assert "rank [group.py:rank, scores the group]" in to_text(plan)
    assert "rank<br/>reward of the group" in to_mermaid(plan)
    assert "scope: group" in to_yaml(flow) and load_text(to_yaml(flow), "again.yaml").nodes == flow.nodes


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ((("scale: 2.0", "§scales: 2.0"),), "takes no `scales`; did you mean `scale`?"),
        ((("scope: group", "scope: §all"),), "`episode`, `group`, got 'all'"),
        (rewarded("§group.py:score"), "takes `episode`, so write `scope: episode`, or rename the argument"),
        (rewarded("§group.py:rank", scope="episode"), "takes `episodes`, so write `scope: group`, or rename"),
        (rewarded(f'§"{GROUP}:diversity"', scope="episode"), "takes `episodes`, so write `scope: group`"),
        (rewarded('§"recipe.dag.reward.outcome:env_outcome"'), "takes `episode`, so write `scope: episode`"),
        (
            (("{id: judge, agent: judge", "{id: judge, agent: judge, §scope: group"),),
            "only reward nodes read this, and this is a rollout node",
        ),
        # the published key that was never read
        (rewarded(f'"{GROUP}:majority_label"', "{§use_ttrl: true}"), "takes no `use_ttrl`"),
        (rewarded(f'"{GROUP}:majority_label"', "{§ttrl: true}"), "takes no `ttrl`"),
        (rewarded(f'"{GROUP}:majority_label"', "{agent: §solvers}"), "no agent `solvers`; did you mean `solver`?"),
        (rewarded(f'"{GROUP}:majority_label"', "{ties: §last}"), "expected one of `none`, `first`, got 'last'"),
        (rewarded(f'"{GROUP}:majority_label"', "{min_share: §2}"), "expected a number from 0 to 1"),
        (rewarded(f'"{GROUP}:diversity"', "{penalty: §1}"), "expected true or false, got 1"),
        (rewarded(f'"{GROUP}:diversity"', "{measure: §words}"), "expected one of `answer`, `ngrams`"),
        (
            rewarded(f'§"{GROUP}:pairwise_ranking"'),
            "needs `compare: file.py:function` or `judge: <node>`, and has neither",
        ),
        (rewarded(f'§"{GROUP}:pairwise_ranking"', '{judge: judge, compare: "group.py:compare"}'), "and has both"),
        (rewarded(f'"{GROUP}:pairwise_ranking"', "{judge: §jury}"), "no node `jury`"),
        (rewarded(f'"{GROUP}:pairwise_ranking"', '{compare: §"group.py:best"}'), "defines no `best`"),
        (rewarded(f'"{GROUP}:pairwise_ranking"', '{compare: §"group.py:alone"}'), "`first`, `second`, takes `first`"),
        (rewarded(f'"{GROUP}:pairwise_ranking"', "{compare: §3}"), "expected file.py:function, got 3"),
        (rewarded(f'"{GROUP}:pairwise_ranking"', '{compare: "group.py:compare", §key: score}'), "only `judge` reads"),
    ],
)
def test_a_mistake_is_one_problem_where_it_is_written(expect_one_problem, edits, message):
    expect_one_problem(GOOD, edits, message)


def test_the_default_agent_must_exist(expect_one_problem):
    edits = (("name: solver", "name: writer"), ("agent: solver", "agent: writer"))
    message = "there is no agent `solver`; write `args: {agent: writer}`"
    expect_one_problem(GOOD, (*edits, *rewarded(f'§"{GROUP}:majority_label"')), message)


def test_a_reward_that_is_copied_is_refused_where_the_estimator_carries_it(expect_one_problem):
    edits = (("estimator: grpo", "estimator: vdn"), *rewarded(f'§"{GROUP}:majority_label"'))
    expect_one_problem(GOOD, edits, "so it would count more than once")


def test_the_file_of_a_comparison_counts_among_the_workflows_files(load_text, folder):
    (folder / "other.py").write_text("def compare(first, second): return 0.5\n")
    text = GOOD
    for old, new in rewarded(f'"{GROUP}:pairwise_ranking"', '{compare: "other.py:compare"}'):
        text = text.replace(old, new)
    assert [path.name for path in user_files(load_text(text)).values()] == ["other.py"]


def test_training_needs_several_episodes_of_a_sample(load_text):
    flow = load_text(GOOD.replace("estimator: grpo", "estimator: reinforce"))
    check_samples(OmegaConf.create({"workflow": "w", "actor_rollout_ref": {"rollout": {"n": 2}}}), flow)
    with pytest.raises(UserError, match="the reward node `rank` compares the episodes of a sample"):
        check_samples(OmegaConf.create({"workflow": "w", "actor_rollout_ref": {"rollout": {"n": 1}}}), flow)
