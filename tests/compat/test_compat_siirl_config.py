"""What siiRL's node `config` becomes: options, overrides of verl's configuration, or a warning."""

from __future__ import annotations

import pytest

from tests.compat.test_compat_siirl import TEXT, one, said


def with_config(config: str, *, group: int = 0) -> str:
    if group == 1:
        return TEXT.replace("dependencies: [think],", f"dependencies: [think], config: {config},", 1)
    return TEXT.replace("agent_group: 0}", f"agent_group: 0, config: {config}}}", 1)


@pytest.mark.parametrize("value", ['"false"', '"False"', "0", "null"])
@pytest.mark.parametrize(
    "key",
    ["actor.use_cpgd_loss", "actor.use_kl_loss", "rollout.multi_turn.use_all_traj", "rollout.agent.rewards_with_env"],
)
def test_only_true_and_false_are_truths(key, value, problems_of):
    (problem,) = problems_of(with_config(f"{{{key}: {value}}}").encode())
    assert (problem.line, problem.where) == (3, f'nodes[0].config["{key}"]')
    assert problem.message.startswith("expected true or false, got ")


@pytest.mark.parametrize(("given", "loss"), [("true", "cpgd"), ("false", "vanilla")])
def test_cpgd_is_an_option_of_the_loss(given, loss, load_text):
    assert load_text(with_config(f"{{actor.use_cpgd_loss: {given}}}")).algorithm.policy_loss == loss


@pytest.mark.parametrize("low", ["actor.clip_ratio_low: 0.1, ", ""])
@pytest.mark.parametrize("high", [", actor: {clip_ratio_high: 0.4}", ""])
def test_an_end_of_the_clip_range_comes_before_both(low, high, load_text):
    workflow = load_text(with_config(f"{{{low}actor.clip_ratio: 0.3{high}}}"))
    algorithm = workflow.algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (0.1 if low else 0.3, 0.4 if high else 0.3)
    assert said(workflow) == said(load_text(TEXT))


def test_no_number_of_turns_is_one(load_text):
    assert load_text(with_config("{rollout.multi_turn.max_assistant_turns: null}")).episode.max_turns == 1


REFERENCE = (
    "  - {node_id: ref, node_type: MODEL_TRAIN, node_role: REFERENCE, dependencies: [reward]}\n  - {node_id: values,"
)


@pytest.mark.parametrize(
    ("config", "reference", "coef", "message"),
    [
        ("{actor.use_kl_loss: true}", False, 0.001, "algorithm.kl_loss_coef is 0.001, siiRL's default"),
        ("{rollout.n: 1}", True, 0, "the reference has no effect"),
        ("{actor.use_kl_loss: true}", True, 0.001, "algorithm.kl_loss_coef is 0.001, siiRL's default"),
        ("{actor.use_kl_loss: true, actor.kl_loss_coef: 0.01}", False, 0.01, "those without a REFERENCE node keep a"),
        ("{actor.use_kl_loss: true, actor.kl_loss_coef: 0}", False, 0, "and it is 0; this is not used"),
        ("{actor.use_kl_loss: false}", True, 0, "the reference has no effect"),
        ("{actor.kl_loss_coef: 0.01, actor.use_kl_loss: false}", True, 0, "is 0.0; this is not used"),
    ],
)
def test_a_kl_loss_has_a_reference_and_a_weight(config, reference, coef, message, load_text):
    text = with_config(config)
    text = text.replace("  - {node_id: values,", REFERENCE) if reference else text
    workflow = load_text(text)
    assert workflow.algorithm.kl_loss_coef == coef
    assert {policy.reference is not None for policy in workflow.policies.values()} == {coef > 0}
    assert one(workflow, message)


def test_one_agent_without_a_kl_loss_leaves_all_without(load_text):
    text = with_config("{actor.use_kl_loss: false}").replace(
        "dependencies: [think],", "dependencies: [think], config: {actor.use_kl_loss: true},"
    )
    workflow = load_text(text)
    assert workflow.algorithm.kl_loss_coef == 0
    assert one(workflow, "and it is 0; this is not used").startswith("4:")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rollout.log_prob_micro_batch_size_per_gpu: 16", "write `actor.ppo_micro_batch_size_per_gpu`, which serves"),
        ("ref.log_prob_micro_batch_size_per_gpu: 16", "write `actor.ppo_micro_batch_size_per_gpu`, which serves"),
        ("actor.fsdp_config.seed: 1", "nothing reads it here"),
        ("rollout.val_kwargs.seed: 1", "write `validation: {...}` of the agent"),
        ("rollout.multi_turn.format: hermes", "`tool_loop: {format: ...}` of the agent"),
        ("rollout.multi_turn.tokenization_sanity_check_mode: disable", "differ in length ends the run"),
        ("actor.use_dynamic_bsz: true, actor.ppo_micro_batch_size_per_gpu: 4", "micro-batches are formed by tokens"),
    ],
)
def test_what_nothing_reads_is_named_and_left_out(key, message, load_text):
    workflow = load_text(with_config(f"{{{key}}}"))
    assert one(workflow, message).startswith("3:")
    left = {"actor.use_dynamic_bsz": True} if "dynamic" in key else {}
    assert workflow.policies["policy_0"].config == left


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("actor.ppo_micro_batch_size_per_gpu: 4",
         {"actor.ppo_micro_batch_size_per_gpu": 4, "actor.use_dynamic_bsz": False}),
        ("actor.grad_clip: 0.5", {"actor.optim.clip_grad": 0.5}),
        ("rollout.gpu_memory_utilization: 0.3", {"rollout.gpu_memory_utilization": 0.3}),
    ],
)  # fmt: skip
def test_what_is_verls_stays_an_override(key, config, load_text):
    workflow = load_text(with_config(f"{{{key}}}"))
    assert workflow.policies["policy_0"].config == config
    assert said(workflow) == said(load_text(TEXT))


def test_to_ignore_the_end_is_sampling(load_text):
    assert load_text(with_config("{rollout.ignore_eos: true}")).agents[0].sampling.ignore_eos


def test_a_mistake_in_sampling_is_told_where_it_is_not_where_validations_is(problems_of):
    (problem,) = problems_of(with_config("{rollout.temperature: hot, rollout.val_kwargs.temperature: 0}").encode())
    assert problem.where == 'nodes[0].config["rollout.temperature"]'


def test_the_rule_rewards_where_the_env_does_not(load_text):
    text = with_config("{rollout.agent.rewards_with_env: false}", group=1)
    workflow = load_text(text)
    reward = workflow.node("reward")
    assert reward.reward.endswith(":outcome_reward") and reward.args == {"agent": "agent_1"}
    assert not workflow.node("answer").env_pays
    assert one(workflow, "the last agent's answer is compared with the ground truth").startswith("6:")
    env = load_text(text.replace("false", "true", 1))
    assert env.node("reward").reward.endswith(":env_outcome")
    assert env.node("answer").env_pays


def test_a_frozen_policy_reads_no_learning_rate(load_text):
    text = with_config("{actor.optim.lr: 1.0e-6}", group=1)
    text = text[: text.index("  - {node_id: train_answer")]
    text = text.replace(", agent_options: {share_instance: 0}", "").replace(
        "     agent_options: {share_instance: 0}", ""
    )
    lines = [line for line in said(load_text(text)) if "this has no effect on a frozen policy" in line]
    assert [line.partition(": this has")[0].partition(": ")[2] for line in lines] == [
        'nodes[1].config["actor.optim.lr"]', "nodes[4]",
    ]  # fmt: skip
