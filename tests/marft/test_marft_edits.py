"""The edited workflow: what goes with an edit, where edits find no place, and who is blamed for a bad result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import Problem
from recipe.dag.loading.workflow_copy import WorkflowCopy
from recipe.dag.loading.workflow_file import load_workflow
from recipe.marft.edits import edited
from recipe.marft.flags import translate
from tests.marft.workflows import MARFT, NO_KL, SIIRL, WORKFLOWS, change, written

CRITIC = "critic: {lr: 1.0e-5, cliprange_value: 0.5}"


def test_shared_critics_keep_their_owners_settings(tmp_path):
    head, _, tail = MARFT.rpartition(CRITIC)
    file = written(tmp_path, f"{head}critic: {{share: reasoner}}{tail}")
    policies = yaml.safe_load(change(file, "critic.optim.lr=2.0")[0])["policies"]
    assert policies["reasoner"]["critic"] == {"lr": 2.0, "cliprange_value": 0.5}
    assert policies["actor"]["critic"] == {"share": "reasoner"}


CHAIN = r"estimator: gae_chain\n  gamma.*\n  lam.*\n  whiten.*"
NO_CRITIC = re.sub(CHAIN, "estimator: grpo", MARFT.replace(CRITIC, ""))
NO_ENV = (WORKFLOWS / "workflow_no_tool.yaml").read_text()
GREEDY = MARFT.replace("max_tokens: 2048}", "max_tokens: 2048}\n    validation: {temperature: 0}")
ENV_ONLY = MARFT[: MARFT.index("  # Adds no reward")]
GPU = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (NO_CRITIC, "critic.optim.lr=1", "critic.optim.lr=1: it has no effect on this workflow (its estimator"),
        (NO_CRITIC, "algorithm.gamma=1", "algorithm.gamma=1: algorithm.gamma: estimator `grpo` does not use this"),
        (NO_CRITIC, "trainer.critic_warmup=2", "trainer.critic_warmup=2: algorithm.critic_warmup: estimator `grpo`"),
        (MARFT, "algorithm.share_reward_in_agent=True", "algorithm.share_reward_in_agent=True: algorithm.share_reward"),
        (NO_ENV, "rollout.agent.rewards_with_env=True", f"{GPU}.agent.rewards_with_env=True: no node of the workflow"),
        (
            ENV_ONLY,
            "rollout.agent.rewards_with_env=False",
            f"{GPU}.agent.rewards_with_env=False: without the env there",
        ),
        (
            MARFT,
            "algorithm.kl_ctrl.kl_coef=0.5",
            "algorithm.kl_ctrl.kl_coef=0.5: it has no effect without algorithm.use",
        ),
        (NO_KL, "actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.kl_loss_coef=0.5: it has no effect without actor_"),
        (
            GREEDY,
            "rollout.val_kwargs.do_sample=True",
            f"{GPU}.val_kwargs.do_sample=True: agent `reasoner` validates at",
        ),
        (MARFT, "actor.ppo_mini_batch_size=129", "actor_rollout_ref.actor.ppo_mini_batch_size=129: exceeds data"),
        (
            MARFT,
            "algorithm.adv_estimator=cpgd actor.clip_ratio_c=4",
            "actor_rollout_ref.actor.clip_ratio_c=4: algorithm.clip_ratio_c: policy_loss `cpgd` does not read this",
        ),
        (
            MARFT,
            "algorithm.adv_estimator=grpo critic.optim.lr=1",
            "critic.optim.lr=1: it has no effect on this workflow",
        ),
    ],
)
def test_what_cannot_be_is_told_of_its_flag(text, arguments, message, tmp_path):
    with pytest.raises(UserError) as error:
        change(written(tmp_path, text), arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        change(written(tmp_path, NO_CRITIC), "algorithm.gamma=1 algorithm.lam=1")
    lines = str(error.value).split("\n")
    assert [line.partition(": ")[0] for line in lines] == ["algorithm.gamma=1", "error"]


def test_siirls_own_file_is_rewritten_first(tmp_path):
    """Its paths hold wherever the copy is."""
    copy = tmp_path / "elsewhere" / "w.yaml"
    arguments = "algorithm.adv_estimator=gae_marft rollout.temperature=0.5 critic.optim.lr=1e-4"
    flow = change(SIIRL / "marft.yaml", arguments, copy)[1]
    assert flow.algorithm.estimator == "gae_chain" and len(flow.trained_policies()) == 2
    assert {agent.sampling.temperature for agent in flow.agents} == {0.5}
    assert flow.policies["policy_0"].critic.lr == 1e-4 and flow.policies["policy_1"].critic.share == "policy_0"


@pytest.mark.parametrize(
    ("in_the_file", "arguments", "turns"),
    [
        (None, "rollout.multi_turn.max_assistant_turns=3", (3, "last")),
        (None, "rollout.multi_turn.max_assistant_turns=3 rollout.multi_turn.use_all_traj=True", (3, "all")),
        ("true", "rollout.multi_turn.max_assistant_turns=3", (3, "all")),
        ("false", "rollout.multi_turn.max_assistant_turns=3", (3, "last")),
    ],
)
def test_siirls_file_trains_on_the_last_turn_unless_it_is_told_otherwise(in_the_file, arguments, turns, tmp_path):
    text = (SIIRL / "marft.yaml").read_text()
    for name in ("process.py", "envs.py"):
        (tmp_path / name).symlink_to(SIIRL / name)
    if in_the_file is not None:
        text = text.replace("  rollout.n: 1\n", f"  rollout.multi_turn.use_all_traj: {in_the_file}\n")
    (tmp_path / "siirl.yaml").write_text(text)
    episode = change(tmp_path / "siirl.yaml", arguments)[1].episode
    assert (episode.max_turns, episode.train_turns) == turns


@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_the_copy_says_what_it_is_and_keeps_comments(bom, tmp_path):
    file = written(tmp_path, bom + MARFT)
    text = change(file, "algorithm.gamma=0.5 ++algorithm.lam=0.9")[0]
    assert text.splitlines()[0] == f"# {file}, changed by algorithm.gamma=0.5 algorithm.lam=0.9"
    assert "# The actors are updated alternately for 15 steps" in text


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "own.yaml").write_bytes(MARFT.encode("utf-16"))
    with pytest.raises(UserError, match="own.yaml: only a file in UTF-8 can be edited"):
        edited(load_workflow(WORKFLOWS / "workflow_marft.yaml").model_copy(update={"path": str(tmp_path / "own.yaml")}),
               translate(["algorithm.gamma=1"]).edits, batch_size=1, at=Path("w.yaml"))  # fmt: skip


def test_merged_keys_go_like_others(tmp_path):
    text = MARFT.replace("policies:\n", "x-base: &base {train_cycle: 15, reference: true, critic: {}}\npolicies:\n")
    own = f"    {CRITIC}\n    train_cycle: 15\n    reference: true\n"
    file = written(tmp_path, text.replace(own, "    <<: *base\n"))
    assert load_workflow(file).policies["actor"].reference
    flow = change(file, "algorithm.adv_estimator=grpo actor.kl_loss_coef=0")[1]
    assert {(policy.critic, policy.reference, policy.train_cycle) for policy in flow.policies.values()} == {
        (None, None, 15)
    }


def test_an_alias_is_changed_where_it_is_meant(tmp_path):
    text = MARFT.replace("    sampling: {temp", "    sampling: &s {temp", 1)
    text = text.replace("max_tokens: 2048}\n", "max_tokens: 2048}\n    validation: *s\n", 1)
    flow = change(written(tmp_path, text.replace("&s {temp", "&s {top_p: 0.5, temp")), "rollout.top_p=0.75")[1]
    assert (flow.agents[0].sampling.top_p, flow.agents[0].validation.top_p) == (0.75, 0.5)


def test_who_is_blamed():
    copy = WorkflowCopy("algorithm: {gamma: 1}\nagents: [{sampling: {}}]\n")
    copy.set(("algorithm", "gamma"), 2, "gamma=2")
    copy.set(("algorithm", "estimator"), "gae_chain", "estimator=chain")
    copy.set(("agents", 0, "sampling", "top_p"), 9, "top_p=9")
    blamed = {
        where: copy.blamed(Problem("f", 1, 1, where, "wrong"))
        for where in ("algorithm.gamma", "algorithm.gamma.x", "agents[0].sampling", "policies.a")
    }
    assert list(blamed.values()) == ["gamma=2", "gamma=2", "top_p=9", "gamma=2 estimator=chain top_p=9"]
    assert copy.blamed(Problem("f", 1, 1, "nodes[3]", "gae_chain hands rewards on")) == "estimator=chain"
