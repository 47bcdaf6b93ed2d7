"""What a run takes where its configuration says null, as a function of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.settings import defaults
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.decision_lines import describe, describe_memory
from recipe.dag.settings.defaults import (
    apply,
    check_servers,
    decide,
    moments_of,
    on_cpu,
    useful_tokens,
)
from recipe.dag.workflow.adapter_memory import served_adapters
from recipe.dag.workflow.machine import Machine
from recipe.dag.workflow.memory import Moments, PolicyOnGpu, Pool
from recipe.dag.workflow.model_size import size_of
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.trainer_memory import Head, TrainerOptions, activation_bytes
from tests.workflow.shapes import QWEN, qwen, write_config

CARD = 85_500_000_000
ACTOR = "actor_rollout_ref.actor"


def machine(gpus: int, size: int = CARD) -> Machine:
    return Machine((size,) * gpus, 2 * 10**12)


@pytest.fixture
def decided(tmp_path):
    """Decides for policies of a model; returns the decision and the configuration with it."""

    def make(model: str, on: Machine, *overrides: str, policies: int = 1, name="dag", **policy):
        path = write_config(tmp_path / model, QWEN[model]) if model in QWEN else model
        names = [f"p{index}" for index in range(policies)]
        flow = Workflow(
            path="w.yaml",
            dag_id="w",
            agents=[{"name": f"a{name}", "policy": name} for name in names],
            policies={name: {"model": {"path": path}, **policy} for name in names},
            nodes=[],
        )
        run = compose_config(name, ["workflow=w.yaml", *overrides])
        decision = decide(run, flow, on)
        apply(run, decision)
        check_servers(run, flow)
        return decision, run

    return make


def state(run) -> tuple:
    fsdp = run.actor_rollout_ref.actor.fsdp_config
    return (
        run.trainer.n_gpus_per_node,
        run.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
        fsdp.param_offload,
        fsdp.optimizer_offload,
    )


@pytest.mark.parametrize(
    ("model", "policies", "gpus", "expected"),
    [
        ("3b", 1, 1, (1, 16384, False, False)),
        ("3b", 1, 2, (2, 16384, False, False)),
        ("3b", 1, 4, (4, 16384, False, False)),
        ("3b", 1, 8, (8, 16384, False, False)),
        ("0.5b", 1, 1, (1, 32768, False, False)),
        ("0.5b", 3, 1, (1, 32768, False, False)),
        ("0.2b", 1, 1, (1, 65536, False, False)),
        ("3b", 3, 1, (1, 16384, True, True)),
        ("3b", 3, 2, (2, 16384, True, True)),
        ("3b", 3, 4, (4, 16384, False, False)),
        ("3b", 3, 8, (8, 16384, False, False)),
        ("7b", 1, 4, (4, 16384, False, False)),
    ],
)
def test_a_run_takes_all_gpus_and_offloads_only_where_it_would_not_fit(model, policies, gpus, expected, decided):
    decision, run = decided(model, machine(gpus), policies=policies)
    assert state(run) == expected and all(pool.fits for pool in decision.memory)
    assert (run.critic.fsdp.param_offload, run.critic.ppo_max_token_len_per_gpu) == (expected[2], expected[1])


def test_micro_batches_shrink_before_anything_is_offloaded(decided):
    overrides = (
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    )
    choices = [state(decided("1.5b", machine(1, size * 10**9), *overrides)[1])[1:3] for size in (60, 42, 36)]
    assert choices == [(16384, False), (8192, False), (4096, False)]


@pytest.mark.parametrize(
    ("model", "gpus", "size", "kept", "recompute", "mlp_only", "nothing"),
    [
        ("3b", 1, CARD, True, True, 35, 1),
        ("3b", 2, CARD, True, True, 19, 17),
        ("3b", 4, CARD, True, True, 11, 25),
        ("3b", 8, CARD, True, False, 0, 0),
        ("3b", 1, 72 * 10**9, True, True, 0, 0),
        ("7b", 4, 55 * 10**9, False, True, 2, 0),
        ("0.5b", 1, CARD, True, False, 0, 0),
        ("0.5b", 1, 24 * 10**9, True, True, 19, 0),
        ("0.2b", 1, CARD, True, False, 0, 0),
    ],
)
def test_weights_stay_gathered_and_layers_keep_activations_where_they_fit(
    model, gpus, size, kept, recompute, mlp_only, nothing, decided, monkeypatch
):
    monkeypatch.setattr(defaults, "liger_is_installed", lambda: True)
    decision, run = decided(model, machine(gpus, size))
    engines = (run.actor_rollout_ref.actor.fsdp_config, run.critic.fsdp)
    assert {engine.reshard_after_forward for engine in engines} == {not kept}
    assert run.actor_rollout_ref.ref.fsdp_config.reshard_after_forward is not kept
    model = run.actor_rollout_ref.model
    assert (model.enable_gradient_checkpointing, model.recompute_mlp_only) == (recompute, mlp_only)
    assert model.recompute_nothing == nothing and decision.memory[0].fits
    assert decision.memory[0].phases[1].used <= 0.9 * size or (recompute and not mlp_only)


@pytest.mark.parametrize(
    ("model", "gpus", "overrides", "once"),
    [
        ("3b", 2, [], True),
        ("7b", 2, [], None),
        ("3b", 2, [f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=false"], False),
        # its gradients are in host memory
        ("3b", 2, [f"{ACTOR}.fsdp_config.offload_policy=true"], None),
    ],
)
def test_gradients_are_reduced_once_where_whole_ones_fit(model, gpus, overrides, once, decided):
    decision, run = decided(model, machine(gpus), *overrides)
    engine = run.actor_rollout_ref.actor.fsdp_config
    assert engine.use_no_sync_for_gradient_accumulation is once
    gradients = next(phase.gradients for phase in decision.memory[0].phases if phase.name.startswith("backward"))
    assert (gradients > {"3b": 12.3e9, "7b": 30.4e9}[model]) == (once is True)


def test_the_moments_of_each_optimizer_are_counted(decided):
    eight_bit = {"optim": {"optimizer": "AdamW8bit"}}
    options = {"config": {"actor": eight_bit}}, {"critic": {"config": eight_bit}}, {"critic": {}}
    of_actor, of_critic, plain = (decided("0.5b", machine(1), **{"critic": {}, **extra})[0] for extra in options)
    optimizers = [decision.memory[0].phases[0].optimizer / 494_032_768 for decision in (of_actor, of_critic, plain)]
    assert optimizers == pytest.approx([10.03, 10.03, 16], rel=0.001)
    _, run = decided("3b", machine(1), f"{ACTOR}.optim.optimizer=AdamW8bit")
    offloads = (decided("7b", machine(2), **options)[0].offload for options in ({"config": {"actor": eight_bit}}, {}))
    assert list(offloads) == [False, True]
    flow = Workflow(path="w", dag_id="w", agents=[], policies={"p": {"model": {"path": "m"}}}, nodes=[])
    assert moments_of(run, flow, "p") == Moments(actor=2.03125, critic=8)


@pytest.mark.parametrize(
    ("override", "recompute", "mlp_only"),
    [
        ("model.recompute_mlp_only=3", True, 3),
        ("model.recompute_mlp_only=0", True, 0),
        ("model.recompute_nothing=0", True, 24),
        ("model.enable_gradient_checkpointing=true", True, 24),
        ("model.enable_gradient_checkpointing=false", False, 0),
        ("model.enable_activation_offload=true", True, 0),
    ],
)
def test_recompute_that_is_set_is_left_as_it_is(override, recompute, mlp_only, decided):
    _, run = decided("0.5b", machine(1), f"actor_rollout_ref.{override}")
    model = run.actor_rollout_ref.model
    assert (model.enable_gradient_checkpointing, model.recompute_mlp_only) == (recompute, mlp_only)


def test_policies_that_share_gpus_recompute_every_mlp(decided):
    alone, together = (decided("3b", machine(4), policies=count)[0] for count in (1, 2))
    assert alone.nothing and not together.nothing and together.mlp_only == 36


def test_a_policy_that_recomputes_mlps_keeps_the_others_from_no_recompute(decided):
    _, run = decided("0.5b", machine(1), config={"model": {"recompute_mlp_only": 3}}, policies=2)
    assert run.actor_rollout_ref.model.enable_gradient_checkpointing


def test_without_recompute_a_critic_must_fit_too(decided, tmp_path):
    large = {"model": {"path": write_config(tmp_path / "large", QWEN["1.5b"])}}
    plain, beside = (decided("0.5b", machine(1), critic=critic)[0] for critic in (None, large))
    assert (plain.checkpointing, beside.checkpointing) == (False, True) and beside.memory[0].fits


def test_what_is_set_is_left_as_it_is(decided):
    overrides = (
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=5000",
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=false",
    )
    assert state(decided("0.5b", machine(8), *overrides)[1]) == (2, 5000, True, False)


def test_a_policys_own_configuration_counts(decided):
    tokens = {"actor": {"ppo_max_token_len_per_gpu": 131072}}
    decision, _ = decided("3b", machine(1), config=tokens)
    assert not decision.memory[0].fits and "backward of p0" in decision.memory[0].problem


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({}, Head.FUSED),
        ({"model.fused_kernel_options.impl_backend": "torch"}, Head.CHUNKED),
        ({"model.use_fused_kernels": False}, Head.LOGITS),
        ({"actor.ulysses_sequence_parallel_size": 2}, Head.PACKED),
        ({"model.use_remove_padding": False}, Head.PADDED),
    ],
    ids=str,
)
def test_the_way_to_the_log_probs_decides_what_they_take(config, head, decided, tmp_path):
    decision, _ = decided("3b", machine(1), "actor_rollout_ref.model.recompute_mlp_only=0", config=config)
    size = qwen("3b", tmp_path)
    assert decision.memory[0].phases[1].activations == activation_bytes(
        size, TrainerOptions(decision.tokens, head=head)
    )


def test_rows_longer_than_the_usual_budget_raise_it(decided):
    assert state(decided("3b", machine(1), "data.max_prompt_length=20000")[1])[1] == 22048
    assert state(decided("0.5b", machine(1), "data.max_prompt_length=20000")[1])[1] == 32768
    assert state(decided("0.5b", machine(1), "data.max_prompt_length=40000")[1])[1] == 42048


def test_the_largest_trained_model_says_how_many_tokens_are_of_use(tmp_path):
    small, large = (PolicyOnGpu(name, qwen(name, tmp_path), TrainerOptions(8192)) for name in ("0.2b", "3b"))
    frozen = replace(large, trainer=None)
    assert useful_tokens((Pool(1, (small,)), Pool(1, (frozen,)))) == 65536
    assert useful_tokens((Pool(1, (small, large)),)) == useful_tokens((Pool(1, (small,)), Pool(1, (large,)))) == 16384


def test_a_card_plans_for_no_more_than_it_is_told_to(decided):
    decision, run = decided("3b", machine(1), "+profile=gpu_32gb")
    assert decision.memory[0].available == 32 * 10**9 and decision.memory[0].fits
    assert not run.actor_rollout_ref.actor.fsdp_config.param_offload
    assert not decided("3b", machine(1), "gpu_memory_gb=32")[0].memory[0].fits


def test_the_smallest_card_counts(decided):
    decision, _ = decided("0.5b", Machine((CARD, 24 * 10**9)))
    assert decision.memory[0].available == 24 * 10**9


@pytest.mark.parametrize("model", ["/no/such/model", "org/never-downloaded"])
def test_an_unknown_model_leaves_the_offload_open(model, decided):
    decision, run = decided(model, machine(4))
    assert state(run) == (4, 16384, None, None) and "no config.json" in decision.unknown
    assert "memory: not estimated (no config.json" in next(describe_memory(decision, machine(4)))


def test_no_gpu_and_too_few_gpus_are_one_line(decided):
    with pytest.raises(UserError, match="^trainer.n_gpus_per_node: no GPU is visible here; pass a number"):
        decided("0.5b", machine(0))
    with pytest.raises(UserError, match=r"tensor_model_parallel_size=4: servers of 4 GPUs do not fit into the 2 of"):
        decided("0.5b", machine(2), "actor_rollout_ref.rollout.tensor_model_parallel_size=4")


def flow_of(*, frozen: bool = False, model: str = "model", **adapters) -> Workflow:
    policies = {"p0": {"model": {"path": model}, "frozen": frozen}, **adapters}
    agents = [{"name": "a", "policy": name} for name in policies]
    return Workflow(path="w.yaml", dag_id="w", agents=agents, policies=policies, nodes=[])


def test_decisions_are_printed_in_words(decided):
    decision, run = decided("3b", machine(1), policies=3)
    assert list(describe(decision, machine(1), run, flow_of())) == [
        "GPUs of each machine: 1 of 85.5 GB, all that are visible",
        "micro-batches: 16,384 tokens; offload: param_offload, optimizer_offload",
        "kernels: transformers'; weights gathered once a pass; gradients reduced once an update; recomputed in the "
        "backward pass: all layers, only the MLP in 5 of them",
    ]
    assert list(describe_memory(decision, machine(1))) == ["memory of p0, p1, p2 on each GPU: fits: 76.6 of 85.5 GB"]
    poor = Machine((CARD,), 200 * 10**9)
    assert list(describe_memory(decision, poor))[-1] == (
        "warning: offloading takes 162 GB of host memory, and the processes about 45; this machine has 200, and "
        "Ray ends a run at 95% of it"
    )
    decision, run = decided("7b", machine(1))
    assert next(describe_memory(decision, machine(1))).startswith("warning: memory of p0 on each GPU: does not fit: ")
    assert list(describe(decision, machine(1), run, flow_of(frozen=True))) == [
        "GPUs of each machine: 1 of 85.5 GB, all that are visible"
    ]


@pytest.mark.parametrize(
    ("size", "override", "where"),
    [
        (CARD, "rollout.keep_base=null", "on the GPU"),
        (20 * 10**9, "rollout.keep_base=null", "in host memory"),
        (CARD, "rollout.keep_base=false", "in host memory"),
    ],
)
def test_servers_of_adapters_keep_their_base_where_it_fits(size, override, where, tmp_path):
    flow = flow_of(frozen=True, model=write_config(tmp_path / "3b", QWEN["3b"]), a={"lora": {"base": "p0"}})
    run = compose_config("dag", ["workflow=w.yaml", override])
    decision = decide(run, flow, machine(1, size))
    apply(run, decision)
    lines = list(describe(decision, machine(1, size), run, flow))
    assert lines[-1] == f"servers of adapters keep their base {where} while they sleep"
    asleep = [phase.servers for phase in decision.memory[0].phases if phase.name != "rollout"]
    adapters = served_adapters(flow, "p0", size_of(flow.policies["p0"].model.path), None)
    assert set(asleep) == {adapters + (2 * 3_085_938_688 if where == "on the GPU" else 0)}


@pytest.mark.parametrize(
    ("rank", "tokens"), [(64, 16384), (88, 12288), (128, 12288)], ids=["enough", "for the base", "for activations"]
)
def test_micro_batches_make_room_for_the_base_of_adapters_and_their_activations(rank, tokens, monkeypatch, tmp_path):
    monkeypatch.setattr("recipe.dag.settings.defaults.liger_is_installed", lambda: True)
    loras = {name: {"lora": {"base": "p0", "rank": rank}} for name in "abc"}
    flow = flow_of(frozen=True, model=write_config(tmp_path / "3b", QWEN["3b"]), **loras)
    decision = decide(compose_config("dag", ["workflow=w.yaml"]), flow, machine(1))
    assert (decision.keep_base, decision.checkpointing, decision.tokens) == (True, False, tokens)


def test_servers_of_adapters_hold_a_pool_and_the_copies_of_dense_products(tmp_path):
    lora = {"lora": {"base": "p0", "rank": 64}}
    flow = flow_of(frozen=True, model=write_config(tmp_path / "7b", QWEN["7b"]), a=lora, b=lora, c=lora)

    def servers(**sglang: str):
        run = compose_config("dag", ["workflow=w.yaml", "rollout.keep_base=false"])
        OmegaConf.update(run, "actor_rollout_ref.rollout.engine_kwargs.sglang", sglang, force_add=True)
        return decide(run, flow, machine(1)).memory[0].phases[-1].servers

    with_copies, pool = servers(), servers(lora_backend="csgmv")
    assert pool == 2 * 4 * 64 * 28 * (2 * 3584 + 2 * (3584 + 512) + 2 * 3584 + 3 * (3584 + 18944))
    assert with_copies - pool == pool * 3 // 4 == pytest.approx(0.97e9, rel=0.01), "which have no place for the base"


def test_without_gpus_a_run_has_one_process_per_policy():
    run = compose_config("dag", ["workflow=w.yaml"])
    apply(run, on_cpu(run))
    assert state(run) == (1, 16384, None, None)
