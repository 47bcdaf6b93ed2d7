"""`workflow.<key>=VALUE`: what is set is in force, the file stays as it is, and mistakes name the argument."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.loading.workflow_file import load_workflow

WORKFLOW = """\
dag_id: pair   # a comment that stays
agents:
  - {name: solver, policy: main, sampling: {temperature: 1.0}}
  - {name: checker, policy: main}
policies: {main: {model: {path: here}}}
algorithm: {estimator: grpo, group_by: [uid, agent]}
nodes:
  - {id: solve, agent: solver}
  - {id: check, agent: checker, after: solve}
  - {id: pay, reward: score.py:score, after: check}
"""


@pytest.fixture
def edited(tmp_path):
    def load(*arguments: str):
        path = tmp_path / "workflow.yaml"
        path.write_text(WORKFLOW)
        (tmp_path / "score.py").write_text("def score(episode, *, weight=1.0): ...\n\ndef other(episode): ...\n")
        rest, edits = split_edits(arguments)
        assert rest == []
        workflow = load_edited(path, edits)
        assert path.read_text() == WORKFLOW
        return workflow

    return load


def test_what_is_set_is_in_force(edited):
    workflow = edited(
        "workflow.algorithm.kl_loss_coef=0.001",
        "+workflow.policies.main.reference=true",
        "workflow.agents.solver.sampling.temperature=0.5",
        "workflow.agents.*.sampling.max_tokens=64",
        "workflow.nodes.pay.args.weight=2.0",
        "workflow.nodes.check.when={phase: training}",
        "workflow.episode.max_turns=2",
        "workflow.algorithm.group_by=[uid, agent, turn]",
    )
    assert workflow.algorithm.kl_loss_coef == 0.001 and workflow.policies["main"].reference
    assert [agent.sampling.temperature for agent in workflow.agents] == [0.5, 1.0]
    assert [agent.sampling.max_tokens for agent in workflow.agents] == [64, 64]
    assert workflow.node("pay").args == {"weight": 2.0}
    assert workflow.node("check").when.phase == "training" and workflow.episode.max_turns == 2
    assert workflow.algorithm.group_by == ("uid", "agent", "turn")
    assert "# a comment that stays" in workflow.edited and "kl_loss_coef: 0.001" in workflow.edited


def test_short_keys_and_removed_ones(edited):
    workflow = edited(
        "workflow.nodes.pay.reward=score.py:other",
        "workflow.nodes.check.after=[]",
        "workflow.nodes.check.after=solve",
        "~workflow.nodes.check.after",
        "workflow.nodes.pay.after=[solve, check]",
        "workflow.algorithm.estimator=reinforce_pp",
        "~workflow.algorithm.group_by",
    )
    assert workflow.node("pay").function == "score.py:other" and workflow.node("check").after == ()
    assert workflow.algorithm.estimator == "reinforce_pp"


def test_a_node_is_removed_and_mistakes_in_later_ones_are_not_blamed_on_it(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): ...\n")
    team = "  - {id: team, reward: score.py:score, after: check}\n"
    (tmp_path / "w.yaml").write_text(WORKFLOW.replace("  - {id: pay", f"{team}  - {{id: pay"))

    def edited(*arguments: str):
        return load_edited(tmp_path / "w.yaml", split_edits(arguments)[1])

    assert [node.id for node in edited("~workflow.nodes.team").reward_nodes] == ["pay"]
    with pytest.raises(UserError, match="^workflow.nodes.pay.after=chek: .*no node `chek`"):
        edited("~workflow.nodes.team", "workflow.nodes.pay.after=chek")
    with pytest.raises(UserError, match="(?m)~workflow.nodes.solve: .*no node `solve`"):
        edited("workflow.algorithm.epochs=2", "~workflow.nodes.solve")


LONG = """\
dag_id: pair
agents: [{name: solver, policy: main}, {name: checker, policy: main}]
policies: {main: {model: {path: here}}}
nodes:
  - {node_id: solve, node_role: ROLLOUT, agent_group: 0}
  - {node_id: check, node_role: ROLLOUT, agent_group: 1, dependencies: [solve]}
  - {node_id: pay, node_role: REWARD, executable_ref: score.py:score, dependencies: [check]}
"""


@pytest.fixture
def of_long_form(tmp_path):
    def load(argument: str):
        (tmp_path / "long.yaml").write_text(LONG)
        (tmp_path / "score.py").write_text("def score(episode): ...\n\ndef other(episode): ...\n")
        return load_edited(tmp_path / "long.yaml", split_edits([argument])[1])

    return load


def test_a_function_of_the_long_form_is_edited(of_long_form):
    workflow = of_long_form("workflow.nodes.pay.executable_ref=score.py:other")
    assert workflow.node("pay").reward == "score.py:other" and workflow.node("solve").agent == "solver"


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("workflow.nodes.check.agent_group=0", "write `agent=NAME`"),
        ("workflow.nodes.check.node_role=VOTE", "set the key that gives the node its kind"),
    ],
)
def test_other_fields_of_the_long_form_name_the_key_to_edit(of_long_form, argument, instead):
    with pytest.raises(UserError) as caught:
        of_long_form(argument)
    assert str(caught.value).startswith(argument) and instead in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ["{actor: {optim.betas: [0.9, 0.95]}}", "{actor.optim: {betas: [0.9, 0.95]}}"])
def test_a_key_of_a_config_is_edited_however_it_is_written(tmp_path, config):
    text = WORKFLOW.replace("model: {path: here}", f"model: {{path: here}}, config: {config}")
    (tmp_path / "w.yaml").write_text(text.replace("score.py:score", "recipe.dag.reward.outcome:outcome_reward"))
    edit = "workflow.policies.main.config.actor.optim.betas=[0.8, 0.9]"
    assert load_edited(tmp_path / "w.yaml", split_edits([edit])[1]).policies["main"].config == {
        "actor.optim.betas": [0.8, 0.9]
    }


def test_a_node_of_a_sub_workflow_is_edited_in_its_file(tmp_path):
    (tmp_path / "inner.yaml").write_text("dag_id: inner\nnodes: [{id: solve, agent: solver}]\n")
    text = WORKFLOW.replace("{id: solve, agent: solver}", "{id: solve, workflow: inner.yaml}")
    (tmp_path / "w.yaml").write_text(text.replace("score.py:score", "recipe.dag.reward.outcome:outcome_reward"))
    with pytest.raises(UserError, match="is in `inner.yaml`; change a copy .* workflow.nodes.solve.workflow=COPY"):
        load_edited(tmp_path / "w.yaml", split_edits(["workflow.nodes.solve__solve.sees_env=true"])[1])


def test_a_policy_that_no_agent_needs_any_more_is_removed(tmp_path):
    text = WORKFLOW.replace("checker, policy: main", "checker, policy: other")
    text = text.replace("{main: {model: {path: here}}}", "{main: {model: {path: here}}, other: {model: {path: here}}}")
    (tmp_path / "w.yaml").write_text(text.replace("score.py:score", "recipe.dag.reward.outcome:outcome_reward"))
    shared = ["workflow.agents.*.policy=main", "~workflow.policies.other"]
    workflow = load_edited(tmp_path / "w.yaml", split_edits(shared)[1])
    assert list(workflow.policies) == ["main"] and {agent.policy for agent in workflow.agents} == {"main"}
    with pytest.raises(UserError, match="name one of its keys"):
        load_edited(tmp_path / "w.yaml", split_edits(["~workflow.agents.checker"])[1])
    added = ["+workflow.policies.third={model: {path: there}}", "workflow.agents.checker.policy=third"]
    assert load_edited(tmp_path / "w.yaml", split_edits([*shared, *added])[1]).policies["third"].model.path == "there"
    with pytest.raises(UserError, match="^.workflow.policies.third=.*: policies.third: no agent uses policy"):
        load_edited(tmp_path / "w.yaml", split_edits(added[:1])[1])


def test_without_edits_it_is_the_file(edited, tmp_path):
    assert edited() == load_workflow(tmp_path / "workflow.yaml") and edited().edited is None


def test_dotted_keys_of_a_config_are_edited_as_they_are_written(tmp_path):
    text = WORKFLOW.replace("{path: here}", "{path: here}, config: {actor.optim.clip_grad: 1.0}")
    (tmp_path / "w.yaml").write_text(text.replace("score.py:score", "recipe.dag.reward.outcome:outcome_reward"))
    typed = [
        "workflow.policies.main.config.actor.optim.clip_grad=0.5",
        "workflow.policies.main.config.actor.clip_ratio_c=2.0",
    ]
    config = load_edited(tmp_path / "w.yaml", split_edits(typed[:1])[1]).policies["main"].config
    assert config == {"actor.optim.clip_grad": 0.5}
    left = load_edited(tmp_path / "w.yaml", split_edits(["~workflow.policies.main.config.actor.optim.clip_grad"])[1])
    assert left.policies["main"].config == {}


def test_a_warning_that_an_edit_brings_names_the_argument(edited):
    argument = "workflow.algorithm={policy_loss: gspo, clip_ratio_low: 0.2}"
    (warning,) = [problem for problem in edited(argument).warnings if "gspo" in problem.message]
    assert warning.as_warning().startswith(f"{argument}: ")


def test_only_arguments_of_the_workflow_are_taken():
    arguments = ["workflow=w.yaml", "trainer.nnodes=1", "workflow.algorithm.epochs=2", "++data.seed=1"]
    rest, (edit,) = split_edits(arguments)
    assert rest == [arguments[0], arguments[1], arguments[3]]
    assert (edit.keys, edit.value, edit.removes) == (("algorithm", "epochs"), 2, False)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("workflow.algorithm.epoch=2", "algorithm.epoch: unknown key; did you mean `epochs`?"),
        ("workflow.algorithm.estimator=gea", "did you mean `gae`?"),
        ("workflow.algorithm.lam=0.5", "does not use this option"),
        ("workflow.algoritm.lam=0.5", "a workflow has no `algoritm`; did you mean `algorithm`?"),
        ("workflow.agents.solvr.sampling.top_p=1", "no agent `solvr`; did you mean `solver`?"),
        ("workflow.agents.solver.sampling.top_p=2", "expected a number of at most 1, got 2"),
        ("workflow.agents.solver=x", "name one of its keys"),
        ("workflow.agents=1", "name one of them, as in workflow.agents.solver.<key>=VALUE"),
        ("workflow.algorithm.group_by.0=uid", "is inside a value that is not a mapping"),
        ("workflow.dag_id.x=1", "is inside a value that is not a mapping"),
        ("~workflow.algorithm.gruop_by", "the file does not have this key"),
        ("workflow.nodes.pay.after=chek", "no node `chek`"),
        ("workflow.nodes.chek.after=solve", "no node `chek`; did you mean `check`?"),
        ("workflow.nodes.pay.reward=score.py:scores", "did you mean `score`?"),
        ("workflow.policies.mein.lr=1", "no policy `mein`; did you mean `main`?"),
        ("workflow.algorithm.epochs=[", "the value is not valid YAML"),
        ("workflow.algorithm.epochs", "write workflow.<key>=VALUE"),
        ("~workflow.algorithm.epochs=1", "to remove a key"),
        ("workflow.algorithm.kl_loss_coef=0.1", "needs `reference: true`"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_argument(edited, argument, message):
    with pytest.raises(UserError) as error:
        edited(argument)
    assert str(error.value).startswith(f"{argument}: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_json_and_one_of_siirl(tmp_path):
    (tmp_path / "w.json").write_text(
        '{"dag_id": "w", "agents": [{"name": "a", "policy": "p"}], "policies": {"p": {"model": {"path": "m"}, '
        '"frozen": true}}, "nodes": [{"id": "n", "agent": "a"}]}'
    )
    assert load_edited(tmp_path / "w.json", split_edits(["workflow.dag_id=new"])[1]).dag_id == "new"
    siirl = "tests/compat/siirl/grpo.yaml"
    with pytest.raises(UserError, match="is in siiRL's form; rewrite it first: verl-dag import"):
        load_edited(siirl, split_edits(["workflow.algorithm.epochs=2"])[1])
