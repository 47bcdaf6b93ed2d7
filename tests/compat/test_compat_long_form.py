"""The long form of a node is read as the short one: same workflow, mistakes at the key that was typed."""

from __future__ import annotations

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.node import Kind, Vote
from recipe.dag.workflow.to_yaml import to_yaml

HEAD = """\
dag_id: pair
agents: [{name: solver, policy: main}, {name: checker, policy: main}]
policies: {main: {model: {path: here}}}
episode: {max_turns: 2}
envs: {game: {path: env.py:Env}}
nodes:
"""
SHORT = (
    HEAD
    + """\
  - {id: solve, agent: solver, hooks: hooks.py:Own, prompt_options: {shots: 2}, env: game, env_pays: true}
  - {id: check, agent: checker, after: solve, sees_env: true}
  - {id: pick, vote: {key: answer}, after: [solve, check]}
  - {id: count, compute: score.py:count, after: pick}
  - {id: pay, reward: score.py:score, args: {weight: 2.0}, after: count}
"""
)
LONG = (
    HEAD
    + """\
  - node_id: solve
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent: solver
    agent_options:
      process_path: hooks.py:Own
      pre_process_kwargs: {shots: 2}
      env_path: game
      rewards_with_env: true
  - {node_id: check, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: checker, dependencies: [solve],
     agent_options: {obs_with_env: true}}
  - {node_id: pick, node_type: COMPUTE, node_role: VOTE, vote: {key: answer}, dependencies: [solve, check]}
  - {node_id: count, node_type: COMPUTE, node_role: DEFAULT, executable_ref: score.py:count, dependencies: [pick]}
  - {node_id: pay, node_type: COMPUTE, node_role: REWARD, executable_ref: score.py:score,
     executable_kwargs: {weight: 2.0}, dependencies: [count]}
"""
)
FILES = {
    "hooks.py": "class Own:\n    def prompt(self, context, *, shots=0): ...\n",
    "env.py": "class Env:\n    def step(self, actions, ground_truth): ...\n",
    "score.py": "def count(context): ...\n\ndef score(episode, *, weight=1.0): ...\n",
}


@pytest.fixture(autouse=True)
def files(folder):
    for name, text in FILES.items():
        (folder / name).write_text(text)


def test_both_forms_are_one_workflow(load_text):
    assert load_text(SHORT) == load_text(LONG)


def test_short_and_long_nodes_and_keys_mix(load_text):
    mixed = SHORT.replace("{id: pick, vote", "{node_id: pick, node_type: COMPUTE, node_role: vote, vote")
    mixed = mixed.replace("args: {weight", "executable_kwargs: {weight").replace("{id: check", "{node_id: check")
    assert load_text(mixed) == load_text(LONG)


def test_the_type_follows_from_the_role(load_text):
    shorter = "".join(
        line.replace("node_type: MODEL_INFERENCE, ", "").replace("node_type: COMPUTE, ", "")
        for line in LONG.splitlines(keepends=True)
        if line.strip() != "node_type: MODEL_INFERENCE"
    )
    assert "node_type" not in shorter and load_text(shorter) == load_text(LONG)


def test_a_null_gives_a_node_no_kind(load_text):
    null = LONG.replace("node_type: COMPUTE, node_role: DEFAULT, executable_ref", "vote: null, executable_ref")
    null = null.replace("node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: checker", "vote: null, agent: checker")
    assert load_text(null) == load_text(LONG)


def test_a_training_node_may_name_its_agent_instead_of_its_policy(load_text):
    steps = """\
  - {node_id: old, train: old_log_probs, AGENT, dependencies: [pay]}
  - {node_id: adv, train: advantage, AGENT, dependencies: [pay]}
  - {node_id: fit, train: update, AGENT, dependencies: [old, adv]}
"""
    by_agent = load_text(LONG + steps.replace("AGENT", "agent: solver"))
    assert by_agent == load_text(LONG + steps.replace("AGENT", "policy: main"))


CASES = [
    ("hook", ("hooks: hooks.py:Own", "hooks: §hooks.py:Owns"), "did you mean `Own`?"),
    ("option of a hook", ("{shots: 2}", "{§shot: 2}"), "shot"),
    ("dependency", ("after: solve", "after: §solv"), "did you mean `solve`?"),
    ("dependency in a list", ("[solve, check]", "[solve, §chek]"), "did you mean `check`?"),
    ("reward", ("score.py:score", "§score.py:scores"), "did you mean `score`?"),
    ("argument", ("{weight: 2.0}", "{§height: 2.0}"), "height"),
    ("route", ("env: game", "env: game, §env_route: a.b"), "fewer than two envs"),
    ("kind of an env's flag", ("env_pays: true", "env_pays: §1"), "expected true or false"),
    ("nothing said", ("- {id: count, compute: score.py:count, ", "- §{id: count, "), "the node has no kind"),
    ("two kinds", ("compute: score.py:count", "compute: score.py:count, §vote: {key: answer}"), "a node has one kind"),
    ("twice", ("after: count", "dependencies: [count], §after: count"), "this sets the same as `dependencies`"),
    ("twice, deeper", ("sees_env: true", "agent_options: {obs_with_env: true}, §sees_env: true"),
     "this sets the same as `agent_options.obs_with_env`"),
    ("options of a reward", ("args: {weight: 2.0}", "args: {weight: 2.0}, §hooks: hooks.py:Own"), "only rollout nodes"),
    ("no id", ("{id: check, ", "§{"), "give the node an `id`"),
    ("unknown", ("after: solve", "after: solve, §aftr: x"), "unknown key"),
    ("no agent", ("{id: check, agent: checker, ", "§{id: check, node_role: rollout, "), "must name its agent"),
    ("unknown agent", ("agent: checker", "agent: §cheker"), "did you mean `checker`?"),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "message"), [pytest.param(case[1:-1], case[-1], id=case[0]) for case in CASES])
def test_one_mistake_is_one_problem_at_the_key_that_was_typed(edits, message, expect_one_problem):
    expect_one_problem(SHORT, edits, message)


MISTAKES = [
    ("type", ("{node_id: pick, node_type: COMPUTE", "{node_id: pick, node_type: §COMPUT"), "did you mean `COMPUTE`?"),
    ("role", ("node_role: REWARD", "node_role: §DYNAMIC_SAMPLING"), "expected one of"),
    ("role of the type", ("node_role: REWARD", "node_role: §ACTOR"), "a COMPUTE node cannot be ACTOR"),
    ("function of a rollout", ("agent: checker,", "agent: checker, §executable_ref: score.py:score,"),
     "only REWARD and DEFAULT nodes"),
    ("forward rollout", ("agent: checker,", "agent: checker, §only_forward_compute: true,"), "only MODEL_TRAIN nodes"),
    ("no function", ("{node_id: pay", "§{node_id: pay"), ("executable_ref: score.py:score,", ""),
     "a REWARD node needs `executable_ref: file.py:function`"),
    ("agent of a reward", ("node_role: REWARD,", "node_role: REWARD, §agent: checker,"), "not belong to one agent"),
    ("agent and group", ("agent: checker,", "agent_group: 1, §agent: checker,"), "not both"),
    ("group range", ("agent: checker,", "agent_group: §2,"), "no agent 2; agent_group is an index from 0 to 1"),
    ("negative group", ("agent: checker,", "agent_group: §-1,"), "no agent -1"),
    ("group by name", ("agent: checker,", "agent_group: §checker,"), "expected a whole number, got 'checker'"),
    ("dependency", ("dependencies: [solve],", "dependencies: [§solv],"), "nodes[1].dependencies[0]: no node `solv`"),
    ("field", ("dependencies: [solve],", "§dependencis: [solve],"), "did you mean `dependencies`?"),
    ("option", ("pre_process_kwargs", "§pre_proces_kwargs"), "did you mean `pre_process_kwargs`?"),
    ("options", ("agent_options: {obs_with_env: true}", "agent_options: §3"), "expected a mapping, got 3"),
    ("hook", ("hooks.py:Own", "§hooks.py:Owns"), "nodes[0].agent_options.process_path: `hooks.py` defines no `Owns`"),
    ("no agents", ("dag_id: pair\nagents:", "§dag_id: pair\nx-agents:"), ("agent: checker,", "agent_group: 1,"),
     "`agents` is missing"),
    ("training node's agent", ("nodes:\n", "nodes:\n  - {node_id: up, node_role: ACTOR, agent: §cheker}\n"),
     "no agent `cheker`; did you mean `checker`?"),
    ("forward twice", ("nodes:\n", "nodes:\n  - {id: up, §train: update, only_forward_compute: true}\n"),
     "this sets the same as `only_forward_compute`"),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "message"), [pytest.param(case[1:-1], case[-1], id=case[0]) for case in MISTAKES])
def test_a_mistake_is_reported_under_its_field(edits, message, expect_one_problem):
    expect_one_problem(LONG, edits, message)


def test_training_nodes_keep_their_steps_and_the_policy_of_their_agent(load_text):
    train = "  - {{node_id: {0}, node_role: {1}, agent_group: 1, dependencies: [{2}], only_forward_compute: {3}}}\n"
    steps = [
        ("old", "ACTOR", "pay", "true"),
        ("adv", "ADVANTAGE", "pay", "false"),
        ("up", "ACTOR", "adv, old", "false"),
    ]
    nodes = load_text(LONG + "".join(train.format(*step) for step in steps)).training_nodes
    assert [(node.id, node.train, node.policy, node.after) for node in nodes] == [
        ("old", "old_log_probs", "main", ("pay",)),
        ("adv", "advantage", "main", ("pay",)),
        ("up", "update", "main", ("adv", "old")),
    ]


def test_a_vote_survives_the_import(load_text, folder):
    plain = LONG.replace("vote: {key: answer}, ", "")
    workflow = load_text(plain)
    (folder / "short.yaml").write_text(to_yaml(workflow))
    again = load_workflow(folder / "short.yaml").node("pick")
    assert again.kind is Kind.VOTE and again.vote == Vote() and again.after == ("solve", "check")


def test_a_sub_workflow_is_taken_in_whatever_form_either_file_has(load_text, folder):
    (folder / "inner.yaml").write_text(SHORT)
    outer = """\
dag_id: outer
agents: [{name: solver, policy: main}, {name: checker, policy: main}]
policies: {main: {model: {path: here}}}
episode: {max_turns: 2}
nodes:
  - {id: sub, workflow: inner.yaml}
  - {id: last, agent: checker, after: sub}
  - {id: pay, reward: score.py:score, after: last}
"""
    workflow = load_text(outer)
    assert workflow.node("last").after == ("sub__count",)
    assert workflow.node("sub__solve").hooks == "hooks.py:Own"
    (folder / "inner.yaml").write_text(LONG)
    assert load_text(outer).nodes == workflow.nodes
