from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.problem import WorkflowError
from recipe.dag.settings.effects import check_samples
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text

WORKFLOW = """\
dag_id: forked
agents: [{name: left, policy: a}, {name: right, policy: b}, {name: judge, policy: fixed}]
policies: {a: {model: {path: m}, CRITIC}, b: {model: {path: m}}, fixed: {model: {path: m}, frozen: true}}
episode: {max_turns: 3, EPISODE}
algorithm: {estimator: counterfactual, OPTIONS}
nodes:
  - {id: l, agent: left, CANDIDATES}
  - {id: r, agent: right, after: l}
  - {id: j, agent: judge, after: r}
  - {id: reward, reward: rewards.py:score, SCOPE, after: j}
"""


@pytest.fixture
def load(load_text):
    def load_with(**changes):
        text = WORKFLOW
        for name in ("CRITIC", "EPISODE", "OPTIONS", "CANDIDATES", "SCOPE"):
            text = text.replace(f", {name}", f", {changes[name]}" if name in changes else "")
        return load_text(text)

    return load_with


def test_the_plan_bounds_the_forks(load):
    plan = make_plan(load())
    assert plan.max_forks == 3 * 2 * 3, "three more answers of two agents in three turns"
    (line,) = (line for line in to_text(plan).splitlines() if "with forks" in line)
    assert f"{19 * plan.max_generated_tokens:,}  up to 18 forks" in line
    assert make_plan(load(OPTIONS="decisions: 4, alternatives: 2")).max_forks == 4
    assert make_plan(load(OPTIONS="decisions: 99, alternatives: 2")).max_forks == 6


def test_one_episode_per_sample_is_enough(load):
    check_samples(OmegaConf.create({"workflow": "w", "actor_rollout_ref": {"rollout": {"n": 1}}}), load())


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"CRITIC": "critic: {}"}, "policies.a.critic", "`counterfactual` does not use values"),
        ({"EPISODE": "train_turns: last"}, "episode.train_turns", "decisions of all turns are compared"),
        ({"OPTIONS": "happo: {}"}, "algorithm.happo", "needs every call of an episode"),
        ({"OPTIONS": "kl_reward_coef: 0.1"}, "algorithm.kl_reward_coef", "use `kl_loss_coef`"),
        ({"OPTIONS": "alternatives: 1"}, "algorithm.alternatives", "at least 2"),
        ({"CANDIDATES": "candidates: {k: 2, by: r}"}, "candidates", "samples the alternatives of every decision"),
        ({"SCOPE": "scope: group"}, "scope", "what a group earns depends on all forks"),
    ],
)
def test_what_it_cannot_do_is_an_error_where_it_is_written(load, change, where, what):
    with pytest.raises(WorkflowError) as error:
        load(**change)
    assert any(where in line and what in line for line in str(error.value).splitlines()), error.value
