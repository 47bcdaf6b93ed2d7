from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.node import Kind

WORKFLOWS = sorted((Path(__file__).parents[2] / "workflows").glob("*.yaml"))

TEXT = """\
dag_id: demo
global_config: {server: {memory: 0.4}}
x-node: &checks {agent: critic, after: write}
agents:
  - {name: writer, policy: main}
  - {name: critic, policy: main, validation: {temperature: 0}, tools: [code_interpreter], tool_loop: {format: fenced}}
policies:
  main: {model: {path: "${oc.env:MODEL_PATH,tiny}"}, config: {actor: {optim.weight_decay: 1e-6}}}
episode: {max_turns: 2, retries: 0}
algorithm: {estimator: grpo, group_by: [uid, agent, turn]}
nodes:
  - {id: score, reward: score.py:score, after: [judge, check]}
  - {<<: *checks, id: judge}
  - {<<: *checks, id: check}
  - id: write
    agent: writer
    env: env.py:Env
    config: {rollout.gpu_memory_utilization: !Ref global_config.server.memory}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("async def score(episode): return {}\n")
    (tmp_path / "env.py").write_text("from base import Env\n")

    def load(text):
        (tmp_path / "workflow.yaml").write_text(text)
        return load_workflow(tmp_path / "workflow.yaml")

    return load


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_shipped_workflows_load(path):
    workflow = load_workflow(path)
    assert path.stem == f"workflow_{workflow.dag_id}"
    pays = workflow.reward_nodes or any(node.env_pays for node in workflow.rollout_nodes)
    assert workflow.rollout_nodes and pays and workflow.trained_policies()


def test_all_four_workflows_are_shipped():
    names = {path.stem.removeprefix("workflow_") for path in WORKFLOWS}
    assert {"retool_ma", "retool_ma_separate", "single_agent_tool", "no_tool"} <= names


def test_the_separate_workflow_has_three_policies_and_is_else_the_shared_one():
    folder = WORKFLOWS[0].parent
    shared, separate = (load_workflow(folder / f"workflow_retool_ma{end}.yaml") for end in ("", "_separate"))
    assert [agent.policy for agent in separate.agents] == list(separate.policies) == ["planner", "executor", "verifier"]
    unchanged = ("name", "sampling", "validation", "tools", "tool_loop")
    assert [[getattr(a, key) for key in unchanged] for a in shared.agents] == [
        [getattr(a, key) for key in unchanged] for a in separate.agents
    ]
    assert (shared.episode, shared.algorithm) == (separate.episode, separate.algorithm)
    assert [n.args for n in shared.reward_nodes] == [n.args for n in separate.reward_nodes]


def test_the_fourth_agent_of_the_comment_loads(tmp_path):
    path = WORKFLOWS[0].parent / "workflow_retool_ma.yaml"
    text = path.read_text().replace("recipe/", f"{path.parents[1]}/recipe/")
    agent, node = re.findall(r"^#   (- \{.*(?:policy|id:).*\})$", text, re.MULTILINE)
    text = text.replace("\npolicies:\n", f"\n  {agent}\npolicies:\n") + f"  {node}\n"
    (tmp_path / "workflow.yaml").write_text(text)
    workflow = load_workflow(tmp_path / "workflow.yaml")
    assert [agent.name for agent in workflow.agents][3] == "critic"
    assert workflow.agent_of(workflow.node("criticize")).name == "critic"


def test_values_arrive_as_written(load):
    workflow = load(TEXT)
    assert workflow.dag_id == "demo"
    assert workflow.policies["main"].model.path == "${oc.env:MODEL_PATH,tiny}"
    assert workflow.agents[1].validation.temperature == 0 and workflow.agents[0].validation.temperature is None
    assert workflow.episode.retries == 0
    assert workflow.algorithm.group_by == ("uid", "agent", "turn")
    assert Path(workflow.path).is_absolute()


def test_names_merge_keys_and_scalars_are_read(load):
    workflow = load(TEXT)
    judge = workflow.node("judge")
    assert judge.kind is Kind.ROLLOUT
    assert workflow.agent_of(judge).name == "critic"
    assert workflow.node("write").env == ("env.py:Env",)


def test_overrides_of_nodes_and_refs_end_in_their_policy(load):
    assert load(TEXT).policies["main"].config == {
        "actor.optim.weight_decay": 1e-6,
        "rollout.gpu_memory_utilization": 0.4,
    }


def test_nodes_come_in_topological_order_with_the_files_order_among_equals(load):
    ids = [node.id for node in load(TEXT).nodes]
    assert ids == ["write", "judge", "check", "score", "main.advantage", "main.update"]


def test_declared_training_nodes_rule_and_get_the_only_policy(load):
    train = "  - {id: %s, train: %s, after: %s}\n"
    text = TEXT + train % ("update", "update", "adv") + train % ("adv", "advantage", "score")
    nodes = load(text).training_nodes
    assert [(node.id, node.policy) for node in nodes] == [("adv", "main"), ("update", "main")]


def test_an_evaluation_of_frozen_policies_needs_no_reward(load):
    text = TEXT.replace("main: {model", "main: {frozen: true, model")
    workflow = load(text.replace(SCORE, ""))
    assert workflow.training_nodes == () and workflow.trained_policies() == ()


def test_an_env_may_score_instead_of_a_node(load):
    text = TEXT.replace("env: env.py:Env", "env: env.py:Env\n    env_pays: true").replace(SCORE, "")
    plays = text.replace("agent: critic,", "agent: critic, sees_env: true,")
    workflow = load(plays)
    assert workflow.node("main.update").after == ("main.advantage",)
    assert workflow.node("main.advantage").after == ("judge", "check")


def test_whom_no_env_rewards_must_be_rewarded_otherwise(load):
    text = TEXT.replace("env: env.py:Env", "env: env.py:Env\n    env_pays: true").replace(SCORE, "")
    with pytest.raises(WorkflowError, match=r"12:5: nodes\[0\]: nothing rewards agent `critic`, which is trained"):
        load(text)
    load(text.replace("{estimator: grpo", "{share_reward_in_agent: true, estimator: grpo"))
    frozen = text.replace("critic, policy: main", "critic, policy: fixed")
    load(frozen.replace("policies:\n", "policies:\n  fixed: {model: {path: m}, frozen: true}\n"))


@pytest.mark.parametrize("ref", ["json:dumps", "pkg.score:score"])
def test_a_dotted_module_is_checked_without_running_it(ref, load, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "score.py").write_text("def score(episode): return {}\nraise SystemExit\n")
    assert load(TEXT.replace("score.py:score", ref)).reward_nodes[0].function == ref


SCORE = TEXT[TEXT.index("  - {id: score") : TEXT.index("  - {<<: *checks, id: judge")]


def test_what_a_file_imports_from_beside_it_is_read_there(tmp_path):
    """Another folder's helper.py says nothing about this one."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "helper.py").write_text("def score(episode, scale): ...\n")
    for name in ("flows", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("from helper import score\n")
    (tmp_path / "mine" / "helper.py").write_text("def score(episode):\n    return {}\n")
    text = """\
dag_id: beside
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: m}}}
nodes:
  - {id: solve, agent: solver}
  - {id: pay, reward: mine/rewards.py:score, after: solve}
"""
    (tmp_path / "flows" / "flow.yaml").write_text(text)
    assert load_workflow(tmp_path / "flows" / "flow.yaml").dag_id == "beside"
    (tmp_path / "mine" / "helper.py").write_text("def score(episode, scale): ...\n")
    with pytest.raises(WorkflowError, match="needs the argument `scale`"):
        load_workflow(tmp_path / "flows" / "flow.yaml")
