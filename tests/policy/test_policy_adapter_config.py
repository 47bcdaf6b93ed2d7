"""The configuration of adapters' hosts, and the calls of an adapter as a policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy.adapter import AdapterHost, AdapterPolicy, AdapterWorkers
from recipe.dag.policy.adapter_config import critic_of, host_config, trained_adapters
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.policy import run_sync
from recipe.dag.settings.compose import compose_config
from recipe.dag.train.models import find_models
from recipe.dag.workflow.adapter_shape import AdapterShape, shape_of
from tests.policy.spmd_adapters import WORKFLOW


@pytest.fixture
def workflow(tiny_model, tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(
        WORKFLOW.format(model=tiny_model).replace(
            "frozen: true}", "frozen: true, config: {actor.optim.weight_decay: 0.25}}"
        )
    )
    return load_workflow(tmp_path / "flow.yaml")


def configured(workflow, tiny_model, platform: str, shapes=None):
    run = compose_config("dag", [f"workflow={workflow.path}", "data.train_files=none"])
    names = ("base", "a", "b")
    configs = {
        name: policy_config(
            run,
            workflow,
            name,
            model_path=str(tiny_model),
            critic_path=str(tiny_model) if name == "a" else None,
            updates=10,
            platform="cpu",
        )
        for name in names
    }
    shapes = shapes or {name: shape_of(workflow.policies[name].lora) for name in "ab"}
    trained = [each for name in "ab" for each in trained_here(workflow, configs, shapes, name)]
    return configs, host_config(configs, "base", trained, shapes, platform=platform)


def trained_here(workflow, configs, shapes, name: str):
    return [*trained_adapters(name, workflow.policies[name], shapes[name], configs[name], None)]


def test_a_critic_has_its_own_optimizer_and_rank(workflow, tiny_model):
    configs, _ = configured(workflow, tiny_model, "cpu")
    shape = shape_of(workflow.policies["a"].lora)
    actor, critic = trained_here(workflow, configs, {"a": shape}, "a")
    assert (actor.name, actor.optim["lr"], actor.optim["total_training_steps"]) == ("a", 0.01, 10)
    assert (critic.name, critic.optim["lr"], critic.shape) == ("a/critic", 0.03, AdapterShape(3, 6.0, ("all-linear",)))
    assert critic.critic["cliprange_value"] == 0.5 and actor.critic is None


def test_the_trainer_and_the_servers_of_adapters_are_configured_at_their_base(workflow, tiny_model):
    configs, host = configured(workflow, tiny_model, "cpu")
    node = host.actor_rollout_ref
    assert node.actor.optim.weight_decay == 0.25 and node.actor.use_kl_loss
    assert (configs["a"].actor_rollout_ref.actor.optim.lr, configs["b"].actor_rollout_ref.actor.optim.lr) == (
        0.01,
        0.02,
    )
    assert node.rollout.custom == {"policy": "base", "keeps_weights": False}
    assert node.rollout.load_format == "auto"
    assert not node.rollout.engine_kwargs.sglang, "the CPU's servers take none"


def test_sglang_gets_room_for_all_adapters_and_keeps_its_base(workflow, tiny_model):
    _, host = configured(workflow, tiny_model, "cuda", {"a": AdapterShape(64, 128.0, ("all-linear",)), "b": SEVEN[0]})
    node = host.actor_rollout_ref
    arguments = node.rollout.engine_kwargs.sglang
    assert (arguments.enable_lora, arguments.max_lora_rank, arguments.max_loras_per_batch) == (True, 64, 3)
    assert len(arguments.lora_target_modules) == 7 and arguments.enable_weights_cpu_backup
    assert node.rollout.load_format == "auto", "with dummy weights, SGLang loads no adapter by its path"
    assert node.actor.fsdp_config.model_dtype == "bf16"


SEVEN = [AdapterShape(8, 16.0, targets) for targets in (("q_proj", "v_proj"), ("o_proj", "down_proj"))]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "k_proj"), "add q_proj and v_proj"),
        (("v_proj",), "add q_proj and v_proj"),
        (("up_proj",), "gate_proj and up_proj together"),
        (("lm_head",), "SGLang serves no adapter of lm_head"),
    ],
)
def test_layers_that_sglang_would_skip_are_refused(workflow, tiny_model, targets, message):
    with pytest.raises(UserError, match=f"policies.a.lora.targets: .*{message}"):
        configured(workflow, tiny_model, "cuda", {"a": AdapterShape(8, 16.0, targets), "b": SEVEN[1]})


def test_optimizers_of_8_bits_are_for_whole_weights(workflow, tiny_model):
    configs, _ = configured(workflow, tiny_model, "cpu")
    shapes = {"a": SEVEN[0]}
    for optim, message in (
        (configs["a"].critic.optim, "policies.a.critic.config: optim.optimizer=AdamW8bit is for whole weights"),
        (configs["a"].actor_rollout_ref.actor.optim, "policies.base.config: actor.optim.optimizer=AdamW8bit is for"),
    ):
        optim.optimizer = "AdamW8bit"
        with pytest.raises(UserError, match=message):
            host_config(configs, "base", trained_here(workflow, configs, shapes, "a"), shapes, platform="cpu")


def test_targets_that_the_model_lacks_are_refused_before_anything_starts(workflow):
    lora = workflow.policies["a"].lora.model_copy(update={"targets": ("qproj",)})
    policy = workflow.policies["a"].model_copy(update={"lora": lora})
    wrong = workflow.model_copy(update={"policies": workflow.policies | {"a": policy}})
    assert find_models(workflow).adapters == {}
    with pytest.raises(UserError, match="policies.a.lora: Qwen2ForCausalLM has no linear layer `qproj`"):
        find_models(wrong)
    policy = policy.model_copy(update={"lora": lora.model_copy(update={"path": "/nowhere"})})
    wrong = workflow.model_copy(update={"policies": workflow.policies | {"a": policy}})
    with pytest.raises(UserError, match="policies.a.lora.path: /nowhere is not a folder of PEFT"):
        find_models(wrong)


def test_a_sync_writes_all_adapters_at_once_before_servers_wake_and_keeps_the_last_version_alone(
    workflow, tiny_model, tmp_path, monkeypatch
):
    configs, _ = configured(workflow, tiny_model, "cpu")
    done, loading = [], asyncio.Event()

    def write(folders, stale):
        for folder in folders.values():
            Path(folder).mkdir(parents=True)
        done.append(("write", [Path(folder).name for folder in folders.values()], [Path(old).name for old in stale]))

    async def load(name, version, folder):
        assert Path(folder).is_dir()
        loading.set()

    async def update(sync, version):
        await asyncio.wait_for(loading.wait(), 30)  # a server loads while it wakes up
        done.append(("wake", version))

    async def in_turn(function, *arguments):
        if function is run_sync:
            await update(*arguments)
        else:
            function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", in_turn)
    host = AdapterHost("base", configs["base"], SimpleNamespace(), ())
    host.workers = SimpleNamespace(write_adapters=write)
    host.sync, host.folder = None, SimpleNamespace(name=str(tmp_path / "shared"))
    host.replicas = [SimpleNamespace(server_handle=SimpleNamespace(load_adapter=SimpleNamespace(remote=load)))]
    options = {"trained": True, "reference": None, "critic": False, "start": None}
    policies = [AdapterPolicy(name, configs[name], host, **options) for name in "ab"]

    async def sync():
        for version in (3, 4, 5):
            host.awake = False
            loading.clear()
            await asyncio.gather(*[policy.sync_weights(version) for policy in policies])

    asyncio.run(sync())
    assert done == [
        ("write", ["a@3", "b@3"], []), ("wake", 3),
        ("write", ["a@4", "b@4"], []), ("wake", 4),
        ("write", ["a@5", "b@5"], ["a@3", "b@3"]), ("wake", 5),
    ]  # fmt: skip
    assert [policy.version for policy in policies] == [5, 5] and host.awake


def test_an_adapter_whose_write_failed_in_anothers_call_is_not_served(workflow, tiny_model):
    configs, _ = configured(workflow, tiny_model, "cpu")
    host, calls = AdapterHost("base", configs["base"], SimpleNamespace(), ()), []

    def write(folders, stale):
        calls.append(list(folders))
        raise OSError("the disk is full")

    host.workers = SimpleNamespace(write_adapters=write)

    async def sync():
        return await asyncio.gather(*[host.write(name, name, []) for name in "ab"], return_exceptions=True)

    assert [str(error) for error in asyncio.run(sync())] == ["the disk is full"] * 2 and calls == [["a", "b"]]


def test_every_pass_names_its_adapter():
    calls = []
    passes = [name for name in AdapterWorkers.__dict__ if name.startswith(("compute_", "update_"))]
    workers = SimpleNamespace(world_size=2, **{name: calls.append for name in passes})
    from tensordict import TensorDict

    critic = {"use_dynamic_bsz": False, "ppo_max_token_len_per_gpu": 512, "ppo_micro_batch_size_per_gpu": 2}
    mine = AdapterWorkers(workers, "planner", OmegaConf.create(critic))
    for name in passes:
        getattr(mine, name)(TensorDict({}, batch_size=[]))
    assert mine.world_size == 2
    of_critic = {name: "critic" in name or "values" in name for name in passes}
    assert sum(of_critic.values()) == 2 and len(passes) == 5
    for name, data in zip(passes, calls, strict=True):
        assert data["adapter"] == (critic_of("planner") if of_critic[name] else "planner")
        assert ("micro_batch_size_per_gpu" in data.keys()) == of_critic[name]
