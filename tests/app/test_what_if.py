"""Which episodes and weights `verl-dag replay` takes, before anything is started."""

from __future__ import annotations

import pytest

from recipe.dag.app import reopened
from recipe.dag.app.what_if import questions_of
from recipe.dag.core.errors import UserError
from recipe.dag.report.run_record import write_run_record
from recipe.dag.report.what_if import bootstrap, paired, read_effects
from recipe.dag.workflow.schema import Workflow


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 5 and 10."""
    file = tmp_path / "workflow.yaml"
    file.touch()
    policies = {"main": {"model": {"path": "${oc.env:MODEL_PATH}"}}, "judge": {"model": {"path": "j"}, "frozen": True}}
    agents = [{"name": "a", "policy": "main"}, {"name": "b", "policy": "judge"}]
    nodes = [{"id": "one", "agent": "a"}, {"id": "two", "agent": "b", "after": ["one"]}]
    workflow = Workflow(path=str(file), dag_id="t", agents=agents, policies=policies, nodes=nodes)
    config = {"output_dir": str(tmp_path), "trainer": {"default_local_dir": f"{tmp_path}/checkpoints"}, "seed": 1}
    models = {"policies.main.model": {"name": "/models/first", "digest": "d"}}
    fingerprint = {"learned": {"models": models}}
    write_run_record(tmp_path, config=config, workflow=workflow, fingerprint=fingerprint, launch={"seed": 1})
    for step in (5, 10):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        (folder / "main" / "actor" / "huggingface").mkdir(parents=True)
        (folder / "main" / "actor" / "huggingface" / "config.json").write_text("{}")
        (folder / "run.json").write_text("{}")
    return tmp_path


def record(step: int, uid: str = "val-0", split: str = "validation", outcome: float = 0.0):
    calls = [{"node": node, "agent": node, "agent_group": 0, "policy": "p", "turn": 0} for node in ("one", "two")]
    return {"step": step, "split": split, "uid": uid, "index": 0, "sample": {}, "calls": calls, "outcome": outcome}


def test_by_default_a_problem_that_was_learned_at_three_steps_with_weights(run):
    records = [record(step, uid, outcome=float(step > 4 or uid == "val-0")) for step in (0, 3, 5, 10) for uid in "xy"]
    records += [record(step, "val-0", outcome=1.0) for step in (0, 5, 10)]
    questions = questions_of(run, records, [], None)
    assert [(q.recorded.step, q.recorded.episode.uid, q.at[0]) for q in questions] == [
        (step, "x", node) for step in (0, 5, 10) for node in ("one", "two")
    ]
    assert [q.weights and q.weights.name for q in questions[::2]] == [None, "global_step_5", "global_step_10"]


def test_an_episode_of_training_was_played_before_its_steps_update(run):
    (question,) = questions_of(run, [record(6, "0-1", "train")], ["6/0-1/0"], "two")
    assert question.weights is not None and question.weights.name == "global_step_5"
    assert not question.recorded.validate and question.at == ("two", 0, 0)
    kept = r"no checkpoint of step 3; it has the weights of step 0, 5, 10.*keep_checkpoints=0"
    with pytest.raises(UserError, match=kept):
        questions_of(run, [record(4, "0-1", "train")], ["4/0-1/0"], None)


@pytest.mark.parametrize(
    ("address", "message"),
    [("4", "write STEP/UID/INDEX"), ("4/a/b", "write STEP/UID/INDEX"), ("4/val-9/0", "no recorded episode")],
)
def test_an_episode_that_is_not_there(run, address, message):
    with pytest.raises(UserError, match=message):
        questions_of(run, [record(4)], [address], None)


def test_a_fork_is_refused_with_the_episode_that_it_repeats(run):
    fork = record(6, "0-1", "train") | {"index": 3, "forked": {"from": 1, "at": "two"}}
    with pytest.raises(UserError, match="repeats another up to two; pass --episode 6/0-1/1 --at two$"):
        questions_of(run, [fork], ["6/0-1/3"], None)


def test_an_agent_is_silent_or_swapped_from_its_first_call_on_and_must_have_one(run):
    def at(place: str | None, agent: str) -> list[str]:
        return [question.at[0] for question in questions_of(run, [record(5)], ["5/val-0/0"], place, agent=agent)]

    assert at(None, "two") == ["two"] and at("one", "two") == ["one"]
    with pytest.raises(UserError, match="agent one: has no call from two on; the episode's agents: one, two"):
        at("two", "one")
    with pytest.raises(UserError, match="agent three: has no call in val-0/0"):
        at(None, "three")


def test_policies_that_are_the_same_at_all_steps_are_started_once(run):
    config, workflow = reopened.read_launch(run)
    assert config.trainer.total_training_tokens is None, "the record has no such key: it is older"
    assert workflow.policies["main"].model.path == "/models/first", "what MODEL_PATH was"
    ten = reopened.weights_at(run, 10)
    both, names = reopened.with_weights(workflow, [None, ten, None])
    assert names == {
        (None, "main"): "main",
        (None, "judge"): "judge",
        (ten, "main"): "main_global_step_10",
        (ten, "judge"): "judge",
    }
    assert all(policy.frozen for policy in both.policies.values()) and len(both.policies) == 3


def test_a_run_without_a_record_of_its_launch_or_without_its_workflow_file(run, tmp_path):
    (run / "workflow.yaml").unlink()
    with pytest.raises(UserError, match="the run's workflow file .* is gone"):
        reopened.read_launch(run)
    with pytest.raises(UserError, match="has no record of a launch"):
        reopened.read_launch(tmp_path / "none")


def test_intervals_are_of_pairs(tmp_path):
    assert paired([1.0, None, 0.0], [0.0, 1.0, None]) == [-1.0]
    mean, low, high = bootstrap([1.0] * 50 + [0.0] * 50)
    assert mean == 0.5 and low == pytest.approx(0.4, abs=0.03) and high == pytest.approx(0.6, abs=0.03)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match="no file of effects"):
        read_effects(tmp_path / "x.json")
