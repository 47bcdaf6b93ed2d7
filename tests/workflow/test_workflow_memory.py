"""The sizes of models, what each GPU holds, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.memory import (
    BARE_CONTEXT,
    CONTEXT,
    GB,
    SERVER_BESIDE,
    Moments,
    PolicyOnGpu,
    Pool,
    estimate_pool,
    estimate_states,
    find_change,
    judge_pool,
    limit,
)
from recipe.dag.workflow.model_size import UnknownSize, size_of
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_json, to_text
from recipe.dag.workflow.trainer_memory import ADAM_8BIT, TrainerOptions
from tests.workflow.shapes import qwen, write_config

H100 = int(85.5 * GB)
FSDP = "actor_rollout_ref.actor.fsdp_config"
QWEN2 = {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
HALF = QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "tie_word_embeddings": True}
SEVEN = QWEN2 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                 "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
         "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
         "tie_word_embeddings": True}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
       "num_experts": 128, "num_hidden_layers": 48, "head_dim": 128, "num_attention_heads": 32,
       "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip

FILE = """\
dag_id: demo
agents: [{name: a, policy: one}, {name: b, policy: two}, {name: c, policy: three}]
policies:
  one: {model: {path: "${oc.env:MODEL_PATH}"}, critic: {}, reference: true}
  two: {model: {path: "${oc.env:MODEL_PATH}"}, critic: {share: one}, reference: true}
  three: {model: {path: "${oc.env:JUDGE_PATH}"}, frozen: true}
algorithm: {estimator: gae_chain, kl_loss_coef: 0.1}
nodes:
  - {id: x, agent: a}
  - {id: y, agent: b, after: x}
  - {id: z, agent: c, after: y}
  - {id: r, reward: rewards.py:score, after: z}
"""


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (HALF, 494_032_768),
        (SEVEN, 7_615_616_512),
        (QWEN3, 1_720_574_976),
        (MOE, 30_532_122_624),
        (LLAMA, 8_030_261_248),
        ({"text_config": HALF}, 494_032_768),
    ],
)
def test_parameters_are_those_that_the_published_models_have(config, parameters, tmp_path):
    size = size_of(write_config(tmp_path, config))
    assert size.parameters == parameters
    config = config.get("text_config", config)
    head = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    assert size.value_parameters == parameters - head + config["hidden_size"] + 1


def test_a_model_is_looked_for_in_the_environment_and_in_the_hubs_cache(tmp_path):
    write_config(tmp_path / "hub" / "models--org--small" / "snapshots" / "abc", HALF)
    assert size_of("${oc.env:M}", {"M": "org/small", "HF_HOME": str(tmp_path)}).parameters == 494_032_768
    assert size_of("org/small", {"HF_HUB_CACHE": str(tmp_path / "hub")}).parameters == 494_032_768


@pytest.mark.parametrize("config", [{}, {**HALF, "hidden_size": "many"}, []], ids=str)
def test_what_is_not_understood_is_unknown_and_says_why(config, tmp_path):
    with pytest.raises(UnknownSize, match="does not describe a supported decoder"):
        size_of(write_config(tmp_path, config))
    with pytest.raises(
        UnknownSize, match="no config.json of org/none on this machine; fetch .*: hf download org/none config.json"
    ):
        size_of("org/none", {"HF_HOME": str(tmp_path)})
    with pytest.raises(UnknownSize, match="MODEL_PATH is not set"):
        size_of("${oc.env:MODEL_PATH}", {})


@pytest.fixture
def workflow(folder):
    (folder / "demo.yaml").write_text(FILE)
    return load_workflow(folder / "demo.yaml")


def test_every_part_is_bytes_per_parameter(workflow, tmp_path):
    path = write_config(tmp_path / "m", HALF)
    one, two, three = estimate_states(workflow, {"MODEL_PATH": path})
    count, critic = 494_032_768, 494_032_768 + 896 + 1
    assert (one.weights, one.gradients, one.optimizer, one.reference) == (4 * count, 4 * count, 8 * count, 4 * count)
    assert (one.critic, one.serving, one.total) == (16 * critic, 2 * count, 22 * count + 16 * critic)
    small = estimate_states(workflow, {"MODEL_PATH": path}, moments={"one": Moments(ADAM_8BIT, ADAM_8BIT)})[0]
    assert (small.optimizer, small.critic) == (int(2.03125 * count), 8 * critic + int(2.03125 * critic))
    assert two.critic == 0 and two.total == 22 * count
    assert three.parameters is None and three.total is None and "JUDGE_PATH is not set" in three.unknown
    frozen = estimate_states(workflow, {"MODEL_PATH": path, "JUDGE_PATH": path})[2]
    assert (frozen.weights, frozen.reference, frozen.total) == (0, 0, 2 * count)


def test_the_plan_shows_it_when_asked(workflow, tmp_path):
    plan = make_plan(workflow)
    assert plan.memory == () and "Memory" not in to_text(plan)
    path = write_config(tmp_path / "m", HALF)
    plan = plan.model_copy(update={"memory": estimate_states(workflow, {"MODEL_PATH": path})})
    text = to_text(plan)
    assert "  one     0.49 B      2.0      2.0        4.0   2.0        7.9     1.0      18.8" in text
    assert "  three is unknown: environment variable JUDGE_PATH is not set" in text
    assert json.loads(to_json(plan))["memory"][0]["parameters"] == 494_032_768


@pytest.fixture
def pool(tmp_path):
    def make(model: str = "3b", *, policies: int = 1, gpus: int = 1, frozen: int = 0, **trainer) -> Pool:
        size, options = qwen(model, tmp_path), TrainerOptions(**{"tokens": 16384, **trainer})
        trained = [PolicyOnGpu(f"p{index}", size, options) for index in range(policies)]
        return Pool(gpus, (*trained, *(PolicyOnGpu(f"f{index}", size, None) for index in range(frozen))))

    return make


@pytest.mark.parametrize(
    ("model", "policies", "gpus"),
    [("0.5b", 1, 1), ("0.5b", 3, 1), ("1.5b", 1, 1), ("3b", 1, 1), ("3b", 1, 8), ("3b", 3, 4), ("7b", 1, 4)],
)
def test_runs_that_fit_an_80_gb_card_are_said_to(model, policies, gpus, pool):
    memory = estimate_pool(pool(model, policies=policies, gpus=gpus), H100)
    assert memory.fits and memory.used <= limit(H100)


def test_the_flagship_keeps_its_optimizer_on_the_card_and_stays_below_76_gb(pool):
    rollout, backward, step = estimate_pool(pool("3b"), H100).phases
    assert rollout.optimizer == 8 * 3_085_938_688 and rollout.used < 76 * GB
    assert step.used / GB == pytest.approx(61.8 + 3.5, rel=0.05), "the measured peak, and the processes' contexts"
    assert backward.gradients > 0 == rollout.gradients


def test_three_policies_of_3b_on_one_card_fit_where_their_states_leave_it_between_their_turns(pool):
    memory = judge_pool(pool("3b", policies=3), H100)
    assert not memory.fits and memory.enough_gpus == 4
    assert memory.change == (f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
    offloaded = estimate_pool(pool("3b", policies=3, param_offload=True, optimizer_offload=True), H100)
    assert offloaded.fits and offloaded.host / GB == pytest.approx(162, rel=0.01)
    assert offloaded.phases[0].weights == offloaded.phases[0].optimizer == 0


def test_what_is_too_large_for_the_card_even_alone_passes_through_it_or_takes_more_gpus(pool):
    memory = judge_pool(pool("7b", param_offload=True, optimizer_offload=True), H100)
    assert memory.change == (f"{FSDP}.offload_policy=true",) and memory.enough_gpus == 2
    assert memory.problem.startswith("optimizer step of p0 needs 155.8 GB of each GPU's 85.5")


def test_a_change_is_the_smallest_with_which_it_fits(pool):
    wide = replace(pool("3b").policies[0], server_share=0.8)
    assert find_change(Pool(1, (wide,)), H100) == ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4",)
    assert find_change(pool("3b", tokens=65536), int(70 * GB)) == (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    )


def test_policies_share_the_servers_memory_and_a_frozen_one_keeps_its_part(pool):
    alone, beside = (estimate_pool(pool("0.5b", frozen=frozen), H100) for frozen in (0, 1))
    assert alone.phases[1].servers == 0 < beside.phases[1].servers < beside.phases[0].servers
    assert beside.cache_tokens["p0"] < 0.6 * alone.cache_tokens["p0"]


def test_trainers_that_have_loaded_nothing_yet_take_memory_from_the_first_server(pool):
    on_start = pool("0.5b", policies=3, param_offload=True, optimizer_offload=True)
    tokens = estimate_pool(on_start, H100).cache_tokens
    each = on_start.policies[0]
    context = CONTEXT + SERVER_BESIDE  # of an earlier server, which sleeps
    free = [H100 - 2 * CONTEXT - 2 * BARE_CONTEXT, H100 - 3 * CONTEXT - BARE_CONTEXT - context]
    expected = [(left / 6 - 2 * each.size.parameters) // each.size.cache_bytes_per_token for left in free]
    assert [tokens["p0"], tokens["p1"]] == pytest.approx(expected, abs=1)


def test_a_server_without_room_for_one_row_does_not_fit(pool):
    tight = judge_pool(Pool(1, (replace(pool("3b").policies[0], server_share=0.05),)), H100)
    assert tight.problem == "the KV cache of p0 has room for 0 tokens, but a row may have 4,096"
    assert tight.change == ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4",)


def test_a_critic_and_a_reference_are_counted(pool, tmp_path):
    size = qwen("0.5b", tmp_path)
    policy = PolicyOnGpu("p", size, TrainerOptions(8192), critic=size, reference=True)
    memory = estimate_pool(Pool(1, (policy,)), H100)
    assert [phase.name for phase in memory.phases][3:] == ["backward of p's critic", "optimizer step of p's critic"]
    assert memory.phases[0].optimizer == 8 * (size.parameters + size.value_parameters)
    assert memory.host == 4 * size.parameters


def test_the_plan_ends_with_the_verdict(pool, workflow):
    pools = (judge_pool(pool("3b"), H100), judge_pool(pool("3b", policies=3), H100))
    lines = to_text(make_plan(workflow).model_copy(update={"gpus": pools})).splitlines()
    assert "Memory of 1 GPU with p0, in GB (estimate; 85.5 available)" in lines
    assert "  fits: 75.9 of 85.5 GB" in lines
    last = pools[1].verdict
    assert lines[-1] == f"  {last}" and last.startswith("does not fit: rollout needs 148.8 GB of each GPU's 85.5")
    assert last.endswith(f"; pass {FSDP}.param_offload=true {FSDP}.optimizer_offload=true, or give it 4 GPUs")
