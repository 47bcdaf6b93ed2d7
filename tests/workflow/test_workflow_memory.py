from __future__ import annotations

import json

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.memory import estimate
from recipe.dag.workflow.model_size import UnknownSize, size_of
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_json, to_text
from tests.workflow.shapes import write_config

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
  - {node_id: x, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: a}
  - {node_id: y, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: b, dependencies: [x]}
  - {node_id: z, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: c, dependencies: [y]}
  - {node_id: r, node_type: COMPUTE, node_role: REWARD, dependencies: [z], executable_ref: rewards.py:score}
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
    one, two, three = estimate(workflow, {"MODEL_PATH": path})
    count, critic = 494_032_768, 494_032_768 + 896 + 1
    assert (one.weights, one.gradients, one.optimizer, one.reference) == (4 * count, 4 * count, 8 * count, 4 * count)
    assert (one.critic, one.serving, one.total) == (16 * critic, 2 * count, 22 * count + 16 * critic)
    assert two.critic == 0 and two.total == 22 * count
    assert three.parameters is None and three.total is None and "JUDGE_PATH is not set" in three.unknown
    frozen = estimate(workflow, {"MODEL_PATH": path, "JUDGE_PATH": path})[2]
    assert (frozen.weights, frozen.reference, frozen.total) == (0, 0, 2 * count)


def test_the_plan_shows_it_when_asked(workflow, tmp_path):
    plan = make_plan(workflow)
    assert plan.memory == () and "Memory" not in to_text(plan)
    path = write_config(tmp_path / "m", HALF)
    plan = plan.model_copy(update={"memory": estimate(workflow, {"MODEL_PATH": path})})
    text = to_text(plan)
    assert "  one     0.49 B      2.0      2.0        4.0   2.0        7.9     1.0      18.8" in text
    assert "  three is unknown: environment variable JUDGE_PATH is not set" in text
    assert json.loads(to_json(plan))["memory"][0]["parameters"] == 494_032_768
