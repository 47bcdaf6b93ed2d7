"""What goes with an estimator, a weight of the KL and the envs' rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.marft.credit import ESTIMATORS
from recipe.marft.flags import FLAGS
from tests.marft.workflows import MARFT, NO_KL, SIIRL, WORKFLOWS, change, written

SHIPPED = sorted(WORKFLOWS.glob("*.yaml")) + sorted(SIIRL.glob("*.yaml")) + sorted(SIIRL.glob("*.json"))


def values(flag: str) -> list[str]:
    takes = FLAGS[flag].kind.takes.replace("True or False", "one of True, False").replace(", or null", ", null")
    return takes.removeprefix("one of ").split(", ") if takes.startswith("one of ") else []


ENUMERATED = [f"{flag}={value}" for flag in FLAGS for value in values(flag)]


@pytest.mark.parametrize("argument", ENUMERATED)
def test_every_value_of_an_enumerated_flag_loads_or_is_refused_by_its_name(argument):
    for workflow in ("workflow_marft.yaml", "workflow_ppo.yaml", "workflow_grpo.yaml"):
        try:
            text, flow = change(WORKFLOWS / workflow, argument)
        except UserError as error:
            assert str(error).startswith(f"{argument}: ") and "\n" not in str(error)
        else:
            assert load_workflow("copy.yaml", text) == flow.model_copy(
                update={"path": str(Path("copy.yaml").resolve())}
            )


PAYING_MANY = (
    "workflow_cory.yaml",
    "workflow_retool_ma.yaml",
    "workflow_retool_ma_lora.yaml",
    "workflow_retool_ma_revise.yaml",
    "workflow_retool_ma_separate.yaml",
    "workflow_retool_ma_small.yaml",
    "workflow_retool_ma_transcript.yaml",
)
"""With a reward node that pays several agents for one reward, which a chain of credit would count again."""


UNCOACHED = [path for path in SHIPPED if not any(word in path.read_text() for word in ("name: coach", "candidates:"))]
"""Without those that siiRL's flags cannot express: neither a coach nor candidates have a critic, and a coach's actions
are paid one by one."""


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("source", UNCOACHED, ids=[path.name for path in UNCOACHED])
def test_any_workflow_takes_any_estimator(source, estimator):
    arguments = f"algorithm.adv_estimator={estimator} actor.kl_loss_coef=0"
    if source.name in PAYING_MANY and estimator == "gae_marft":
        with pytest.raises(UserError, match=r"^algorithm.adv_estimator=gae_marft: nodes\[\d\].*more than once"):
            change(source, arguments)
        return
    flow = change(source, arguments)[1]
    assert flow.algorithm.estimator == ESTIMATORS[estimator]["estimator"]
    trained = [flow.policies[name] for name in flow.trained_policies()]
    assert all((policy.critic is None) == (flow.algorithm.estimator == "grpo") for policy in trained)
    assert not any(policy.reference for policy in flow.policies.values())


@pytest.mark.parametrize(
    ("text", "arguments", "reward", "loss"),
    [
        (NO_KL, "actor.use_kl_loss=True", 0, 0.001),
        (NO_KL, "actor.use_kl_loss=True actor.kl_loss_coef=0.3", 0, 0.3),
        (NO_KL, "algorithm.use_kl_in_reward=True", 0.001, 0),
        (MARFT.replace("kl_loss_coef: 0.01", "kl_reward_coef: 0.7"), "algorithm.use_kl_in_reward=True", 0.7, 0),
        (MARFT.replace("kl_loss_coef: 0.01", "kl_reward_coef: 0.7"), "algorithm.kl_ctrl.kl_coef=0.1", 0.1, 0),
        (MARFT, "actor.use_kl_loss=True", 0, 0.01),
        (MARFT, "actor.use_kl_loss=False algorithm.use_kl_in_reward=False", 0, 0),
        (MARFT, "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0", 0, 0.01),
    ],
)
def test_the_weights_of_the_kl_and_the_reference(text, arguments, reward, loss, tmp_path):
    flow = change(written(tmp_path, text), arguments)[1]
    assert (flow.algorithm.kl_reward_coef, flow.algorithm.kl_loss_coef) == (reward, loss)
    assert {policy.reference is not None for policy in flow.policies.values()} == {bool(reward or loss)}


@pytest.mark.parametrize(
    ("source", "agent"), [(WORKFLOWS / "workflow_marft.yaml", "actor"), (SIIRL / "marft.yaml", "agent_1")]
)
def test_without_the_envs_rewards_the_rule_pays(source, agent, tmp_path):
    text, flow = change(source, "rollout.agent.rewards_with_env=False")
    (reward,) = flow.reward_nodes
    assert reward.function == "recipe.dag.reward.outcome:outcome_reward"
    assert reward.args == {"agent": agent}
    assert not any(node.env_pays for node in flow.rollout_nodes)
    (tmp_path / "off.yaml").write_text(text)
    flow = change(tmp_path / "off.yaml", "rollout.agent.rewards_with_env=True")[1]
    (reward,) = flow.reward_nodes
    assert reward.function.endswith(":env_outcome") and reward.args == {}
    assert any(node.env_pays for node in flow.rollout_nodes)


def test_programs_have_no_rule():
    with pytest.raises(UserError, match="rewards_with_env=False: only the env can judge a program"):
        change(WORKFLOWS / "workflow_marft_code.yaml", "rollout.agent.rewards_with_env=False")
