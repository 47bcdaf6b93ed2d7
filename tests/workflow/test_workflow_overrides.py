"""`config`: overrides of verl's configuration, and which of them say nothing."""

from __future__ import annotations

import pytest

TEXT = """\
dag_id: demo
agents: [{name: a, policy: p}]
policies:
  p: {model: {path: m}, lr: 1.0e-6, config: {actor.optim.weight_decay: 0},
    critic: {lr: 1.0e-6, config: {strategy: fsdp2}}}
algorithm: {estimator: gae, clip_ratio_low: 0.1}
nodes:
  - {id: a, agent: a, config: {rollout.dtype: bfloat16}}
  - {id: r, reward: rewards.py:score, after: a}
"""
POLICYS, CRITICS, NODES = "{actor.optim.weight_decay: 0}", "{strategy: fsdp2}", "{rollout.dtype: bfloat16}"


@pytest.mark.parametrize(
    ("where", "keys", "message"),
    [
        (POLICYS, "{§actor.optim.lr: 5.0e-5}", "`policies.p.lr` says this; set it there"),
        (POLICYS, "{actor: {optim: {§lr: 1.0e-6}}}", "`policies.p.lr` says this; set it there"),
        (POLICYS, "{§model.path: other}", "`policies.p.model.path` says this"),
        (POLICYS, "{§model.lora_rank: 16}", "`policies.p.lora` says this; set it there"),
        (POLICYS, "{§actor.clip_ratio_low: 0.9}", "`algorithm.clip_ratio_low` says this, for all policies"),
        (POLICYS, "{§actor.ppo_epochs: 1}", "`algorithm.epochs` says this"),
        (POLICYS, "{§actor.use_kl_loss: true}", "`algorithm.kl_loss_coef` says this"),
        (POLICYS, "{§actor.policy_loss.loss_mode: gspo}", "`algorithm.policy_loss` says this"),
        (POLICYS, "{§actor.fsdp_config.seed: 3}", "nothing reads it here; remove it (docs/migrating.md"),
        (POLICYS, "{§actor.strategi: fsdp2}", "nothing reads it here; did you mean `actor.strategy`?"),
        (POLICYS, "{§weight_decay: 0}", "nothing reads it here; did you mean `actor.optim.weight_decay`?"),
        (POLICYS, "{§actor.grad_clip: 0.5}", "nothing reads it; write `actor.optim.clip_grad`"),
        (POLICYS, "{§actor.ppo_mini_batch_size: 8}", "counted by `algorithm.mini_batches`"),
        (POLICYS, "{§rollout.log_prob_micro_batch_size_per_gpu: 8}", "write `actor.ppo_micro_batch_size_per_gpu`"),
        (POLICYS, "{§ref.log_prob_micro_batch_size_per_gpu: 8}", "write `actor.ppo_micro_batch_size_per_gpu`"),
        (
            POLICYS,
            "{actor.use_dynamic_bsz: true, §actor.ppo_micro_batch_size_per_gpu: 8}",
            "this has no effect with `actor.use_dynamic_bsz: true`",
        ),
        (POLICYS, "{§rollout.temperature: 0.1}", "write `sampling: {temperature: ...}` of the agent"),
        (POLICYS, "{rollout: {val_kwargs: {§top_p: 0.1}}}", "write `validation: {...}` of the agent"),
        (POLICYS, "{§rollout.n: 3}", "pass `actor_rollout_ref.rollout.n=...` to the run"),
        (NODES, "{§rollout.top_p: 0.9}", "write `sampling: {top_p: ...}` of the agent"),
        (NODES, "{§rollout.multi_turn.max_assistant_turns: 3}", "`episode.max_turns` says"),
        (NODES, "{§actor.optim.lr: 1.0e-6}", "`policies.p.lr` says this"),
        (CRITICS, "{§optim.lr: 9.0e-3}", "`policies.p.critic.lr` says this; set it there"),
        (CRITICS, "{§model.path: other}", "`policies.p.critic.model.path` says this"),
        (CRITICS, "{§cliprange_value: 0.5}", "`policies.p.critic.cliprange_value` says this"),
        (CRITICS, "{§ppo_epochs: 5}", "`policies.p.critic.epochs` says this"),
        (CRITICS, "{§ppo_mini_batch_size: 5}", "counted by `policies.p.critic.mini_batches`"),
        (CRITICS, "{§forward_max_token_len_per_gpu: 5}", "write `ppo_max_token_len_per_gpu`"),
        (
            CRITICS,
            "{use_dynamic_bsz: true, §ppo_micro_batch_size_per_gpu: 5}",
            "this has no effect with `use_dynamic_bsz: true`",
        ),
    ],
)
def test_what_the_workflow_says_itself_or_nobody_reads_is_an_error(where, keys, message, expect_one_problem):
    expect_one_problem(TEXT, ((where, keys),), message)


def test_a_critics_tokenizer_is_its_policys(expect_one_problem):
    edit = ("critic: {lr: 1.0e-6", "critic: {model: {path: v, §tokenizer_path: t}, lr: 1.0e-6")
    expect_one_problem(TEXT, (edit,), "a critic reads the tokens of its policy; remove `tokenizer_path`")


def test_a_number_of_rows_switches_batches_by_tokens_off(load_text):
    text = TEXT.replace("actor.optim.weight_decay: 0", "actor: {ppo_micro_batch_size_per_gpu: 4}")
    policy = load_text(text).policies["p"]
    assert policy.config["actor.use_dynamic_bsz"] is False and "use_dynamic_bsz" not in policy.critic.config
    by_node = load_text(TEXT.replace(NODES, "{actor.ppo_micro_batch_size_per_gpu: 4}")).policies["p"]
    assert by_node.config["actor.use_dynamic_bsz"] is False
    of_critic = load_text(TEXT.replace(CRITICS, "{ppo_micro_batch_size_per_gpu: 4}")).policies["p"]
    assert of_critic.critic.config["use_dynamic_bsz"] is False and "actor.use_dynamic_bsz" not in of_critic.config


def test_keys_that_verls_workers_read_are_free(load_text):
    policy = load_text(TEXT).policies["p"]
    assert policy.config == {"actor.optim.weight_decay": 0, "rollout.dtype": "bfloat16"}
    assert policy.critic.config == {"strategy": "fsdp2"}
