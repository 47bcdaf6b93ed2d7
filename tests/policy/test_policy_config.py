from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.main import compose_config
from recipe.dag.policy.config import max_model_len, policy_config
from recipe.dag.workflow.schema import Workflow

ARGUMENTS = [
    "workflow=w.yaml",
    "data.train_files=t.parquet",
    "data.max_prompt_length=100",
    "data.max_response_length=50",
]


@pytest.fixture(scope="module")
def composed():
    return compose_config("dag", ARGUMENTS)


@pytest.fixture
def configure(composed):
    def make(
        overrides: dict | None = None, *, run: dict | None = None, sharing: int = 1, platform: str = "cpu", **algorithm
    ):
        config = OmegaConf.merge(composed, run or {})
        policies = {
            "main": {
                "model": {"path": "m"},
                "config": overrides or {},
                "reference": bool(algorithm.get("kl_loss_coef")),
            },
            "other": {"model": {"path": "o"}},
        }
        agents = [{"name": "a", "policy": "main"}]
        flow = Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[], algorithm=algorithm)
        return policy_config(
            config, flow, "main", model_path="models/m", sharing=sharing, updates=12, platform=platform
        )

    return make


@pytest.mark.parametrize(
    "overrides",
    [
        {"actor": {"optim": {"lr": 3e-5}}, "rollout": {"max_model_len": 99}},
        {"actor.optim.lr": 3e-5, "rollout.max_model_len": 99},
        {"actor": {"optim.lr": 3e-5}, "rollout": {"max_model_len": 99}},
    ],
    ids=["nested", "dotted", "both"],
)
def test_a_policys_overrides_arrive(configure, overrides):
    node = configure(overrides).actor_rollout_ref
    assert (node.actor.optim.lr, node.rollout.max_model_len) == (3e-5, 99)
    assert node.actor.optim.weight_decay == configure().actor_rollout_ref.actor.optim.weight_decay


@pytest.mark.parametrize("key", ["actor.optim.learning_rate", "actr.optim.lr", "rollout.max_tokens"])
def test_an_unknown_key_names_the_policy_and_the_key(configure, key):
    with pytest.raises(UserError) as caught:
        configure({key: 1})
    assert str(caught.value).startswith(f"policies.main.config.{key}: ") and "\n" not in str(caught.value)


def test_the_algorithm_arrives(configure):
    actor = configure(
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        loss_agg="seq-mean-token-sum",
        entropy_coef=0.01,
        kl_loss_coef=0.05,
        epochs=3,
    ).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio) == (0.1, 0.3, 0.1)
    assert (actor.loss_agg_mode, actor.entropy_coeff, actor.ppo_epochs) == ("seq-mean-token-sum", 0.01, 3)
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.05)
    assert configure().actor_rollout_ref.actor.use_kl_loss is False


def test_the_runs_seed_and_length_arrive(configure):
    config = configure(run={"seed": 7, "trainer": {"total_training_steps": 12}})
    actor = config.actor_rollout_ref.actor
    assert (actor.data_loader_seed, actor.fsdp_config.seed, actor.optim.total_training_steps) == (7, 7, 12)


def test_the_model_and_what_an_adapter_looks_for(configure):
    node = configure().actor_rollout_ref
    assert (node.model.path, node.rollout.custom.policy) == ("models/m", "main")


def test_the_context_holds_prompt_and_response_unless_the_run_says(configure, composed):
    assert configure().actor_rollout_ref.rollout.max_model_len == 150
    run = {"actor_rollout_ref": {"rollout": {"max_model_len": 120}}}
    assert configure(run=run).actor_rollout_ref.rollout.max_model_len == 120
    assert max_model_len(composed) == 150


def test_sharing_policies_divide_the_servers_memory(configure):
    run = {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}}
    memory = [configure(run=run, sharing=n).actor_rollout_ref.rollout.gpu_memory_utilization for n in (1, 3)]
    assert memory == pytest.approx([0.6, 0.2])


def test_the_cpu_forces_what_it_cannot_do_without(configure):
    forced = configure({"rollout.name": "sglang", "actor.use_torch_compile": True, "model.use_remove_padding": True})
    node = forced.actor_rollout_ref
    assert (node.rollout.name, node.rollout.tensor_model_parallel_size, node.rollout.dtype) == ("cpu", 1, "float32")
    assert not node.actor.use_torch_compile and not node.model.use_remove_padding
    assert not node.model.enable_gradient_checkpointing
    assert node.model.override_config.attn_implementation == "sdpa"
    for engine in (node.actor.fsdp_config, node.ref.fsdp_config):
        assert engine.mixed_precision.param_dtype == engine.mixed_precision.reduce_dtype == "fp32"
        assert not engine.use_torch_compile
    assert not node.actor.fsdp_config.param_offload and not node.actor.fsdp_config.optimizer_offload
    assert forced.trainer.device == "cpu"


def test_a_gpu_keeps_its_rollout(configure):
    config = configure({"model.override_config": {"attn_implementation": "eager"}}, platform="cuda")
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"


def test_every_pass_has_one_micro_batch_size(configure):
    node = configure({"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 6}).actor_rollout_ref
    sizes = [node.actor.ppo_micro_batch_size_per_gpu]
    sizes += [part.log_prob_micro_batch_size_per_gpu for part in (node.rollout, node.ref)]
    assert sizes == [6, 6, 6]
    assert not node.rollout.log_prob_use_dynamic_bsz and not node.ref.log_prob_use_dynamic_bsz


def test_micro_batches_by_tokens_must_hold_the_longest_row(configure):
    with pytest.raises(UserError, match="ppo_max_token_len_per_gpu=149 is below the longest row, 150 tokens"):
        configure({"actor.ppo_max_token_len_per_gpu": 149})
    assert configure({"actor.ppo_max_token_len_per_gpu": 150})
    assert configure(
        {
            "actor.use_dynamic_bsz": False,
            "actor.ppo_max_token_len_per_gpu": 149,
            "actor.ppo_micro_batch_size_per_gpu": 1,
        }
    )


def test_interpolations_follow_the_policys_own_values(configure):
    node = configure({"actor.ppo_max_token_len_per_gpu": 4321, "rollout.n": 5}).actor_rollout_ref
    assert node.rollout.log_prob_max_token_len_per_gpu == node.ref.log_prob_max_token_len_per_gpu == 4321
    assert node.actor.rollout_n == 5
    assert configure().actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 16384


def test_configurations_share_nothing(configure, composed):
    before = OmegaConf.to_yaml(composed)
    one, two = configure({"actor.optim.lr": 1.0}), configure()
    one.actor_rollout_ref.actor.optim.weight_decay = 77.0
    assert two.actor_rollout_ref.actor.optim.lr != 1.0 and two.actor_rollout_ref.actor.optim.weight_decay != 77.0
    assert OmegaConf.to_yaml(composed) == before


def test_verl_accepts_the_configuration(configure):
    from verl.utils.config import omega_conf_to_dataclass

    node = configure({"actor": {"optim": {"lr": 3e-5}}}).actor_rollout_ref
    assert omega_conf_to_dataclass(node.actor).optim.lr == 3e-5
    assert omega_conf_to_dataclass(node.rollout).name == "cpu"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_verl_leaves_open_takes_any_key(configure, platform):
    overrides = {
        "model": {"override_config": {"attention_dropout": 0.1, "rope_theta": 5.0}},
        "rollout.engine_kwargs.sglang.x": 1,
    }
    node = configure(overrides, platform=platform).actor_rollout_ref
    assert (node.model.override_config.attention_dropout, node.model.override_config.rope_theta) == (0.1, 5.0)
    assert node.rollout.engine_kwargs.sglang.x == 1
