from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.dag.app import doctor
from recipe.dag.core.errors import UserError
from recipe.dag.policy import config as config_module
from recipe.dag.policy.config import has_stop_strings, policy_config
from recipe.dag.settings import defaults
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.defaults import longest_row, served_length
from recipe.dag.workflow.schema import Workflow

ARGUMENTS = ["workflow=w.yaml", "data.train_files=t.parquet"]
ARGUMENTS += ["data.max_prompt_length=100", "data.max_response_length=50"]


@pytest.fixture(scope="module")
def composed():
    return compose_config("dag", ARGUMENTS)


@pytest.fixture
def configure(composed):
    def make(
        overrides: dict | None = None,
        *,
        run: dict | None = None,
        processes: int = 1,
        sharing: int = 1,
        offload_between_turns: bool = False,
        platform: str = "cpu",
        critic: dict | None = None,
        lr: float | None = None,
        sampling: dict | None = None,
        lora: dict | None = None,
        **algorithm,
    ):
        config = OmegaConf.merge(composed, run or {})
        main = {"model": {"path": "m"}, "config": overrides or {}, "critic": critic, "lr": lr}
        main |= {"reference": bool(algorithm.get("kl_loss_coef")), "lora": lora}
        policies = {"main": main, "other": {"model": {"path": "o"}}}
        agents = [{"name": "a", "policy": "main", "sampling": sampling or {}}]
        flow = Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[], algorithm=algorithm)
        paths = {"model_path": "models/m", "critic_path": None if critic is None else "models/c"}
        shape = {"processes": processes, "sharing": sharing, "offload_between_turns": offload_between_turns}
        return policy_config(config, flow, "main", **paths, **shape, updates=12, platform=platform)

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
    loss = {"loss_agg": "seq-mean-token-sum", "entropy_coef": 0.01, "kl_loss_coef": 0.05}
    actor = configure(clip_ratio_low=0.1, clip_ratio_high=0.3, epochs=3, **loss).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio) == (0.1, 0.3, 0.1)
    assert (actor.loss_agg_mode, actor.entropy_coeff, actor.ppo_epochs) == ("seq-mean-token-sum", 0.01, 3)
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.05)
    assert configure().actor_rollout_ref.actor.use_kl_loss is False
    assert configure(clip_ratio_c=5.0).actor_rollout_ref.actor.clip_ratio_c == 5.0
    assert configure(lr=2e-5).actor_rollout_ref.actor.optim.lr == 2e-5
    actor = configure(policy_loss="cpgd", policy_drift_coef=0.25).actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.policy_loss.ppo_kl_coef) == ("cpgd", 0.25)
    actor = configure(policy_loss="gspo").actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == ("gspo", "seq-mean-token-mean")


def test_the_runs_seed_and_length_arrive(configure):
    config = configure(run={"seed": 7})
    actor = config.actor_rollout_ref.actor
    assert (actor.data_loader_seed, actor.fsdp_config.seed, actor.optim.total_training_steps) == (7, 7, 12)


def test_the_model_and_what_an_adapter_looks_for(configure):
    node = configure().actor_rollout_ref
    assert (node.model.path, node.rollout.custom.policy) == ("models/m", "main")


def test_the_context_holds_prompt_and_response_unless_the_run_says(configure, composed):
    assert configure().actor_rollout_ref.rollout.max_model_len == 150
    run = {"actor_rollout_ref": {"rollout": {"max_model_len": 120}}}
    assert configure(run=run).actor_rollout_ref.rollout.max_model_len == 120
    assert longest_row(composed) == 150


@pytest.mark.parametrize(
    ("most", "policy", "run", "length"),
    [
        (None, {}, {}, 190),
        (1000, {}, {}, 190),
        (170, {}, {}, 170),
        (100, {}, {}, 150),
        (None, {"rollout.max_model_len": 160}, {}, 160),
        (None, {}, {"actor_rollout_ref": {"rollout": {"max_model_len": 120}}}, 120),
        (None, {}, {"actor_rollout_ref": {"actor": {"ppo_max_token_len_per_gpu": 150}}}, 190),
    ],
)
def test_the_servers_of_a_policy_that_thinks_have_room_for_it(composed, tmp_path, most, policy, run, length):
    (tmp_path / "config.json").write_text(json.dumps({} if most is None else {"max_position_embeddings": most}))
    frozen = {"model": {"path": str(tmp_path)}, "frozen": True, "config": policy}
    agents = [{"name": f"a{n}", "policy": "main", "sampling": {"thinking_tokens": n}} for n in (0, 40)]
    flow = Workflow(path="w", dag_id="w", agents=agents, policies={"main": frozen}, nodes=[])
    config = OmegaConf.merge(composed, run)
    made = policy_config(config, flow, "main", model_path="m", updates=1, platform="cpu")
    assert made.actor_rollout_ref.rollout.max_model_len == served_length(config, flow, "main") == length


def test_a_server_decodes_where_an_agent_has_stop_strings(configure):
    """SGLang's scheduler has no tokenizer otherwise, and dies of the first one."""
    skips = [configure(sampling=sampling, platform="cuda").actor_rollout_ref.rollout.skip_tokenizer_init
             for sampling in ({}, {"stop": ["."]})]  # fmt: skip
    assert skips == [True, False]


@pytest.mark.parametrize(("form", "decodes"), [("hermes", False), ("tags", True)])
def test_a_server_decodes_where_a_tool_loop_stops_at_a_tag(form, decodes):
    agent = {"name": "a", "policy": "main", "tools": ["code_interpreter"], "tool_loop": {"format": form}}
    flow = Workflow(path="w", dag_id="w", agents=[agent], policies={"main": {"model": {"path": "m"}}}, nodes=[])
    assert has_stop_strings(flow, "main") is decodes


def test_sharing_policies_divide_the_servers_memory(configure):
    run = {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}}
    memory = [configure(run=run, sharing=n).actor_rollout_ref.rollout.gpu_memory_utilization for n in (1, 3)]
    assert memory == pytest.approx([0.6, 0.2])


def test_the_cpu_forces_what_it_cannot_do_without(configure):
    forced = configure({"rollout.name": "sglang", "actor.use_torch_compile": True})
    node = forced.actor_rollout_ref
    assert (node.rollout.name, node.rollout.tensor_model_parallel_size, node.rollout.dtype) == ("cpu", 1, "float32")
    assert not node.actor.use_torch_compile and not node.model.enable_gradient_checkpointing
    for engine in (node.actor.fsdp_config, node.ref.fsdp_config):
        assert engine.mixed_precision.param_dtype == engine.mixed_precision.reduce_dtype == "fp32"
        assert not engine.use_torch_compile
    assert not node.actor.fsdp_config.param_offload and not node.actor.fsdp_config.optimizer_offload
    assert forced.trainer.device == "cpu"


def test_a_gpu_keeps_its_rollout(configure):
    config = configure({"model.override_config": {"attn_implementation": "eager"}}, platform="cuda")
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_rows_are_packed_and_scored_without_logits(configure, platform):
    """The same on a laptop and on a GPU, but for the kernels."""
    config = configure(platform=platform, critic={})
    for model in (config.actor_rollout_ref.model, config.critic.model):
        assert model.use_remove_padding and model.override_config == {"attn_implementation": "varlen"}
        assert not model.use_fused_kernels  # verl's own would exchange the forward of the model's class
    kernels = config.actor_rollout_ref.model.fused_kernel_options
    assert kernels.impl_backend == {"cuda": "triton", "cpu": "torch"}[platform]


def test_kernels_and_logits_can_be_asked_for(configure):
    model = configure({"model.use_fused_kernels": False}, platform="cuda").actor_rollout_ref.model
    assert model.use_remove_padding and model.fused_kernel_options.impl_backend is None
    model = configure({"model.fused_kernel_options.impl_backend": "torch"}, platform="cuda").actor_rollout_ref.model
    assert model.fused_kernel_options.impl_backend == "torch"


@pytest.mark.parametrize(
    ("asked", "platform", "installed", "used"),
    [
        ({}, "cuda", True, True),
        ({}, "cuda", False, False),
        ({"model.use_liger": False}, "cuda", True, False),
        ({"model.use_liger": True}, "cpu", True, False),
    ],
)
def test_ligers_kernels_are_used_on_a_gpu_that_has_them(asked, platform, installed, used, configure, monkeypatch):
    for module in (defaults, config_module):
        monkeypatch.setattr(module, "liger_is_installed", lambda: installed)
    config = configure(asked, platform=platform, critic={})
    assert config.actor_rollout_ref.model.use_liger is config.critic.model.use_liger is used


def test_ligers_kernels_that_are_asked_for_and_missing_are_one_line(configure):
    with pytest.raises(UserError, match="actor_rollout_ref.model.use_liger=true, but liger-kernel is not installed"):
        configure({"model.use_liger": True}, platform="cuda")


def test_the_doctor_notes_that_ligers_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(doctor, "liger_is_installed", lambda: False)
    with pytest.raises(doctor.Note, match="liger-kernel is not installed; updates on a GPU are a third slower"):
        doctor.check_liger()


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"optimizer_impl": "absent.optim"}, ".optimizer_impl=absent.optim, but absent is not installed; install it"),
        (
            {"optimizer": "AdamW8bit"},
            ".optimizer=AdamW8bit, but torch.optim has no optimizer in 8 bits; set {}.optimizer_impl",
        ),
    ],
)
def test_an_optimizer_that_is_not_there_is_one_line(optim, message, configure):
    keys = {"actor_rollout_ref.actor.optim": ({"actor": {"optim": optim}}, {}), "critic.optim": ({}, {"optim": optim})}
    for key, (overrides, of_critic) in keys.items():
        with pytest.raises(UserError, match=re.escape(f"policy main: {key}{message.format(key)}")):
            configure(overrides, critic={"config": of_critic})


def test_the_doctor_notes_that_torchao_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda _: None)
    with pytest.raises(doctor.Note, match="torchao is not installed; only its optimizers, such as 8-bit Adam"):
        doctor.CHECKS["torchao"]()


def test_the_numbers_of_layers_that_recompute_less_are_options_of_the_engine(configure):
    numbers = {"model.recompute_mlp_only": 7, "model.recompute_nothing": 2}
    model = configure(numbers, platform="cuda").actor_rollout_ref.model
    options = model.fused_kernel_options
    assert (options.recompute_mlp_only, options.recompute_nothing) == (7, 2)
    assert not {"recompute_mlp_only", "recompute_nothing"} & model.keys()
    model = configure(numbers | {"model.enable_activation_offload": True}, platform="cuda").actor_rollout_ref.model
    options = model.fused_kernel_options
    assert (options.recompute_mlp_only, options.recompute_nothing) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "platform", "missing", "attention", "is_packed"),
    [
        ({"model.use_remove_padding": False}, "cuda", None, "sdpa", False),
        # a torch without the kernel trains on padded rows
        ({}, "cuda", "varlen", "sdpa", False),
        # FlashAttention of a GPU's workflow is packed on the CPU all the same
        ({"model.override_config": {"attn_implementation": "flash_attention_2"}}, "cpu", None, "varlen", True),
    ],
)
def test_which_attention_computes_packed_rows(configure, monkeypatch, asked, platform, missing, attention, is_packed):
    monkeypatch.setattr(config_module, "missing_attention", lambda name: "old" if name == missing else None)
    model = configure(asked, platform=platform).actor_rollout_ref.model
    assert model.override_config == {"attn_implementation": attention} and model.use_remove_padding is is_packed


@pytest.fixture
def six_heads(monkeypatch):
    """Models have six heads, and two key-value heads."""
    model = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2)
    model.get_text_config = lambda: model
    monkeypatch.setattr(config_module.AutoConfig, "from_pretrained", lambda *_arguments, **_options: model)


@pytest.mark.parametrize(
    "key", ["actor.ulysses_sequence_parallel_size", "actor.fsdp_config.ulysses_sequence_parallel_size"]
)
def test_all_models_of_a_policy_share_rows_among_as_many_gpus(configure, six_heads, key):
    config = configure({key: 2}, processes=4, critic={}, platform="cuda")
    node = config.actor_rollout_ref
    engines = (node.actor.fsdp_config, node.ref.fsdp_config, config.critic.fsdp)
    assert [engine.ulysses_sequence_parallel_size for engine in engines] == [2, 2, 2]
    assert node.model.override_config == {"attn_implementation": "varlen"} and node.model.use_remove_padding


@pytest.mark.parametrize("schedule", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
@pytest.mark.parametrize("learner", ["actor_rollout_ref.actor", "critic"])
def test_a_learning_rate_does_not_follow_a_last_step_that_tokens_decide(configure, learner, schedule):
    run = OmegaConf.create()
    OmegaConf.update(run, f"{learner}.optim", schedule)
    configure(run=run, critic={})
    run.trainer = {"total_training_tokens": 1000}
    reason = "^policy main: trainer.total_training_tokens leaves the last step unknown.*"
    with pytest.raises(UserError, match=f"{reason}; set {learner}.optim.lr_scheduler_type=constant"):
        configure(run=run, critic={})
    configure(run={"trainer": run.trainer}, critic={})


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        (2, {"processes": 3}, "the policy has 3 processes, of which it has to be a divisor"),
        (4, {"processes": 4}, "it has to divide the 6 heads of the model"),
        (3, {"processes": 3}, "and its 2 key-value heads or be a multiple"),
        (2, {"processes": 2, "lora": {"base": "other"}}, "adapters are not trained on rows that GPUs share"),
    ],
)
def test_rows_that_the_gpus_cannot_share_are_one_line(configure, six_heads, size, options, reason):
    with pytest.raises(UserError, match=f"^policy main: ulysses_sequence_parallel_size={size}: .*{reason}"):
        configure(run={"actor_rollout_ref": {"actor": {"ulysses_sequence_parallel_size": size}}}, **options)


def test_packed_attention_for_padded_rows_is_an_error(configure):
    asked = {"model.override_config": {"attn_implementation": "varlen"}, "model.use_remove_padding": False}
    with pytest.raises(UserError, match="needs packed rows: set actor_rollout_ref.model.use_remove_padding=true"):
        configure(asked, platform="cuda")


def test_an_attention_that_is_asked_for_and_missing_is_an_error(configure, monkeypatch):
    monkeypatch.setattr(
        config_module, "missing_attention", lambda name: "it is gone" if name == "flash_attention_2" else None
    )
    flash = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(UserError, match="policy main: actor_rollout_ref.*flash_attention_2, but it is gone"):
        configure({"model.override_config": flash}, platform="cuda")
    with pytest.raises(UserError, match="policy main: critic.model.*flash_attention_2, but it is gone; install it"):
        configure(platform="cuda", critic={"config": {"model": {"override_config": flash}}})


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
    rows = {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 1}
    assert configure(rows | {"actor.ppo_max_token_len_per_gpu": 149})


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
    overrides = {"model": {"override_config": {"attention_dropout": 0.1, "rope_theta": 5.0}}}
    node = configure(overrides | {"rollout.engine_kwargs.sglang.x": 1}, platform=platform).actor_rollout_ref
    assert (node.model.override_config.attention_dropout, node.model.override_config.rope_theta) == (0.1, 5.0)
    assert node.rollout.engine_kwargs.sglang.x == 1


def test_a_policy_without_a_critic_has_none(configure):
    assert configure().critic.enable is None


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_critic_is_made_like_its_actor_with_an_optimizer_of_its_own(configure, platform):
    spec = {"lr": 3e-4, "cliprange_value": 0.3, "epochs": 2, "config": {"optim": {"weight_decay": 0.5}}}
    overrides = {"actor.optim.lr": 1e-6, "model.override_config": {"attn_implementation": "sdpa"}}
    config = configure(overrides, critic=spec, platform=platform)
    critic, model = config.critic, config.critic.model
    assert (critic.enable, critic.strategy, critic.cliprange_value, critic.ppo_epochs) == (True, "fsdp2", 0.3, 2)
    assert (critic.optim.lr, critic.optim.weight_decay) == (3e-4, 0.5)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert (model.path, model.tokenizer_path) == ("models/c", "models/m")
    assert model.override_config == {"attn_implementation": "sdpa"}
    for key in ("use_remove_padding", "enable_gradient_checkpointing"):
        assert model[key] == config.actor_rollout_ref.model[key]
    if platform == "cpu":
        assert critic.fsdp.mixed_precision.param_dtype == "fp32"


def test_a_critic_has_the_actors_micro_batches_unless_it_says_so(configure):
    rows = {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 6}
    assert configure(rows, critic={}).critic.ppo_micro_batch_size_per_gpu == 6
    own = configure(rows, critic={"config": {"ppo_micro_batch_size_per_gpu": 9}})
    assert own.critic.ppo_micro_batch_size_per_gpu == 9 and not own.critic.use_dynamic_bsz
    assert configure({"actor.ppo_max_token_len_per_gpu": 4321}, critic={}).critic.ppo_max_token_len_per_gpu == 4321
    with pytest.raises(UserError, match="critic.ppo_max_token_len_per_gpu=149 is below the longest row, 150"):
        configure(critic={"config": {"ppo_max_token_len_per_gpu": 149}})


def test_an_unknown_key_of_a_critic_names_it(configure):
    with pytest.raises(UserError, match="^policies.main.critic.config.optim.rate: "):
        configure(critic={"config": {"optim.rate": 1}})


def test_verl_accepts_a_critics_configuration(configure, tiny_model):
    from verl.utils.config import omega_conf_to_dataclass

    config = configure(critic={"lr": 3e-4}).critic
    config.model.path = config.model.tokenizer_path = str(tiny_model)
    made = omega_conf_to_dataclass(config)
    assert (made.optim.lr, made.engine.strategy) == (3e-4, "fsdp2")


OFFLOAD = ("param_offload", "optimizer_offload")


def offloads(config) -> list[list[bool]]:
    return [
        [engine[key] for key in OFFLOAD] for engine in (config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp)
    ]


def test_trained_models_that_crowd_a_gpu_leave_it_between_their_turns(configure):
    assert offloads(configure(critic={}, platform="cuda", offload_between_turns=True)) == [[True, True], [True, True]]
    assert offloads(configure(critic={}, platform="cuda")) == [[False, False], [False, False]]
    on_the_cpu = configure(critic={}, offload_between_turns=True)  # which has nowhere to go
    assert offloads(on_the_cpu) == [[False, False], [False, False]]


def test_what_the_user_says_about_offloading_stands(configure):
    said = {"actor.fsdp_config": {"param_offload": False}}
    critic = {"config": {"fsdp": {"optimizer_offload": False}}}
    config = configure(said, critic=critic, platform="cuda", offload_between_turns=True)
    assert offloads(config) == [[False, True], [True, False]]
    run = {"actor_rollout_ref": {"actor": {"fsdp_config": {"param_offload": True}}}}
    assert offloads(configure(run=run, platform="cuda"))[0] == [True, False]


def test_fsdps_own_offloading_takes_the_place_of_verls(configure):
    config = configure({"actor.fsdp_config.offload_policy": True}, platform="cuda", offload_between_turns=True)
    assert offloads(config)[0] == [False, False]


@pytest.mark.parametrize(
    ("processes", "overrides", "once"),
    [
        (1, {}, True),
        (2, {}, False),
        (2, {"actor.fsdp_config.use_no_sync_for_gradient_accumulation": True}, True),
        # until the last micro-batch, gradients would stay on the GPU as a whole
        (1, {"actor.fsdp_config.offload_policy": True}, False),
    ],
)
def test_gradients_are_reduced_once_a_step_where_a_policy_has_one_process(processes, overrides, once, configure):
    config = configure(overrides, critic={}, processes=processes, platform="cuda")
    assert config.actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation is once
    assert config.critic.fsdp.use_no_sync_for_gradient_accumulation is (processes == 1)
