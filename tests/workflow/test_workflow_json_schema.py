"""The schema that editors use: generated, shipped, named by every shipped workflow, neither too strict nor too lax."""

from __future__ import annotations

import json
import os

import pytest
from jsonschema import Draft202012Validator

from recipe.dag.workflow.json_schema import workflow_schema
from recipe.dag.workflow.source import parse_source, read_source
from tests.test_shipped import ROOT, WORKFLOWS, relative

SHIPPED = ROOT / "workflows" / "workflow.schema.json"
WORKFLOW = """\
dag_id: pair
x-any: {thing: 1}
agents: [{name: solver, policy: main, tools: [code_interpreter, {name: own, kwargs: {a: 1}}], sampling: {stop: END}}]
policies: {main: {model: {path: here}, critic: {}}}
tools: {own: {path: tool.py:Tool}}
algorithm: {estimator: gae, lam: 0.9}
nodes:
  - {id: solve, agent: solver, env: [a.py:A, b.py:B], env_route: kind, when: {phase: training}}
  - {id: pay, reward: score.py:score, after: solve}
"""


@pytest.fixture(scope="module")
def validator():
    schema = workflow_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def problems(validator, text: str) -> list[str]:
    return [error.message for error in validator.iter_errors(parse_source(text.encode(), "w.yaml").data)]


def test_the_shipped_schema_is_the_one_that_the_command_writes():
    assert json.loads(SHIPPED.read_text()) == workflow_schema(), (
        "verl-dag schema --output workflows/workflow.schema.json"
    )


@pytest.mark.parametrize("file", WORKFLOWS, ids=relative)
def test_every_shipped_workflow_names_the_schema_and_passes_it(file, validator):
    first = file.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={os.path.relpath(SHIPPED, file.parent)}"
    assert [error.message for error in validator.iter_errors(read_source(file).data)] == []


def test_what_the_loader_takes_passes(validator):
    assert problems(validator, WORKFLOW) == []
    assert problems(validator, WORKFLOW.replace("estimator: gae, lam: 0.9", "gamma_turn: 0.5")) == []
    own = "estimator: 'own.py:f', estimator_kwargs: {a: 1}, epochs: 2"
    assert problems(validator, WORKFLOW.replace("estimator: gae, lam: 0.9", own)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lam: 0.9", "lam: 1.5"),
        ("lam: 0.9", "group_by: [uid]"),
        ("estimator: gae, lam: 0.9", "lam: 0.9"),
        ("estimator: gae", "estimator: gea"),
        ("agent: solver,", "agnt: solver,"),
        ("id: solve, ", ""),
        ("phase: training", "phase: test"),
        ("stop: END", "stop: 1"),
        ("x-any", "any"),
        ("policy: main", "polcy: main"),
        ("after: solve", "after: solve, sees_env: true"),
        ("agent: solver, env", "workflow: solver.yaml, env"),
    ],
)
def test_mistakes_that_a_schema_can_see_are_seen(validator, old, new):
    assert old in WORKFLOW and problems(validator, WORKFLOW.replace(old, new))


def test_fields_are_described():
    definitions = workflow_schema()["$defs"]
    assert definitions["Sampling"]["properties"]["stop"]["description"].startswith("Strings that end a generation")
    described = {
        name
        for name, model in definitions.items()
        if any("description" in field for field in model.get("properties", {}).values())
    }
    assert described >= {"Agent", "Policy", "EpisodeSpec", "Grpo", "Ippo", "Qmix", "QmixMixer", "Condition", "Node"}
