"""siiRL's workflow files, recreated from a description of their graphs, and files that use all that it declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.dag.loading.workflow_file import load_workflow

SIIRL = Path(__file__).parent / "siirl"
FILES = sorted([*SIIRL.glob("*.yaml"), *SIIRL.glob("*.json")])

NODES = """\
nodes:
  - {node_id: think, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 0}
  - {node_id: answer, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 1, dependencies: [think],
     agent_options: {env_path: [env.py:Bare]}}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, agent_group: 1, dependencies: [answer]}
  - {node_id: values, node_type: MODEL_TRAIN, node_role: CRITIC, only_forward_compute: true, dependencies: [reward]}
  - {node_id: shared, node_type: MODEL_TRAIN, node_role: CRITIC, only_forward_compute: true, agent_group: 1,
     dependencies: [values], agent_options: {share_instance: 0}}
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, agent_group: 1, dependencies: [shared]}
  - {node_id: learn, node_type: MODEL_TRAIN, node_role: CRITIC, dependencies: [advantage]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [learn],
     agent_options: {train_cycle: 15}}
  - {node_id: train_answer, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1, dependencies: [train],
     agent_options: {train_cycle: 15}}
"""
TEXT = "dag_id: demo\n" + NODES


def said(workflow) -> list[str]:
    return [f"{p.line}:{p.column}: {p.where}: {p.message}" for p in workflow.warnings]


def one(workflow, text) -> str:
    (found,) = [line for line in said(workflow) if text in line]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_shipped_graphs_load(file):
    workflow = load_workflow(file)
    assert workflow.trained_policies() and workflow.rollout_nodes and workflow.reward_nodes
    assert workflow.of_kind("update") and workflow.of_kind("advantage")
    assert all(problem.file == str(file) and problem.line > 0 for problem in workflow.warnings)
    assert all(": warning: " in problem.as_warning() for problem in workflow.warnings)


GRAPHS = {
    **dict.fromkeys(("grpo.yaml", "grpo.json", "embodied.yaml"), ("grpo", False)),
    **dict.fromkeys(("dapo.yaml", "dapo_early.yaml", "dapo_rebalance.yaml", "embodied_late.yaml"), ("grpo", True)),
    **dict.fromkeys(("ppo.yaml", "ppo_late_actor.yaml", "dapo_draft.yaml"), ("gae", False)),
    **dict.fromkeys(("marft.yaml", "marft_code.yaml", "marft_first.yaml"), ("gae_chain", False)),
}


def test_the_graph_says_which_algorithm_it_is():
    assert {file.name for file in FILES} == set(GRAPHS)
    for name, (estimator, dynamic) in GRAPHS.items():
        algorithm = load_workflow(SIIRL / name).algorithm
        assert algorithm.estimator == estimator, name
        assert (algorithm.dynamic_sampling is not None) == algorithm.drop_zero_variance == dynamic, name


def test_both_orders_of_ppo_are_one_workflow():
    first, second = (load_workflow(SIIRL / name) for name in ("ppo.yaml", "ppo_late_actor.yaml"))
    chain = [(n.kind, n.after[1:]) for n in first.training_nodes]
    assert chain == [(n.kind, n.after[1:]) for n in second.training_nodes]


def test_marft_is_two_agents_with_weights_of_their_own_and_one_critic():
    workflow = load_workflow(SIIRL / "marft.yaml")
    assert [agent.name for agent in workflow.agents] == ["agent_0", "agent_1"]
    assert [agent.policy for agent in workflow.agents] == ["policy_0", "policy_1"]
    first, second = workflow.policies.values()
    assert first.critic.share is None and second.critic.share == "policy_0"
    assert (first.train_cycle, second.train_cycle, first.reference, second.reference) == (15, 15, None, None)
    assert first.model.path == "${oc.env:MODEL_PATH}"
    assert first.config == {"rollout.tensor_model_parallel_size": 4, "rollout.gpu_memory_utilization": 0.3}
    actor = workflow.node("rollout_actor")
    assert actor.env == ("envs.py:Arithmetic",) and actor.env_pays and actor.sees_env
    assert actor.prompt_options == {"pre_chat_template": "Answer ${prompt}."}
    assert workflow.node("function_reward").after == ("rollout_actor",)
    assert [n.id for n in workflow.of_kind("values", "critic_update")] == ["policy_0.values", "policy_0.critic_update"]


def test_parked_anchors_and_what_nothing_reads_are_named_once_each():
    lines = said(load_workflow(SIIRL / "marft.yaml"))
    assert [line for line in lines if "actor_1_config: unknown key" in line] == [
        "4:1: actor_1_config: unknown key, which has no effect (anchors in it may be used)"
    ]
    assert sum('config["rollout.n"]' in line for line in lines) == 2  # one per anchor, however often it is used
    assert sum("rewards_with_env" in line for line in lines) == 1
    passes = [
        line for line in lines if line.endswith("write `actor.ppo_micro_batch_size_per_gpu`, which serves every pass")
    ]
    assert [line.partition(": ")[0] for line in passes] == ["5:3", "6:3", "11:3", "12:3"]
    assert len(lines) == 10


def test_refs_and_overrides_reach_the_policy_and_its_critic():
    policy = load_workflow(SIIRL / "ppo.yaml").policies["policy_0"]
    assert policy.config["actor.ppo_micro_batch_size_per_gpu"] == 8 and policy.config["actor.use_dynamic_bsz"] is False
    assert policy.critic.lr == 1e-5
    assert policy.critic.config == {"ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": False}


CONFIG = """{model.path: org/model, actor.optim.lr: 2.0e-6, actor.kl_loss_coef: 0.01, actor.clip_ratio: 0.3,
     actor.ppo_epochs: 2, rollout.temperature: 0.7, rollout.response_length: 99, rollout.val_kwargs.temperature: 0,
     rollout.multi_turn.max_assistant_turns: 3, rollout.multi_turn.use_all_traj: false, actor.grad_clip: 0.5,
     rollout: {top_p: 0.9}}"""


def test_options_go_where_they_are_honoured(load_text):
    workflow = load_text(TEXT.replace("agent_group: 0}", f"agent_group: 0, config: {CONFIG}}}"))
    agent, policy = workflow.agents[0], workflow.policies["policy_0"]
    assert (policy.model.path, policy.lr, policy.config) == ("org/model", 2e-6, {"actor.optim.clip_grad": 0.5})
    assert (agent.sampling.temperature, agent.sampling.top_p, agent.sampling.max_tokens) == (0.7, 0.9, 99)
    assert agent.validation.temperature == 0
    assert workflow.policies["policy_1"].model.path == "${oc.env:MODEL_PATH}"
    algorithm = workflow.algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.epochs) == (0.3, 0.3, 2)
    assert (workflow.episode.max_turns, workflow.episode.train_turns) == (3, "last")


def test_the_files_own_algorithm_and_episode_come_first(load_text):
    text = TEXT.replace("agent_group: 0}", f"agent_group: 0, config: {CONFIG}}}")
    workflow = load_text(text.replace("demo\n", "demo\nalgorithm: {epochs: 4, lam: 0.9}\nepisode: {max_turns: 2}\n"))
    assert (workflow.algorithm.epochs, workflow.algorithm.lam, workflow.episode.max_turns) == (4, 0.9, 2)
    assert "algorithm.epochs applies to all policies, and algorithm.epochs is 4" in one(workflow, "ppo_epochs")


@pytest.mark.parametrize(("more", "turns"), [("", "last"), (", rollout.multi_turn.use_all_traj: true", "all")])
def test_of_several_turns_the_last_is_trained_on_unless_the_file_says_otherwise(more, turns, load_text):
    config = f"config: {{rollout.multi_turn.max_assistant_turns: 3{more}}}"
    assert load_text(TEXT.replace("agent_group: 0}", f"agent_group: 0, {config}}}")).episode.train_turns == turns


def test_a_zero_is_a_value(load_text):
    assert load_text(TEXT).policies["policy_1"].critic.share == "policy_0"
    without = load_text(TEXT.replace("{share_instance: 0}", "{share_instance: null}"))
    assert without.policies["policy_1"].critic.share is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("agent_group: 0}", "agent_group: 0, filter_plugin: a.b.c}", "nodes have no filters"),
        ("agent_group: 0}", "agent_group: 0, retry_limit: 2}", "up to 2 times"),
        ("dependencies: [reward]}", "dependencies: [reward], retry_limit: 2}", "`episode.retries` sets"),
        ("agent_group: 0}", "agent_group: 0, depend: []}", "unknown key, which has no effect; did you mean"),
        ("agent_group: 0}", "agent_group: 0, only_forward_compute: true}", "this has no effect in ROLLOUT nodes"),
        ("agent_group: 0}", "agent_group: 0, executable_ref: a.b.c}", "functions of ROLLOUT nodes are not called"),
        ("agent_group: 0}", "agent_group: 0, agent_options: {agent_name: x}}", "single-agent loop"),
        ("agent_group: 0}", "agent_group: 0, agent_options: {obs: x}}", "unknown key, which has no effect"),
        ("agent_group: 0}", "agent_group: 0, agent_options: {train_cycle: 3}}", "the ACTOR node's applies"),
        ("agent_group: 0}", "agent_group: 0, config: {rollout.name: vllm}}", "the run chooses the server"),
        ("agent_group: 0}", "agent_group: 0, config: {actor.ppo_mini_batch_size: 8}}", "`algorithm.mini_batches`"),
        ("agent_group: 0}", "agent_group: 0, config: {model_params: 7B}}", "`gpus` under the policy"),
        ("[env.py:Bare]", "[env.py:Bare, env.py:Env]", "only the first env is used, as in siiRL"),
        ("node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 0",
         "node_type: MODEL_TRAIN, node_role: ROLLOUT, agent_group: 0", "it is read as"),
        ("nodes:\n", "nodes:\n  - nonsense\n", "this is not a mapping, so it is left out"),
        ("nodes:\n", "nodes:\n  - {node_id: load, node_type: DATA_LOAD}\n", "DATA_LOAD nodes run nothing"),
        ("nodes:\n", "nodes:\n  - {node_id: pass, node_type: COMPUTE}\n", "it has no function; the node is left out"),
        ("node_role: REWARD, agent_group: 1,", "node_role: REWARD, config: {a: 1},", "this has no effect in REWARD"),
        ("{share_instance: 0}}", "{share_instance: 0}, config: {optim.lr: 0.1}}", "config of its owner's node applies"),
        (",\n     agent_options: {train_cycle: 15}", "", "so this one is updated in every step"),
        ("agent_group: 1", "agent_group: 3", "they are renumbered from 0 without gaps"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_named(old, new, message, load_text):
    text = TEXT.replace(old, new) if old == "agent_group: 1" else TEXT.replace(old, new, 1)
    message = message.replace("they are", "here they are")
    assert one(load_text(text), message)


@pytest.mark.parametrize(("code", "replaced"), [(None, True), ("from siirl.x import y\n", True), ("", False)])
def test_siirls_own_env_is_replaced_by_ours(code, replaced, folder, load_text):
    if code is not None:
        own = (folder / "env.py").read_text().replace("class Bare", "class MathEnv")
        (folder / "math_env.py").write_text(code + own)
    workflow = load_text(TEXT.replace("env.py:Bare", "math_env.py:MathEnv"))
    (env,) = workflow.rollout_nodes[1].env
    assert env == ("verl_dag.envs.math_env:MathEnv" if replaced else "math_env.py:MathEnv")
    assert any("verl_dag.envs.math_env:MathEnv takes its place" in line for line in said(workflow)) == replaced


def test_an_anchor_at_the_top_is_no_misspelled_key(load_text):
    text = TEXT.replace("dag_id: demo\n", "dag_id: demo\nactor1_config: {}\nalgoritm: {}\n")
    assert one(load_text(text), "unknown key, which has no effect (anchors in it may be used)")
    assert one(load_text(text), "unknown key, which has no effect; did you mean `algorithm`?")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[shared]", "[shred]", "10:99: nodes[5].dependencies[0]: no node `shred`; did you mean `shared`?"),
        ("[answer]", "[anser]", "6:93: nodes[2].dependencies[0]: no node `anser`; did you mean `answer`?"),
        ("[reward]", "[reward, train]", "cycle: values -> shared -> advantage -> learn -> train -> values"),
        ("node_id: learn", "node_id: values", "nodes[6].node_id: another node is called `values`; rename one of them"),
        ("dependencies: [shared]", "dependencies: shared", "nodes[5].dependencies: expected a list, got 'shared'"),
        ("ROLLOUT, agent_group: 0", "ROLOUT, agent_group: 0", "nodes[0].node_role: expected one of"),
        ("share_instance: 0", "share_instance: 7", "share_instance: no agent_group 7; the groups are [0, 1]"),
        ("train_answer, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1",
         "train_answer, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 2", "agent_group 2 has no ROLLOUT node"),
        ("env.py:Bare", "env.py:Bar", "nodes[1].agent_options.env_path[0]: `env.py` defines no `Bar`; did you mean"),
        ("train_cycle: 15", "train_cycle: -1", "nodes[7].agent_options.train_cycle: expected a number of at least 1"),
        ("agent_group: 0}", "agent_group: 0, config: {rollout.temperature: hot}}",
         'nodes[0].config["rollout.temperature"]: expected a number, got \'hot\''),
        ("only_forward_compute: true, dependencies: [reward]", "config: {cliprange_value: 0}, dependencies: [reward]",
         "nodes[3].config.cliprange_value: expected a number above 0, got 0"),
        ("dag_id: demo\n", "dag_id: demo\nalgorithm: {estimator: grpo}\n",
         "nodes[3].node_role: estimator `grpo` does not use values"),
    ],
)  # fmt: skip
def test_mistakes_are_told_where_they_are_in_the_original(old, new, expected, problems_of):
    found = problems_of(TEXT.replace(old, new, 1).encode())
    assert expected in "\n".join(f"{p.line}:{p.column}: {p.where}: {p.message}" for p in found)
    assert all(problem.where.startswith(("nodes", "algorithm")) for problem in found)


def test_nodes_disagreeing_about_their_group_are_an_error(problems_of):
    text = TEXT.replace("agent_group: 0}", "agent_group: 0, config: {model.path: a}}")
    text = text.replace("dependencies: [learn],", "dependencies: [learn], config: {model.path: b},")
    (problem,) = problems_of(text.encode())
    assert "policy_0 has one value of this, but nodes[0].config[\"model.path\"] is 'a'; remove one" in problem.message


def test_an_agent_that_is_not_updated_is_frozen(load_text):
    text = TEXT[: TEXT.index("  - {node_id: train_answer")]
    text = text.replace("    agent_options: {share_instance: 0}", "").replace("     dependencies: [values], \n", "")
    workflow = load_text(text.replace(", agent_options: {share_instance: 0}", ""))
    assert workflow.policies["policy_1"].frozen and workflow.trained_policies() == ("policy_0",)
    assert one(workflow, "no ACTOR node updates this agent").startswith("4:5: nodes[1]: ")


def test_json_says_where_it_is_wrong(folder):
    from recipe.dag.core.problem import WorkflowError

    text = (SIIRL / "grpo.json").read_text()
    (folder / "a.json").write_text(text.replace('"rollout_actor"]', '"rollout"]'))
    with pytest.raises(WorkflowError, match=r"a.json:6:98: nodes\[1\].dependencies\[0\]: no node `rollout`"):
        load_workflow(folder / "a.json")
    (folder / "a.json").write_text(text.replace('"dag_id":', '"dag_id"'))
    with pytest.raises(WorkflowError, match="a.json:2:11: JSON syntax: expecting ':' delimiter"):
        load_workflow(folder / "a.json")


def test_json_and_yaml_say_the_same(folder):
    nodes = json.loads((SIIRL / "grpo.json").read_text())["nodes"]
    text = {"dag_id": "d", "description": '\U0001f600 \\ "quoted"\t/', "nodes": nodes}
    (folder / "a.json").write_text(json.dumps(text, indent="\t").replace("/", "\\/"))
    assert load_workflow(folder / "a.json").description == text["description"]
