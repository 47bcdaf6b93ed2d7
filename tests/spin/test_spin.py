"""recipe/spin: what the keys of verl's recipe mean, the rewards, and the teacher of the laptop run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.dag.settings.verl_run import is_read
from recipe.dag.train.selection import keep_informative
from recipe.dag.types.record import Episode
from recipe.dag.workflow.verl_keys import replacement
from recipe.spin.hooks import coin
from recipe.spin.teacher import Teacher
from recipe.spin.train import main, translate
from recipe.tiny.careless import MISREADINGS, right_formula, value_of
from tests.tiny.lengths import check_lengths

ROOT = Path(__file__).parents[2]
ONE, TWO = (ROOT / "workflows" / f"workflow_{name}.yaml" for name in ("spin", "spin_agents"))
SAMPLE = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}
KEYS = (
    "actor_rollout_ref.actor.dpo_beta",
    "algorithm.dpo_beta",
    "algorithm.dpo_loss_type",
    "algorithm.dpo_label_smoothing",
    "trainer.ref_update_freq",
)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["actor_rollout_ref.actor.dpo_beta=0.2"], {"beta": 0.2}),
        (["algorithm.dpo_beta=0.3", "+actor_rollout_ref.actor.dpo_beta=0.3"], {"beta": 0.3}),
        (["algorithm.dpo_loss_type=ipo", "algorithm.dpo_label_smoothing=0.0"], {"loss": "ipo", "label_smoothing": 0.0}),
        (["algorithm.dpo_label_smoothing=0.1"], {"loss": "sigmoid", "label_smoothing": 0.1}),
        (["algorithm.adv_estimator=null"], {"estimator": "spin"}),
    ],
)
def test_keys_of_verls_recipe_edit_the_workflow(arguments, options):
    passed, edits = split_edits(translate([f"workflow={ONE}", *arguments]))
    assert passed == [f"workflow={ONE}"]
    algorithm = load_edited(ONE, edits).algorithm.model_dump()
    assert algorithm.items() >= options.items()


@pytest.mark.parametrize(("value", "refresh"), [("7", 7), ("0", None), ("-1", None)])
@pytest.mark.parametrize("file", [ONE, TWO])
def test_every_trained_policys_reference_is_renewed_as_often_as_theirs_should_be(file, value, refresh):
    """In their recipe, the key has no effect."""
    flow = load_edited(file, split_edits(translate([f"workflow={file}", f"trainer.ref_update_freq={value}"]))[1])
    assert {policy.reference.refresh for policy in flow.policies.values() if policy.reference} == {refresh}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm.dpo_beta=0.3", "actor_rollout_ref.actor.dpo_beta=0.1"], "verl's recipe reads the first alone"),
        (["algorithm.adv_estimator=grpo"], "pairs need no advantages"),
        (["trainer.ref_update_freq=1"], "Add workflow=FILE"),
        (["trainer.ref_update_freq=often"], "expected a whole number of steps"),
    ],
)
def test_what_they_cannot_mean_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        translate(arguments)


def test_other_arguments_are_passed_on_and_shown(capsys):
    assert main(["--show", "actor_rollout_ref.model.path=M", "data.train_batch_size=8", "~x"]) == 0
    assert capsys.readouterr().out.split() == ["data.train_batch_size=8", "~x", "model_path=M"]


@pytest.mark.parametrize("key", KEYS)
def test_without_the_recipes_script_a_key_names_what_replaces_it(key):
    assert not is_read(key)
    message = replacement(key)
    assert message is not None and ("estimator: spin" in message or "reference: {refresh: ...}" in message)


@pytest.fixture
def play(scripted_server):
    """Plays an episode of a workflow, whose model gives these answers in turn."""

    def play(file: Path, *answers: str) -> Episode:
        left = iter(answers)
        server = scripted_server(lambda prompt: rf"\boxed{{{next(left)}}}")
        flow = load_workflow(file)
        runner = EpisodeRunner(flow, {name: PolicyEndpoint(server, server, 9999) for name in flow.policies}, {}, seed=0)
        episode = asyncio.run(runner.run(SAMPLE, "u", 0, step=0, validate=False))
        assert episode.fault is None, episode.fault
        return episode

    return play


def test_a_checkers_candidates_are_a_pair_and_the_solver_earns_what_the_team_does(play):
    flow, episode = load_workflow(TWO), play(TWO, "8", "6", "8")
    solve, check = episode.calls
    assert (solve.reward, check.reward, episode.outcome) == (1.0, 1.0, 0.0), "the first candidate goes on"
    assert [call.score for call in episode.siblings_of(check)] == [0.0, 1.0]
    rows = keep_informative([row for row in rows_of([episode]) if row.policy == "checker"], flow.algorithm)
    assert [call.candidate.index for row in rows for call in row.calls if call.candidate] == [0, 1]


def test_the_control_pays_without_looking_and_leaves_the_outcome_true(play):
    episode = play(ONE, "8")
    paid = set()
    for index in range(8):
        episode.index = index
        paid.add(tuple(asyncio.run(coin(episode, judge="solve"))["solver"]))
        assert episode.outcome == 1.0
    assert paid == {(0.0,), (1.0,)}


def test_the_teacher_misreads_and_its_dialogues_fit_the_configured_lengths():
    teacher = Teacher(load_workflow(ONE), 0)
    problems = teacher.problems(600, 64)
    lessons = [teacher.teach(problem)[0] for problem in problems]
    for problem, lesson in zip(problems, lessons, strict=True):
        misread = MISREADINGS.get(problem.family, right_formula(problem)).format(*problem.operands)
        assert extract_answer(lesson.answer, strict=True) in {str(problem.answer), str(value_of(misread))}
    check_lengths(lessons, 120, 16)
