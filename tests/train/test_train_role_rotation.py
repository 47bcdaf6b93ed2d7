from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.alternation import as_bound
from recipe.dag.train.models import ModelPaths
from recipe.dag.train.resources import Resources
from recipe.dag.train.trainer import Trainer

WORKFLOW = """\
dag_id: cory
agents: [{name: pioneer, policy: a}, {name: observer, policy: b}, {name: judge, policy: fixed}]
policies: {a: {model: {path: m}}, b: {model: {path: m}}, fixed: {model: {path: m}, frozen: true}}
algorithm: {old_log_probs: trainer, cory: {roles: [pioneer, observer], every: 2}}
nodes:
  - {id: first, agent: pioneer}
  - {id: second, agent: observer, after: first}
  - {id: judge, agent: judge, after: second}
  - {id: reward, reward: score.py:score, after: judge}
"""


@pytest.fixture
def workflow(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "cory.yaml").write_text(WORKFLOW)
    return load_workflow(tmp_path / "cory.yaml")


def policies_of(workflow):
    return [agent.policy for agent in workflow.agents]


def test_pioneer_and_observer_exchange_policies_and_nothing_else_changes(workflow):
    bound = [as_bound(workflow, step) for step in range(5)]
    assert [policies_of(one)[:2] for one in bound] == [["a", "b"]] * 2 + [["b", "a"]] * 2 + [["a", "b"]]
    for one in bound:
        assert policies_of(one)[2] == "fixed"
        assert (one.nodes, one.policies, one.algorithm) == (workflow.nodes, workflow.policies, workflow.algorithm)
        assert [agent.name for agent in one.agents] == [agent.name for agent in workflow.agents]


def test_without_an_exchange_the_workflow_is_the_same_object(workflow):
    plain = workflow.model_copy(update={"algorithm": workflow.algorithm.model_copy(update={"cory": None})})
    assert as_bound(plain, 7) is plain


def test_a_run_rolls_out_and_trains_with_the_policies_of_its_step_and_validates_as_declared(workflow, monkeypatch):
    """Step 3 of a run is the first one in which the roles are exchanged."""
    seen: dict[str, list] = {"rolled": [], "trained": []}

    async def roll_out(config, runner, samples, n, step, *, validate, title, forked=()):
        seen["rolled"].append((validate, policies_of(runner.workflow)[:2]))
        return []

    async def collect(roll_out_batch, to_rows, workflow, *, groups):
        await roll_out_batch(0)
        return SimpleNamespace(episodes=[], rows=[], metrics={}, batches=1)

    class Step:
        def __init__(self, workflow, policies, rows, *, step, **rest):
            seen["trained"].append((step, policies_of(workflow)[:2]))

        async def run(self):
            pass

        def metrics(self):
            return {"train/rows": 1.0}

        def dominant_agents(self):
            return {}

    monkeypatch.setattr("recipe.dag.train.trainer.roll_out", roll_out)
    monkeypatch.setattr("recipe.dag.train.trainer.collect", collect)
    monkeypatch.setattr("recipe.dag.train.trainer.TrainingStep", Step)
    monkeypatch.setattr("recipe.dag.train.trainer.write_results", lambda *args: None)
    config = SimpleNamespace(
        seed=0,
        output_dir="out",
        data=SimpleNamespace(train_batch_size=1, stratify_key=None, max_response_length=64),
        trainer=SimpleNamespace(
            default_local_dir="c", total_training_steps=4, total_training_tokens=None, test_freq=3, save_freq=0
        ),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=1)),
        validation=SimpleNamespace(n=1, metrics=None, metrics_freq=1),
        rollout=SimpleNamespace(progress=False),
        report=SimpleNamespace(coach_bias_steps=4, token_columns=False, monitors=[], on_flag="report"),
    )
    resources = SimpleNamespace(
        policies={}, mixing=None, metrics=dict, runner=lambda config, workflow: SimpleNamespace(workflow=workflow)
    )
    trainer = Trainer(config, workflow, resources, SimpleNamespace(train=[{}], val=[{}], start=None))
    trainer.journal = SimpleNamespace(episodes=lambda *a, **k: None)

    async def report(step, metrics):
        pass

    trainer._report = report

    async def run():
        for step in range(1, 4):
            await trainer._step(step)

    asyncio.run(run())
    assert seen["trained"] == [(0, ["a", "b"]), (1, ["a", "b"]), (2, ["b", "a"])]
    assert seen["rolled"] == [(False, ["a", "b"]), (False, ["a", "b"]), (False, ["b", "a"]), (True, ["a", "b"])]
    assert len(trainer.runners) == 2


PLAIN = "{% for m in messages %}{{m['content']}} w1 {% endfor %}"
THINKING = PLAIN + "{% if enable_thinking is false %}w3{% endif %}"
NO_ASSISTANT = "{% for m in messages if m['role'] != 'assistant' %}{{m['content']}} {% endfor %}"


@pytest.fixture
def check(workflow, tiny_model, tmp_path):
    """Checks the agents of a run whose policies a and b have these chat templates."""

    def check(a: str, b: str, **options) -> None:
        paths = {}
        for name, template in {"a": a, "b": b, "fixed": PLAIN}.items():
            paths[name] = str(shutil.copytree(tiny_model, tmp_path / name, ignore=lambda *_: ["model.safetensors"]))
            (tmp_path / name / "chat_template.jinja").write_text(template)
        agents = (workflow.agents[0].model_copy(update=options), *workflow.agents[1:])
        Resources(None).check_agents(workflow.model_copy(update={"agents": agents}), ModelPaths(paths, {}))

    return check


@pytest.mark.parametrize(("a", "b"), [(PLAIN, THINKING), (THINKING, PLAIN)])
def test_an_option_of_the_template_has_an_effect_if_one_of_the_policies_that_exchange_roles_reads_it(check, a, b):
    check(a, b, chat_template_kwargs={"enable_thinking": False}, memory="chat")


@pytest.mark.parametrize(
    ("b", "options", "message"),
    [
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": False}}, "no effect: .* of policies a and b do not read"),
        (NO_ASSISTANT, {"memory": "chat"}, "policy b: the chat template omits the assistant's messages"),
    ],
)
def test_what_fails_at_the_first_exchange_is_refused_before_the_run_starts(check, b, options, message):
    with pytest.raises(UserError, match=message):
        check(PLAIN, b, **options)
