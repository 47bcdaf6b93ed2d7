"""Whatever stands in a file, only WorkflowErrors come out, each problem with a place."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_json, to_mermaid, to_text
from recipe.dag.workflow.to_yaml import to_yaml

HERE = Path(__file__).parent
SIIRL = {path.name: path.read_text() for path in (HERE.parent / "compat" / "siirl").glob("*.yaml")}
JUNK = ["", "null", "true", "0", "-1", "0.5", "abc", "[]", "{}", "[1, a]", "{a: 1}", "[[]]", '""', "é", "main", "pro"]
JUNK += ["*rollout", "!Ref a.b", "${oc.env:", "x: y", "? z", "0x1g", "<<: {a: b}", "[pro, pro]", "{agree: [pro]}"]
JUNK += [
    "ROLLOUT",
    "VOTE",
    "ACTOR",
    "CRITIC",
    "COMPUTE",
    "sub",
    "talk",
    "gae_chain",
    "[{}]",
    "{node: pro}",
    "env.py:Env",
]

FLOW = """\
dag_id: demo
agents: [{name: a, policy: one}, {name: b, policy: two}]
policies:
  one: {model: {path: x}, critic: {lr: 0.1}, train_cycle: 5, reference: true}
  two: {model: {path: x}, critic: {share: one}, train_cycle: 5, reference: true}
envs: {quiz: {path: env.py:Sized, kwargs: {size: 3}}, math: {path: env.py:Env}}
algorithm: {estimator: gae_chain, kl_loss_coef: 0.1}
loops: {talk: {nodes: [pro, contra], max_rounds: 3, until: {any_of: [{agree: [pro, contra]}, {node: pro, equals: 1}]}}}
nodes:
  - {node_id: pro, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: a}
  - {node_id: contra, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: b, dependencies: [pro],
     agent_options: {env_path: [quiz, math], env_route: data_source, obs_with_env: true}}
  - {node_id: vote, node_type: COMPUTE, node_role: VOTE, dependencies: [pro, contra], vote: {key: answer, ties: none}}
  - {node_id: note, node_type: COMPUTE, executable_ref: hooks.py:note, dependencies: [vote]}
  - {node_id: sub, workflow: inner.yaml, agents: {theirs: b}, dependencies: [note]}
  - {node_id: score, node_type: COMPUTE, node_role: REWARD, dependencies: [sub], executable_ref: rewards.py:score,
     executable_kwargs: {weight: 2.0}}
"""
INNER = """\
dag_id: inner
agents: [{name: theirs, policy: x}, {name: a, policy: x}]
loops: {again: {nodes: [one, two], max_rounds: 2, until: {node: two, key: x, at_least: 1}}}
envs: {more: {path: env.py:Bare}}
nodes:
  - {node_id: one, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: theirs, agent_options: {env_path: more}}
  - {node_id: two, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: a, dependencies: [one],
     when: {env: one, key: x, exists: true}}
"""
SIIRL["all.yaml"] = """\
dag_id: demo
global_config: {a: {b: 4}, c: !Ref global_config.a.b, d: {actor.optim.eps: !Ref global_config.c}}
parked: &parked {rollout.agent.rewards_with_env: false, actor.optim.eps: !Ref global_config.c}
episode: {timeout_s: 10}
algorithm: {lam: 0.9}
nodes:
  - {node_id: think, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 0, retry_limit: 2,
     config: {model.path: x, rollout.temperature: 0.7, rollout: {top_p: 0.9, n: 2}, actor.kl_loss_coef: 0.01}}
  - {node_id: answer, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 2, dependencies: [think],
     config: {rollout.multi_turn.max_assistant_turns: 3, actor.use_kl_loss: true, actor.clip_ratio: 0.3},
     agent_options: {env_path: [envs.py:Arithmetic, envs.py:Programs], obs_with_env: true, process_path: process.py}}
  - {node_id: load, node_type: DATA_LOAD}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, agent_group: 2, dependencies: [answer, load]}
  - {node_id: filter, node_type: COMPUTE, node_role: DYNAMIC_SAMPLING, dependencies: [reward], filter_plugin: a.b}
  - {node_id: v, node_type: MODEL_TRAIN, node_role: CRITIC, only_forward_compute: true, dependencies: [filter],
     config: {optim.lr: 1.0e-5, model.path: y, cliprange_value: 0.5, fsdp.x: !Ref global_config.a.b}}
  - {node_id: w, node_type: MODEL_TRAIN, node_role: CRITIC, agent_group: 2, dependencies: [v],
     agent_options: {share_instance: 0}}
  - {node_id: adv, node_type: COMPUTE, node_role: ADVANTAGE, agent_group: 2, dependencies: [w]}
  - {node_id: ref, node_type: MODEL_TRAIN, node_role: REFERENCE, dependencies: [adv], config: !Ref global_config.d}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [ref], agent_options: {train_cycle: 15}}
  - {node_id: train_2, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 2, dependencies: [train],
     agent_options: {train_cycle: 5}, config: {<<: *parked, model.path: z, actor.optim.lr: 1.0e-6}}
"""


def spoil(data, text):
    for _ in range(data.draw(st.integers(0, 3))):
        words = list(re.finditer(r"[\w.$&*!/:-]+|\{[^{}]*\}|\[[^\]]*\]", text))
        if not words:
            break
        word = data.draw(st.sampled_from(words))
        text = text[: word.start()] + data.draw(st.sampled_from(JUNK)) + text[word.end() :]
    return text


def check(path):
    try:
        workflow = load_workflow(path)
    except WorkflowError as error:
        assert error.problems and all(p.column >= 1 or p.line == 0 for p in error.problems)
        return
    assert all(math.isfinite(agent.sampling.temperature) for agent in workflow.agents)
    plan = make_plan(workflow)
    assert to_text(plan) and to_mermaid(plan) and to_json(plan)
    (path.parent / "again.yaml").write_text(to_yaml(workflow))
    again = load_workflow(path.parent / "again.yaml")
    assert again.model_copy(update={"path": "", "warnings": ()}) == workflow.model_copy(
        update={"path": "", "warnings": ()}
    )


@pytest.fixture
def files(folder):
    for name in ("process.py", "envs.py"):
        (folder / name).write_text((HERE.parent / "compat" / "siirl" / name).read_text())
    return folder


QUICK = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(data=st.data())
def test_our_files(files, data):
    (files / "inner.yaml").write_text(spoil(data, INNER))
    (files / "outer.yaml").write_text(spoil(data, FLOW))
    check(files / "outer.yaml")


@QUICK
@given(data=st.data(), name=st.sampled_from(sorted(SIIRL)))
def test_siirls_files(files, data, name):
    (files / name).write_text(spoil(data, SIIRL[name]))
    check(files / name)
