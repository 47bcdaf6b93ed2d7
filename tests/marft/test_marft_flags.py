"""siiRL's flags, one by one: what each means here, or why it means nothing."""

from __future__ import annotations

from functools import partial

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.settings.values import KL_TYPES, TRACKERS
from recipe.marft.flags import FLAGS, translate
from tests.marft.workflows import WORKFLOWS, change

RUN = "actor_rollout_ref"


def has(part, **keys):
    """Whether `part(workflow)`, one model or several, has these values."""

    def holds(flow):
        found = part(flow)
        return all(one.model_dump().items() >= keys.items() for one in (found if isinstance(found, list) else [found]))

    return holds


agents = partial(has, lambda flow: [agent.sampling for agent in flow.agents])
validation = partial(has, lambda flow: [agent.validation for agent in flow.agents])
algorithm = partial(has, lambda flow: flow.algorithm)
critics = partial(has, lambda flow: [policy.critic for policy in flow.policies.values()])
actors = partial(has, lambda flow: [*flow.policies.values()])
episode = partial(has, lambda flow: flow.episode)


KEPT = {"refresh": None}
GPU = f"{RUN}.rollout"
ACTOR = f"{RUN}.actor"
IN_THE_WORKFLOW = [
    ("algorithm.adv_estimator=gae_marft", algorithm(estimator="gae_chain")),
    ("algorithm.gamma=0.99", algorithm(gamma=0.99)),
    ("algorithm.lam=0.95", algorithm(lam=0.95)),
    ("algorithm.share_reward_in_agent=False", algorithm(share_reward_in_agent=False)),
    ("algorithm.use_kl_in_reward=True", algorithm(kl_reward_coef=0.001)),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02", algorithm(kl_reward_coef=0.02)),
    ("algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.02", algorithm(kl_reward_coef=0.0)),
    ("algorithm.adv_estimator=gae", algorithm(estimator="gae", share_reward_in_agent=True)),
    ("algorithm.adv_estimator=grpo", algorithm(estimator="grpo", share_reward_in_agent=True)),
    ("algorithm.adv_estimator=grpo", actors(critic=None, reference=KEPT)),
    ("algorithm.adv_estimator=grpo trainer.critic_warmup=0", algorithm(estimator="grpo")),
    ("algorithm.adv_estimator=cpgd", algorithm(estimator="grpo", policy_loss="cpgd")),
    ("algorithm.adv_estimator=gae algorithm.share_reward_in_agent=False", algorithm(share_reward_in_agent=False)),
    (f"{GPU}.agent.rewards_with_env=True", lambda flow: flow.node("rollout_actor").env_pays),
    (f"{GPU}.multi_turn.max_assistant_turns=5", episode(max_turns=5)),
    (f"{GPU}.multi_turn.use_all_traj=True", episode(train_turns="all")),
    (f"{GPU}.multi_turn.use_all_traj=false", episode(train_turns="last")),
    (f"{GPU}.temperature=0.7", agents(temperature=0.7)),
    (f"{GPU}.top_p=0.9", agents(top_p=0.9)),
    (f"{GPU}.top_k=20", agents(top_k=20)),
    (f"{GPU}.val_kwargs.temperature=0.3", validation(temperature=0.3)),
    (f"{GPU}.val_kwargs.top_p=0.8", validation(top_p=0.8)),
    (f"{GPU}.val_kwargs.top_k=5", validation(top_k=5)),
    (f"{GPU}.val_kwargs.do_sample=False", validation(temperature=0.0)),
    (f"{GPU}.val_kwargs.do_sample=False {GPU}.val_kwargs.temperature=0.9", validation(temperature=0.0)),
    (f"{GPU}.response_length=512", agents(max_tokens=512)),
    ("data.max_response_length=512", agents(max_tokens=512)),
    (f"{ACTOR}.optim.lr=2e-6", actors(lr=2e-6)),
    (f"{ACTOR}.ppo_mini_batch_size=32 data.train_batch_size=128", algorithm(mini_batches=4)),
    (f"{ACTOR}.ppo_epochs=2", algorithm(epochs=2)),
    (f"{ACTOR}.clip_ratio=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.1)),
    (f"{ACTOR}.clip_ratio_low=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.2)),
    (f"{ACTOR}.clip_ratio_high=0.3 {ACTOR}.clip_ratio=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.3)),
    (f"{ACTOR}.clip_ratio_high=0.3", algorithm(clip_ratio_low=0.2, clip_ratio_high=0.3)),
    (f"{ACTOR}.clip_ratio_c=5.0", algorithm(clip_ratio_c=5.0)),
    (f"{ACTOR}.entropy_coeff=0.001", algorithm(entropy_coef=0.001)),
    (f"{ACTOR}.use_kl_loss=False", algorithm(kl_loss_coef=0.0)),
    (f"{ACTOR}.use_kl_loss=False", actors(reference=None)),
    (f"{ACTOR}.use_kl_loss=True", actors(reference=KEPT)),
    (f"{ACTOR}.kl_loss_coef=0.05", algorithm(kl_loss_coef=0.05)),
    (f"{ACTOR}.kl_loss_coef=0", actors(reference=None)),
    (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0", actors(reference=None)),
    (f"{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.05", actors(reference=None)),
    (f"{ACTOR}.kl_loss_coef=0 algorithm.use_kl_in_reward=True", actors(reference=KEPT)),
    (f"{GPU}.val_kwargs.do_sample=True", validation(temperature=None)),
    (f"{GPU}.multi_turn.max_assistant_turns=null", episode(max_turns=1)),
    (f"{ACTOR}.ppo_mini_batch_size=128", algorithm(mini_batches=1)),
    (f"{ACTOR}.ppo_mini_batch_size=50", algorithm(mini_batches=3)),
    ("critic.ppo_micro_batch_size_per_gpu=4", critics(config={"use_dynamic_bsz": False})),
    (
        "critic.model.path=org/value",
        critics(model={"path": "org/value", "tokenizer_path": None, "trust_remote_code": False}),
    ),
    ("critic.optim.lr=3e-6", critics(lr=3e-6)),
    ("critic.cliprange_value=0.3", critics(cliprange_value=0.3)),
    ("critic.ppo_epochs=2", critics(epochs=2)),
    ("critic.ppo_mini_batch_size=64 data.train_batch_size=128", critics(mini_batches=2)),
    ("critic.use_dynamic_bsz=False", critics(config={"use_dynamic_bsz": False})),
    ("trainer.critic_warmup=3", algorithm(critic_warmup=3)),
]
IN_THE_RUN = [
    ("dag.workflow_path=w.yaml", {"workflow": "w.yaml"}),
    (f"{RUN}.model.path=org/model", {"model_path": "org/model"}),
    (f"{GPU}.val_kwargs.n=4", {"validation.n": "4"}),
    (f"{GPU}.prompt_length=99", {"data.max_prompt_length": "99"}),
    (f"{GPU}.response_length=99", {"data.max_response_length": "99"}),
    (f"{ACTOR}.grad_clip=0.5", {f"{ACTOR}.optim.clip_grad": "0.5"}),
    ("critic.grad_clip=0.5", {"critic.optim.clip_grad": "0.5"}),
    (f"{GPU}.enable_chunked_prefill=False", {f"{GPU}.engine_kwargs.sglang.chunked_prefill_size": "-1"}),
    ("trainer.logger=wandb", {"trainer.logger": "[wandb]"}),
    ("data.val_files=null", {"data.val_files": "null"}),
    ("data.train_files=[a,b]", {"data.train_files": "[a,b]"}),
    (f"{GPU}.max_model_len=null", {f"{GPU}.max_model_len": "null"}),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": "4", f"{ACTOR}.use_dynamic_bsz": "False"},
    ),
    ("critic.ppo_micro_batch_size_per_gpu=4", {"critic.ppo_micro_batch_size_per_gpu": "4"}),
    *[
        (f"{flag}={value}", {flag: value})
        for flag, value in {
            f"{RUN}.model.use_remove_padding": "True",
            f"{RUN}.model.enable_gradient_checkpointing": "True",
            f"{GPU}.n": "1",
            f"{GPU}.max_model_len": "12288",
            f"{GPU}.tensor_model_parallel_size": "2",
            f"{GPU}.gpu_memory_utilization": "0.3",
            f"{GPU}.enforce_eager": "False",
            f"{ACTOR}.use_dynamic_bsz": "True",
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            "data.train_files": "a.parquet",
            "data.val_files": "b.parquet",
            "data.train_batch_size": "128",
            "data.max_prompt_length": "10240",
            "trainer.val_before_train": "False",
            "trainer.save_freq": "30",
            "trainer.test_freq": "10",
            "trainer.logger": "[console]",
            "trainer.n_gpus_per_node": "8",
            "trainer.nnodes": "1",
        }.items()
    ],
]
AS_HERE = [
    f"{GPU}.enable_chunked_prefill=True",
    "algorithm.kl_ctrl.type=fixed",
    "dag.enable_perf=False",
    f"{GPU}.name=sglang",
    f"{GPU}.mode=async",
    f"{GPU}.free_cache_engine=True",
    "data.return_raw_chat=True",
    "data.filter_overlong_prompts=False",
    "data.truncation=error",
    "data.shuffle=True",
    "dag.custom_pipeline_fn=null",
    "dag.env_enable=False",
    "dag.environment_path=null",
]
REFUSED = [
    ("algorithm.adv_estimator=rloo", "it takes one of gae_marft, gae, grpo, cpgd"),
    ("algorithm.kl_ctrl.type=adaptive", "the weight of the KL"),
    ("dag.custom_pipeline_fn=m:f", "graphs are YAML files"),
    ("dag.enable_perf=True", "every run measures times"),
    ("dag.backend_threshold=256", "verl chooses"),
    ("dag.env_enable=True", "`env`"),
    ("dag.environment_path=e.py", "`env`"),
    (f"{GPU}.name=vllm", "SGLang"),
    (f"{GPU}.mode=sync", "token ids"),
    (f"{GPU}.agent.agent_name=a", "under `agents`"),
    (f"{GPU}.agent.num_workers=8", "rollout.processes"),
    (f"{GPU}.agent.custom_async_server=s", "SGLang"),
    (f"{GPU}.multi_turn.enable=True", "max_assistant_turns"),
    (f"{GPU}.free_cache_engine=False", "memory"),
    (f"{GPU}.log_prob_micro_batch_size_per_gpu=16", "ppo_micro_batch_size_per_gpu"),
    (f"{RUN}.ref.log_prob_micro_batch_size_per_gpu=16", "ppo_micro_batch_size_per_gpu"),
    ("data.return_raw_chat=False", "chat messages"),
    ("data.filter_overlong_prompts=True", "prompt_too_long"),
    ("data.truncation=left", "prompts are never truncated"),
    ("data.shuffle=False", "`seed`"),
    (f"{GPU}.temperature=warm", "it takes a number above 0"),
    (f"{ACTOR}.use_kl_loss=1", "True or False"),
]


@pytest.mark.parametrize(("arguments", "holds"), IN_THE_WORKFLOW, ids=[arguments for arguments, _ in IN_THE_WORKFLOW])
def test_flag_of_the_workflow(arguments, holds):
    assert holds(change(WORKFLOWS / "workflow_marft.yaml", arguments)[1])


@pytest.mark.parametrize(("argument", "overrides"), IN_THE_RUN, ids=[argument for argument, _ in IN_THE_RUN])
def test_flag_of_the_run(argument, overrides):
    assert translate([argument]).overrides == overrides


@pytest.mark.parametrize("argument", AS_HERE)
def test_flag_that_says_what_happens_anyway(argument):
    out = translate([argument])
    assert not out.overrides and not out.edits


@pytest.mark.parametrize(("argument", "reason"), REFUSED, ids=[argument for argument, _ in REFUSED])
def test_flag_without_a_meaning_here(argument, reason):
    with pytest.raises(UserError) as error:
        translate([argument])
    assert str(error.value).startswith(argument.partition("=")[0]) and reason in str(error.value)


def test_every_flag_has_a_test():
    cases = [a for a, _ in IN_THE_WORKFLOW] + [a for a, _ in IN_THE_RUN] + AS_HERE + [a for a, _ in REFUSED]
    tested = {argument.partition("=")[0] for case in cases for argument in case.split()}
    assert set(FLAGS) - tested == {"trainer.total_epochs"}  # test_epochs_become_steps
    assert len(FLAGS) > 70


def test_verl_knows_what_the_flags_may_name():
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty
    from verl.utils.tracking import Tracking

    assert set(TRACKERS) <= set(Tracking.supported_backend)
    one = torch.ones(1)
    assert all(kl_penalty(one, one, f"{name}{sign}").isfinite() for name in KL_TYPES for sign in ("", "+"))
