"""Estimator spin in a file: what it needs, which options it refuses, and what it warns of."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.effects import check_samples
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text

FLOW = """\
dag_id: pairs
agents: [{name: solver, policy: main}, {name: checker, policy: other}]
policies:
  main: {model: {path: m}, reference: true}
  other: {model: {path: m}, reference: true}
algorithm: {estimator: spin}
nodes:
  - {id: solve, agent: solver}
  - {id: check, agent: checker, after: solve, candidates: {k: 2, by: score.py:scored}}
  - {id: pay, reward: score.py:pay, after: check}
"""
CODE = "def scored(context): return 0.0\ndef pay(episode): return {}\n"
ALONE = (
    (", {name: checker, policy: other}", ""),
    ("  other: {model: {path: m}, reference: true}\n", ""),
    ("  - {id: check, agent: checker, after: solve, candidates: {k: 2, by: score.py:scored}}\n", ""),
    ("after: check", "after: solve"),
)


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text(CODE)

    def make(*changes: tuple[str, str], text: str = FLOW):
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (tmp_path / "w.yaml").write_text(text)
        return load_workflow(tmp_path / "w.yaml")

    return make


def of_algorithm(options: str) -> tuple[str, str]:
    return "estimator: spin", f"estimator: spin, {options}"


def reference(written: str) -> tuple[str, str]:
    return "main: {model: {path: m}, reference: true}", f"main: {{model: {{path: m}}, reference: {written}}}"


def test_pairs_need_both_log_probs_before_the_advantages(load):
    flow = load(*ALONE)
    assert flow.warnings == ()
    assert flow.node("main.advantage").after == ("pay", "main.old_log_probs", "main.reference")
    assert flow.algorithm.recomputes_old_log_probs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([reference("false")], "estimator `spin` compares with it, so policy `main` needs `reference: true`"),
        ([of_algorithm("clip_ratio_low: 0.1")], "each ratio is 1 and nothing is clipped"),
        ([of_algorithm("importance: {}")], "multiply the loss of a pair's answers differently"),
        ([of_algorithm("uncertainty: {}")], "multiply the loss of a pair's answers differently"),
        ([of_algorithm("kl_reward_coef: 0.1")], "contains the reference already"),
        ([of_algorithm("agent_weights: equal")], "every pair counts the same"),
        ([of_algorithm("tree: {later: 0}")], "ranked by their scores alone"),
        ([of_algorithm("mean_return_between: [0, 1]")], "write `margin`"),
        ([of_algorithm("happo: {}")], "not weighted by what other policies learned"),
        ([of_algorithm("loss_agg: token-mean")], "always has seq-mean-token-sum"),
        ([of_algorithm("policy_loss: gspo")], "always has vanilla"),
        ([of_algorithm("old_log_probs: rollout")], "always has trainer"),
        ([of_algorithm("drop_zero_variance: false")], "always has true"),
        ([of_algorithm("group_by: [uid, agent]")], "only answers to one prompt can be paired; add `prompt_hash`"),
        ([of_algorithm("group_by: [agent, prompt_hash]")], "add `uid`"),
        ([of_algorithm("loss: ipo, label_smoothing: 0.1")], "only `sigmoid` does"),
        ([of_algorithm("loss: sppo, pairs: all")], "win rate of every answer"),
        ([of_algorithm("label_smoothing: 0.5")], "a number below 0.5"),
        ([of_algorithm("beta: 0")], "a number above 0"),
        ([of_algorithm("gold: response")], "only `opponent: data` compares with this text"),
        ([of_algorithm("opponent: data")], "the data's text answers one agent's prompt, and solver, checker"),
        ([*ALONE, of_algorithm("opponent: data, margin: 0.1")], "the data's text is always the better one"),
        ([*ALONE, of_algorithm("opponent: data, loss: sppo")], "the data's text always wins"),
        ([reference("true, critic: {}")], "does not use values; remove the critic"),
        ([reference("{refresh: 0}")], "policies.main.reference.refresh: expected a number of at least 1, got 0"),
        ([reference("{every: 3}")], "policies.main.reference.every"),
        ([("estimator: spin", "estimator: grpo")], "`reference` has no effect"),
    ],
    ids=str,
)
def test_what_pairs_cannot_have_is_refused(load, changes, message):
    with pytest.raises(WorkflowError) as error:
        load(*changes)
    assert message in str(error.value)


def test_an_adapter_s_reference_stays_its_base(load):
    lora = "main: {lora: {base: base}, reference: {refresh: 2}}\n  base: {model: {path: m}, frozen: true}"
    with pytest.raises(WorkflowError, match="the reference of an adapter is its base, which stays") as error:
        load(("main: {model: {path: m}, reference: true}", lora))
    assert len(error.value.problems) == 1
    kept = load(("main: {model: {path: m}, reference: true}", lora.replace("{refresh: 2}", "true")))
    assert kept.policies["main"].reference is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([reference("{refresh: 1}")], "the loss is constant and `beta` only scales the learning rate"),
        ([(", candidates: {k: 2, by: score.py:scored}", "")], "`check` reads what others sampled"),
    ],
    ids=str,
)
def test_what_forms_no_pair_and_what_a_reference_does_not_change_is_warned_of(load, changes, message):
    (warning,) = load(*changes).warnings
    assert message in warning.message


@pytest.mark.parametrize(
    "changes",
    [
        [reference("{refresh: 1}"), of_algorithm("mini_batches: 2")],
        [reference("{refresh: 2}")],
        [(", after: solve, candidates: {k: 2, by: score.py:scored}", ""), ("after: check", "after: [solve, check]")],
        [*ALONE, of_algorithm("opponent: data")],
    ],
    ids=str,
)
def test_what_does_form_pairs_is_not(load, changes):
    assert load(*changes).warnings == ()


@pytest.mark.parametrize(
    ("n", "changes", "refused"),
    [
        (1, ALONE, True),  # verl's recipe then pairs answers to different problems
        (1, (), False),  # candidates answer one prompt
        (1, (*ALONE, of_algorithm("opponent: data")), False),
        (2, ALONE, False),
    ],
)
def test_pairs_need_two_answers_to_a_prompt(load, n, changes, refused):
    flow = load(*changes)
    run = compose_config("dag", [f"workflow={flow.path}", f"actor_rollout_ref.rollout.n={n}"])
    if not refused:
        return check_samples(run, flow)
    with pytest.raises(UserError, match="pairs need two answers to one prompt"):
        check_samples(run, flow)


def test_the_plan_says_how_often_a_reference_is_renewed(load):
    text = to_text(make_plan(load(reference("{refresh: 10}"))))
    assert "trained, reference renewed every 10 steps" in text and "trained, reference kept" in text
