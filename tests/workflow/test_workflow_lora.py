"""Adapters in a workflow file: their base, what they inherit from it, and mistakes at their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.adapter_shape import AdapterShape, shape_of
from recipe.dag.workflow.memory import estimate_states
from recipe.dag.workflow.to_yaml import to_yaml

TEXT = """\
dag_id: demo
agents: [{name: one, policy: p}, {name: two, policy: q}]
policies:
  base: {model: {path: MODEL}, frozen: true, config: {actor.optim.weight_decay: 0.5}}
  p: {lora: {base: base, rank: 8}, lr: 1.0e-4}
  q: {lora: {base: base, targets: [q_proj, v_proj], alpha: 3}}
nodes:
  - {id: one, agent: one}
  - {id: two, agent: two, after: one}
  - {id: score, reward: score.py:score, after: two}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    return lambda text: load_workflow(tmp_path / "flow.yaml", text)


def test_an_adapter_has_the_model_and_configuration_of_its_base_and_writes_neither(load):
    workflow = load(TEXT)
    assert workflow.policies["p"].model == workflow.policies["base"].model
    assert workflow.policies["q"].config == {"actor.optim.weight_decay": 0.5}
    assert (workflow.local_policies(), workflow.trained_policies()) == (("base",), ("p", "q"))
    assert workflow.trained_on("base") == workflow.adapters_of("base") == ("p", "q")
    assert (workflow.base_of("p"), workflow.base_of("base")) == ("base", "base")
    again = load(to_yaml(workflow))
    assert again.policies == workflow.policies and to_yaml(again).count("model:") == 1
    assert shape_of(workflow.policies["p"].lora) == AdapterShape(8, 16.0, ("all-linear",))
    assert shape_of(workflow.policies["q"].lora) == AdapterShape(16, 3.0, ("q_proj", "v_proj"))


P = "{lora: {base: base, rank: 8}, lr: 1.0e-4}"


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("rank: 8", "rank: 0", "p.lora.rank", "at least 1, got 0"),
        ("rank: 8", "r: 8", "p.lora.r", "write `rank`"),
        ("rank: 8", "from: x", "p.lora.from", "write `path`"),
        ("[q_proj, v_proj]", "[]", "q.lora.targets", "must not be empty; write `all-linear`"),
        ("base: base, rank", "base: bas, rank", "p.lora.base", "no policy `bas`; did you mean `base`?"),
        ("base: base, rank", "base: p, rank", "p.lora.base", "cannot be its own base"),
        ("base: base, rank", "base: q, rank", "p.lora.base", "policy `q` is itself an adapter; write its base, base"),
        (" frozen: true,", "", "p.lora.base", "policy `base` is trained, and an adapter needs weights that stay"),
        ("{model: {path: MODEL}, frozen: true, config: {actor.optim.weight_decay: 0.5}}", "{api: {model: gpt-4o}}",
         "p.lora.base", "policy `base` is behind an API"),
        (P, "{lora: {base: base}, model: {path: x}}", "p.model", "an adapter has the model of its base"),
        (P, "{lora: {base: base}, gpus: 1}", "p.gpus", "set this in `policies.base`"),
        (P, "{lora: {base: base}, critic: {}}", "p.critic", "estimator `grpo` does not use values"),
        (P, "{lora: {base: base}, critic: {model: {path: x}}}", "p.critic.model", "on the model of its base"),
        (P, "{lora: {base: base, path: x}, critic: {rank: 4}}", "p.critic.rank", "starts at `lora.path`, too"),
        ("frozen: true,", "critic: {rank: 4},", "base.critic.rank", "only the critic of an adapter has a rank"),
        (P, "{lora: {base: base}, critic: {config: {optim.clip_grad: 1.0, fsdp.param_offload: true}}}",
         'p.critic.config["fsdp.param_offload"]', "policy `p` is an adapter; set this in `policies.base.config`"),
        (P, "{lora: {base: base}, api: {model: gpt-4o}}", "p.lora", "remove `lora` or `api`"),
        (P, "{lora: {base: base}, config: {rollout.dtype: float32}}", 'p.config["rollout.dtype"]',
         "policy `p` is an adapter; set this in `policies.base.config`"),
        ("agent: one}", "agent: one, config: {rollout.dtype: float32}}", 'nodes[0].config["rollout.dtype"]',
         "policy `p` is an adapter; set this in `policies.base.config`"),
        (P, "{lora: {base: base}, frozen: true}", "p.frozen", "a frozen adapter is its base; use policy `base`"),
        (P, "{lora: {base: base, rank: 8, path: x}}", "p.lora.rank", "the folder at `path` determines this"),
        (P, "{lora: {base: base, path: x}, reference: true}", "p.reference", "the reference would be the base"),
        (P, '{lora: {base: base, path: "${x}"}}', "p.lora.path", "write `${oc.env:NAME}`"),
        ("nodes:", "algorithm: {estimator: gae}\nnodes:", "p", "estimator `gae` needs a critic; add `critic: {}`"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_at_its_place(load, old, new, place, message):
    assert old in TEXT
    with pytest.raises(WorkflowError) as caught:
        load(TEXT.replace(old, new))
    lines = str(caught.value).splitlines()
    place = place if place.startswith("nodes") else f"policies.{place}"
    assert any(f": {place}: " in line and message in line for line in lines), lines


def test_mappo_has_a_critic_for_the_adapters_of_each_base(load):
    own = TEXT.replace(", lr: 1.0e-4}", ", critic: {}}").replace("alpha: 3}}", "alpha: 3}, critic: {}}")
    own = own.replace("nodes:", "algorithm: {estimator: mappo}\nnodes:")
    with pytest.raises(WorkflowError, match="needs one critic for all policies of a model; write `critic: {share: p}`"):
        load(own)
    load(own.replace("alpha: 3}, critic: {}}", "alpha: 3}, critic: {share: p}}"))
    other = "  other: {model: {path: OTHER}, frozen: true}\n  p:"
    load(own.replace("  p:", other).replace("{base: base, targets", "{base: other, targets"))


def test_a_base_that_no_agent_uses_is_used_by_its_adapters(load):
    load(TEXT)
    with pytest.raises(WorkflowError, match="no agent uses policy `q`"):
        load(TEXT.replace("{name: two, policy: q}", "{name: two, policy: base}"))


def test_the_plan_counts_the_base_once_and_each_adapter(load, tiny_model, tmp_path):
    workflow = load(TEXT.replace("MODEL", str(tiny_model)))
    base, p, q = estimate_states(workflow)
    assert (base.weights, base.gradients, base.optimizer) == (2 * base.parameters, 0, 0)
    assert (
        p.parameters == 2 * 8 * (64 + 48 + 48 + 64 + 3 * 96)
        and p.weights + p.gradients + p.optimizer == 16 * p.parameters
    )
    valued = TEXT.replace("MODEL", str(tiny_model)).replace("lr: 1.0e-4}", "critic: {rank: 4}}")
    valued = valued.replace("alpha: 3}}", "alpha: 3}, critic: {share: p}}")
    _, with_critic, sharing = estimate_states(load(valued.replace("nodes:", "algorithm: {estimator: gae}\nnodes:")))
    assert (with_critic.critic, sharing.critic) == (16 * (p.parameters // 2 + 32 + 1), 0)
    assert q.parameters == 2 * 16 * (64 + 48) and q.serving == 2 * q.parameters
    folder = tmp_path / "adapter"
    folder.mkdir()
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["o_proj"], "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    started = load(TEXT.replace("MODEL", str(tiny_model)).replace("rank: 8", f"path: {folder}"))
    assert estimate_states(started)[1].parameters == 2 * 4 * 64
    (folder / "adapter_config.json").write_text(json.dumps(options | {"use_dora": True}))
    with pytest.raises(UserError, match="policies.p.lora.path: .*use_dora=True is not supported"):
        shape_of(started.policies["p"].lora, "policies.p.lora.path")
    assert "use_dora" in estimate_states(started)[1].unknown


def test_the_shipped_workflow_has_an_adapter_for_each_agent():
    workflow = load_workflow(Path(__file__).parents[2] / "workflows" / "workflow_retool_ma_lora.yaml")
    assert workflow.trained_on("base") == ("planner", "executor", "verifier")
