"""Snapshots in a workflow file: what they inherit, what they cannot have, and mistakes at their place."""

from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text
from recipe.dag.workflow.to_yaml import to_yaml

TEXT = """\
dag_id: demo
agents: [{name: one, policy: main}, {name: two, policy: old}, {name: three, policy: fixed}, {name: four, policy: cloud}]
policies:
  main: {model: {path: MODEL}, config: {actor.optim.weight_decay: 0.5}}
  old: {snapshot_of: main, every: 10}
  fixed: {model: {path: MODEL}, frozen: true}
  cloud: {api: {base_url: "http://localhost:1/v1", model: m}}
nodes:
  - {id: one, agent: one}
  - {id: two, agent: two, after: one}
  - {id: three, agent: three, after: two}
  - {id: four, agent: four, after: three}
  - {id: score, reward: score.py:score, after: four}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    return lambda text: load_workflow(tmp_path / "flow.yaml", text)


def test_a_snapshot_is_frozen_and_has_the_model_and_configuration_of_its_policy(load):
    workflow = load(TEXT)
    old, main = workflow.policies["old"], workflow.policies["main"]
    assert (old.frozen, old.model, old.config) == (True, main.model, main.config)
    assert workflow.snapshots() == {"old": "main"}
    assert workflow.trained_policies() == ("main",)
    assert workflow.local_policies() == ("main", "old", "fixed"), "it has servers of its own"
    again = load(to_yaml(workflow))
    assert again.policies == workflow.policies and to_yaml(again).count("weight_decay") == 1
    assert "snapshot of main, every 10 steps" in to_text(make_plan(workflow))


@pytest.mark.parametrize(
    ("new", "place", "message"),
    [
        ("{snapshot_of: man, every: 10}", "snapshot_of", "no policy `man`; did you mean `main`?"),
        ("{snapshot_of: old, every: 10}", "snapshot_of", "cannot be its own source"),
        ("{snapshot_of: fixed, every: 10}", "snapshot_of", "policy `fixed` is frozen, so it has no past selves"),
        ("{snapshot_of: cloud, every: 10}", "snapshot_of", "policy `cloud` is behind an API"),
        ("{snapshot_of: main}", "snapshot_of", "a snapshot needs `every`"),
        ("{snapshot_of: main, every: 0}", "every", "at least 1, got 0"),
        ("{snapshot_of: main, every: 10, model: {path: M}}", "model", "a snapshot has the `model` of policy `main`"),
        ("{snapshot_of: main, every: 10, lora: {base: fixed}}", "lora", "a snapshot has the `lora` of policy `main`"),
        (
            "{snapshot_of: main, every: 10, config: {nccl_timeout: 9}}",
            "config",
            "a snapshot has the `config` of policy `main`",
        ),
        ("{snapshot_of: main, every: 10, frozen: false}", "frozen", "a snapshot is never trained; remove `frozen`"),
        ("{snapshot_of: main, every: 10, lr: 1.0e-3}", "lr", "`lr` has no effect on a frozen policy; remove it"),
        ("{snapshot_of: main, every: 10, train_cycle: 2}", "train_cycle", "no effect on a frozen policy"),
        ("{snapshot_of: main, every: 10, critic: {}}", "critic", "a frozen policy needs no critic"),
        ("{snapshot_of: main, every: 10, reference: true}", "reference", "a frozen policy needs no reference"),
        ("{model: {path: M}, every: 10}", "every", "`every` has no effect without `snapshot_of: POLICY`"),
        ("{}", "model", "missing; this key is required"),
    ],
)
def test_a_mistake_is_one_line_at_its_place(load, new, place, message):
    with pytest.raises(WorkflowError) as raised:
        load(TEXT.replace("{snapshot_of: main, every: 10}", new))
    (problem,) = raised.value.problems
    assert message in str(problem) and f"policies.old.{place}" in str(problem), str(problem)


def test_there_are_no_snapshots_of_snapshots_and_adapters(load):
    more = TEXT.replace("fixed: {model: {path: MODEL}, frozen: true}", "fixed: {snapshot_of: old, every: 2}")
    with pytest.raises(WorkflowError, match="policy `old` is itself a snapshot; write main"):
        load(more)
    adapter = TEXT.replace("main: {model", "base: {model").replace(
        "weight_decay: 0.5}}", "weight_decay: 0.5}, frozen: true}"
    )
    adapter = adapter.replace("  old:", "  main: {lora: {base: base}}\n  old:")
    with pytest.raises(WorkflowError, match="policy `main` is an adapter, of which there are no snapshots"):
        load(adapter)
