"""The configuration of adapters' hosts, and the calls of an adapter as a policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy.adapter import AdapterHost, AdapterPolicy, AdapterWorkers
from recipe.dag.policy.adapter_config import critic_of, host_config, trained_adapters
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.policy import run_sync, sync_metrics
from recipe.dag.settings.compose import compose_config
from recipe.dag.train.models import find_models
from recipe.dag.workflow.adapter_shape import AdapterShape, shape_of
from tests.policy.spmd_adapters import WORKFLOW

SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"


@pytest.fixture
def workflow(tiny_model, tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(
        WORKFLOW.format(model=tiny_model).replace(
            "frozen: true}", "frozen: true, config: {actor.optim.weight_decay: 0.25}}"
        )
    )
    return load_workflow(tmp_path / "flow.yaml")


def configured(workflow, tiny_model, platform: str, shapes=None, overrides=()):
    run = compose_config("dag", [f"workflow={workflow.path}", "data.train_files=none", *overrides])
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
    assert node.rollout.custom == {"policy": "base", "keeps_weights": False, "adapter_columns": 32}
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


@pytest.mark.parametrize(
    ("overrides", "graphs"),
    [
        ((), True),
        (("actor_rollout_ref.rollout.enforce_eager=true",), False),
        ((f"+{SGLANG}.disable_cuda_graph=true",), False),
        ((f"+{SGLANG}.enable_breakable_cuda_graph=false",), False),
        ((f"+{SGLANG}.enable_breakable_cuda_graph=true", "actor_rollout_ref.rollout.enforce_eager=true"), True),
        ((f"+{SGLANG}.lora_backend=csgmv", f"+{SGLANG}.enable_breakable_cuda_graph=true"), False),
    ],
)
def test_prompts_with_adapters_have_the_cuda_graphs_that_can_have_them(workflow, tiny_model, overrides, graphs):
    _, host = configured(workflow, tiny_model, "cuda", dict(zip("ab", SEVEN, strict=True)), overrides)
    arguments = host.actor_rollout_ref.rollout.engine_kwargs.sglang
    assert arguments.lora_backend == ("csgmv" if "csgmv" in str(overrides) else "dense")
    assert arguments.enable_breakable_cuda_graph == graphs


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


@pytest.fixture
def adapters(workflow, tiny_model, tmp_path, monkeypatch):
    """Adapters a and b with a trainer and a server that write what they do to `adapters.done`."""
    configs, _ = configured(workflow, tiny_model, "cpu")
    done, loading = [], asyncio.Event()

    def write(name, folder, stale):
        Path(folder).mkdir(parents=True)
        done.append(("write", Path(folder).name, [Path(old).name for old in stale]))

    async def load(name, version, folder):
        assert Path(folder).name == f"{name}@{version}" and Path(folder).is_dir()
        loading.set()

    async def wake():
        await asyncio.wait_for(loading.wait(), 30)  # a server loads while it wakes up
        loading.clear()
        done.append(("wake",))

    async def in_turn(function, *arguments):
        return await wake() if function is run_sync else function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", in_turn)
    host = AdapterHost("base", configs["base"], SimpleNamespace(), ())
    host.workers = SimpleNamespace(
        write_adapter=write, update_actor=lambda data: done.append(("update", data["adapter"]))
    )
    host.client, host.sync, host.folder = None, None, SimpleNamespace(name=str(tmp_path / "shared"))
    host.replicas = [SimpleNamespace(server_handle=SimpleNamespace(load_adapter=SimpleNamespace(remote=load)))]
    options = {"trained": True, "reference": None, "critic": False, "start": None}
    policies = {name: AdapterPolicy(name, configs[name], host, **options) for name in "ab"}
    for policy in policies.values():
        policy.canary_of = host.canary_of = no_canary
        asyncio.run(policy.start())

    async def sync(version):
        await asyncio.gather(*[policy.sync_weights(version) for policy in policies.values()])

    def update(name, **options):
        data = TensorDict({}, batch_size=[])
        tu.assign_non_tensor(data, **options)
        policies[name].workers.update_actor(data)

    return SimpleNamespace(host=host, policies=policies, done=done, sync=sync, update=update)


async def no_canary(*_, **__):
    return None


def test_servers_load_all_adapters_before_they_wake_and_keep_the_last_version_alone(adapters):
    async def main():
        for version in (3, 4, 5):
            adapters.host.awake = False
            await adapters.sync(version)

    asyncio.run(main())
    assert adapters.done == [
        ("write", "a@3", []), ("write", "b@3", []), ("wake",),
        ("write", "a@4", []), ("write", "b@4", []), ("wake",),
        ("write", "a@5", ["a@3"]), ("write", "b@5", ["b@3"]), ("wake",),
    ]  # fmt: skip
    assert [policy.version for policy in adapters.policies.values()] == [5, 5] and adapters.host.awake


def test_an_adapter_is_sent_after_its_last_update_of_a_step_and_one_without_an_update_by_the_sync(adapters):
    async def main():
        await adapters.sync(3)
        adapters.host.awake = False
        adapters.done.clear()
        adapters.update("b", more_follow=True)
        adapters.update("b")
        await adapters.sync(4)

    asyncio.run(main())
    updates = [("update", "b"), ("update", "b")]
    assert adapters.done == [*updates, ("write", "b@4", []), ("write", "a@4", []), ("wake",)]
    parts = sync_metrics([*adapters.policies.values(), adapters.host])
    assert set(parts) == {"timing/a.write", "timing/a.load", "timing/b.write", "timing/b.load", "timing/base.wake"}


def test_a_server_that_could_not_load_ends_the_sync(adapters):
    async def fails(*_):
        raise RuntimeError("SGLang did not load a@3")

    adapters.host.replicas[0].server_handle.load_adapter.remote = fails
    with pytest.raises(RuntimeError, match="did not load a@3"):
        asyncio.run(adapters.sync(3))


def test_the_base_is_compared_at_each_wake_up_beside_the_adapters(adapters):
    checked = []

    async def main():
        together = asyncio.Barrier(3)

        def canary(name):
            async def check(log_probs, version, *, seconds):
                if version < 4:
                    await asyncio.wait_for(together.wait(), 30)
                checked.append((name, version))

            return SimpleNamespace(prompt=[1], check=check)

        adapters.host.workers.score_canary = lambda *_: [([0.0], 0.1)]
        for policy in (*adapters.policies.values(), adapters.host):
            policy.canary = canary(policy.name)
        await adapters.sync(3)
        await adapters.sync(4)

    asyncio.run(main())
    assert sorted(checked[:3]) == [("a", 3), ("b", 3), ("base", 0)] and sorted(checked[3:]) == [("a", 4), ("b", 4)]


def test_every_pass_names_its_adapter():
    calls = []
    passes = [name for name in AdapterWorkers.__dict__ if name.startswith(("compute_", "update_"))]
    workers = SimpleNamespace(world_size=2, **{name: calls.append for name in passes})
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
