"""The catalogue says what is there: names, options, functions; a workflow may name what a run really does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from recipe.dag.algorithms.base import Algorithm, options_of
from recipe.dag.algorithms.catalogue import BLOCKS, ESTIMATORS, SELECTABLE, make_algorithm, readers
from recipe.dag.algorithms.reward_catalogue import REQUIRED, OptionKind, RewardOption, read_entry, reward_nodes
from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.convention import COMPARE
from recipe.dag.types.reward import Catalogued

WORKFLOW = """\
dag_id: small
agents: [{{name: solver, policy: main}}]
policies: {{main: {{model: {{path: here}}{critic}}}}}
algorithm: {{{algorithm}}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, reward: score.py:score, after: solve}}
  - {{id: more, reward: score.py:score, after: solve}}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")

    def write_and_load(algorithm: str, critic: str = ""):
        path = tmp_path / "workflow.yaml"
        path.write_text(WORKFLOW.format(algorithm=algorithm, critic=critic))
        return load_workflow(path).algorithm

    return write_and_load


@pytest.mark.parametrize("name", SELECTABLE)
def test_every_selectable_name_loads_with_its_options(load, name):
    critic = ", critic: {}" if ESTIMATORS[name].needs_values else ""
    algorithm = load(f"estimator: {name}", ", reference: true" if ESTIMATORS[name].pairs_calls else critic)
    assert type(algorithm) is ESTIMATORS[name] and algorithm == make_algorithm(name)
    assert algorithm.source and algorithm.assumes and options_of(type(algorithm))


def test_a_method_adds_its_options_to_the_common_ones_and_changes_none_but_what_it_holds():
    held = {
        "magrpo": {"epochs", "mini_batches"},
        "spin": {"drop_zero_variance", "loss_agg", "policy_loss", "old_log_probs"},
    }
    for name, method in ESTIMATORS.items():
        changed = {key for key in Algorithm.model_fields if key in method.__annotations__} - {"estimator"}
        assert changed == held.get(name, set())
    assert readers("lam") == ("gae", "gae_chain", "ippo", "mappo") and readers("epochs") == readers("nothing") == ()


@pytest.mark.parametrize(
    "name", [*(entry.name for entry in reward_nodes()), *(block.__name__.lower() for block in BLOCKS)]
)
def test_what_is_a_function_only_is_refused_by_a_workflow(load, name):
    with pytest.raises(WorkflowError, match="algorithm.estimator: expected one of"):
        load(f"estimator: '{name}'")


def test_every_block_stands_under_its_own_name():
    for block in BLOCKS:
        assert block.source and block.assumes and block.__name__.lower() in Algorithm.model_fields


def test_an_entry_is_what_its_function_declares():
    source = """
@Catalogued("a paper", copies=True)
async def pay(
    episodes, *, a: AgentName, b: Literal["x", "y"] = "x",
    c: Annotated[int, Field(ge=1)] = 2, d: Annotated[F, COMPARE] | None = None
): ..."""
    (function,) = ast.parse(source).body
    entry = read_entry("reward.mine:pay", function)
    assert entry.traits == Catalogued("a paper", copies=True) and entry.of_group and not entry.shaping
    assert entry.takes == {
        "a": RewardOption(OptionKind.AGENT, REQUIRED),
        "b": RewardOption(OptionKind.CHOICE, "x", choices=("x", "y")),
        "c": RewardOption(OptionKind.INT, 2, low=1),
        "d": RewardOption(OptionKind.FUNCTION, None, convention=COMPARE),
    }
    (function,) = ast.parse('@Catalogued("a paper")\ndef pay(episode, *, a: dict = None): ...').body
    with pytest.raises(ValueError, match="'dict' is not a valid OptionKind"):
        read_entry("reward.mine:pay", function)


@pytest.mark.parametrize(
    ("algorithm", "where", "what"),
    [
        ("estimator: rloo, scale: std", "algorithm.scale", "`rloo` always has"),
        ("estimator: magrpo, group_by: [uid]", "algorithm.group_by", "`magrpo` always has"),
        ("estimator: magrpo, group_by: [uid, agent]", "algorithm.group_by", "choose `grpo`"),
        ("estimator: dr_mas", "algorithm.estimator", "there is no `dr_mas`: .*write `estimator: grpo`"),
        ("estimator: m_grpo", "algorithm.estimator", "no calls are aligned, .*write `estimator: grpo`"),
        ("estimator: at_grpo", "algorithm.estimator", "write `estimator: grpo, tree: {later: 0}`"),
        ("estimator: reinforce, center: mean", "algorithm.center", "does not use this option"),
        ("estimator: reinforce_pp, gamma_turn: 0.5", "algorithm.gamma_turn", "does not use this option"),
        ("estimator: magrpo, gamma: 0.5", "algorithm.gamma", "does not use this option"),
        ("estimator: magrp", "algorithm.estimator", "did you mean `magrpo`"),
        ("group_by: [uid, tree]", "algorithm.group_by", "prompt_hash"),
        ("group_by: [uid, branch]", "algorithm.group_by[1]", "nothing branches here"),
        ("group_by: [uid, round]", "algorithm.group_by[1]", "there are no loops"),
        ("gamma_turn: 0.5, stat_unit: trajectory", "algorithm.gamma_turn", "add `stat_unit: call`"),
        ("estimator: rloo, gamma_turn: 0, stat_unit: trajectory", "algorithm.gamma_turn", "add `stat_unit: call`"),
        (
            "estimator: reinforce_pp_baseline, drop_zero_variance: true, stat_unit: trajectory, gamma_turn: 1",
            "algorithm.gamma_turn",
            "add `stat_unit: call`",
        ),
        ("estimator: rloo, group_by: [uid, agent, trunk]", "algorithm.group_by", "`rloo` always has"),
        ("group_by: [uid, trunk]", "algorithm.group_by[1]", "`counterfactual` does; remove it"),
        ("estimator: counterfactual, gamma_turn: 1.0", "algorithm.gamma_turn", "always has whole returns"),
        ("estimator: magrpo, stat_unit: trajectory", "algorithm.stat_unit", "`magrpo` always has"),
        ("estimator: magrpo, epochs: 4", "algorithm.epochs", "`magrpo` always has 1, one update per step"),
        ("estimator: magrpo, mini_batches: 4", "algorithm.mini_batches", "one update per step"),
        ("estimator: reinforce, group_by: [uid, branch]", "algorithm.group_by", "does not use this option"),
        ("estimator: grpo, weights: {reward: 2}", "algorithm.weights", "`grpo` does not use this option"),
        ("estimator: gdpo, weights: {rewards: 2}", "algorithm.weights.rewards", "did you mean `reward`?"),
        ("estimator: gdpo, weights: {solve: 2}", "algorithm.weights.solve", "no node `solve` pays a reward"),
        ("estimator: gdpo, weights: {reward: 0, more: 0.0}", "algorithm.weights", "all weights are 0"),
        ("estimator: gdpo, weights: {reward: much}", "algorithm.weights.reward", "expected a number"),
        ("estimator: gdpo, scale: none", "algorithm.scale", "`gdpo` does not use this option"),
    ],
)
def test_options_that_contradict_or_are_not_read_are_errors_at_their_place(load, algorithm, where, what):
    with pytest.raises(WorkflowError) as error:
        load(algorithm)
    assert len(error.value.problems) == 1
    assert where in str(error.value) and (what in str(error.value) or re.search(what, str(error.value)))


def test_an_option_that_agrees_with_the_preset_or_is_left_free_is_none(load):
    assert load("estimator: rloo, scale: none").scale == "none"
    assert load("estimator: magrpo, gamma_turn: 0.5").gamma_turn == 0.5
    assert load("estimator: magrpo").gamma_turn == 0.9
    assert load("estimator: magrpo, epochs: 1").epochs == 1
    assert load("estimator: grpo, epochs: 4, mini_batches: 4").mini_batches == 4
    assert load("estimator: magrpo, group_by: [uid, agent, node, turn, round]").group_by[-1] == "round"
    assert load("stat_unit: trajectory").gamma_turn is None
    assert load("gamma_turn: 0.5").stat_unit == load("estimator: gdpo, gamma_turn: 0").stat_unit == "call"
    assert load("estimator: gdpo, weights: {reward: 0}").weights == {"reward": 0.0}


def test_the_command_lists_everything_without_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from recipe.dag.app.cli import app\n"
        "print(CliRunner().invoke(app, ['algorithms']).output); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, torch_is_there, _ = done.stdout.split("\n")
    assert torch_is_there == "False"
    for name in (*SELECTABLE, *(entry.name for entry in reward_nodes()), *(block.__name__.lower() for block in BLOCKS)):
        assert any(line.startswith(f"{name} ") for line in lines)
    text = " ".join(done.stdout.split())
    assert "center=leave_one_out" in text and "arXiv 2402.14740" in text and "gamma_turn=0.9" in text
    assert "epochs=1 (fixed)" in text and "mixer.mixing_hidden=32" in text and "voters (required), key=answer" in text


@pytest.mark.parametrize("name", [n for n in SELECTABLE if "group_by" not in ESTIMATORS[n].model_fields])
def test_what_compares_no_groups_leaves_none_out(load, name):
    """With one episode per sample it would train nothing, and with several it would drop rows that carry gradient."""
    with pytest.raises(WorkflowError) as error:
        load(f"estimator: {name}, drop_zero_variance: true")
    problems = [problem for problem in error.value.problems if "drop_zero_variance" in problem.where]
    assert [f"{name} compares no groups" in problem.message for problem in problems] == [True]


def test_the_estimators_that_compare_no_groups_are_those_of_one_episode_or_a_critic():
    assert {n for n in SELECTABLE if "group_by" not in ESTIMATORS[n].model_fields} == {
        *("reinforce", "reinforce_pp", "gae", "gae_chain", "ippo", "mappo")
    }
