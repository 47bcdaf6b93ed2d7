from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from recipe.dag.algorithms.custom import Custom
from recipe.dag.core.paths import names_function, resolve_folder, resolve_path
from recipe.dag.loading.conversion import import_workflow
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.to_yaml import _flow, to_yaml

SIIRL = Path(__file__).parents[1] / "compat" / "siirl"
ROOT = Path(__file__).parents[2]
FOREIGN = sorted([*SIIRL.glob("*.yaml"), *SIIRL.glob("*.json")])
OWN = sorted([*ROOT.glob("workflows/*.yaml"), *ROOT.glob("examples/**/workflow*.yaml")])


def unplaced(workflow):
    """But for where it is written and what was said of the original."""
    return workflow.model_copy(update={"path": "", "warnings": ()})


def without_paths(agent):
    """The agent with its tools' paths reduced to names, as they are relative to the workflow file."""
    tools = []
    for tool in agent.tools:
        folder = {"folder": Path(tool.kwargs["folder"]).name} if "folder" in tool.kwargs else {}
        tools.append(
            tool.model_copy(update={"path": tool.path and Path(tool.path).name, "kwargs": {**tool.kwargs, **folder}})
        )
    return agent.model_copy(update={"tools": tools})


def test_the_folder_of_a_search_is_found_from_the_new_file(tmp_path):
    (tmp_path / "new.yaml").write_text(
        import_workflow(ROOT / "examples/gallery/workflow_search.yaml", tmp_path / "new.yaml")
    )
    (agent,) = load_workflow(tmp_path / "new.yaml").agents
    folder = agent.tools[0].kwargs["folder"]
    assert resolve_folder(folder, tmp_path) == ROOT / "examples" / "gallery" / "texts"
    assert import_workflow(tmp_path / "new.yaml", tmp_path / "other.yaml").count("folder:") == 1


@pytest.mark.parametrize("file", FOREIGN, ids=lambda path: path.name)
def test_an_imported_file_loads_to_the_same_workflow(file, tmp_path):
    for code in SIIRL.glob("*.py"):
        (tmp_path / code.name).write_text(code.read_text())
    (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "new.yaml").write_text(import_workflow(tmp_path / file.name))
    old, new = load_workflow(tmp_path / file.name), load_workflow(tmp_path / "new.yaml")
    assert unplaced(new) == unplaced(old)
    assert new.warnings == ()


@pytest.mark.parametrize("file", OWN, ids=lambda path: path.name)
def test_our_own_files_survive_it_too(file, tmp_path):
    (tmp_path / "new.yaml").write_text(import_workflow(file, tmp_path / "new.yaml"))
    old, new = load_workflow(file), load_workflow(tmp_path / "new.yaml")
    assert (new.loops, new.episode) == (old.loops, old.episode)
    assert {name: placed(policy, new.path) for name, policy in new.policies.items()} == {
        name: placed(policy, old.path) for name, policy in old.policies.items()
    }
    assert list(map(without_paths, new.agents)) == list(map(without_paths, old.agents))
    if isinstance(old.algorithm, Custom):
        assert resolve_path(new.algorithm.estimator, new.path) == resolve_path(old.algorithm.estimator, old.path)
    else:
        assert new.algorithm == old.algorithm
    # which name files, from another folder
    parts = {
        "candidates": {"by"},
        **dict.fromkeys(("hooks", "prompt_options", "env", "reward", "compute", "args"), True),
    }
    assert [node.model_dump(exclude=parts) for node in new.nodes] == [n.model_dump(exclude=parts) for n in old.nodes]
    for before, after in zip(old.nodes, new.nodes, strict=True):
        assert kwargs_of(after, new.path) == kwargs_of(before, old.path)
        assert candidates_of(after, new.path) == candidates_of(before, old.path)


def placed(policy, base: str) -> dict:
    """The policy with the file of its script in place of the text that names it."""
    fields = policy.model_dump()
    if fields["api"] and fields["api"]["script"]:
        fields["api"]["script"] = resolve_path(fields["api"]["script"].split(":")[0], base)
    return fields


def kwargs_of(node, base: str) -> dict:
    kwargs = node.args.items()
    return {key: resolve_path(value, base) if names_function(value) else value for key, value in kwargs}


def candidates_of(node, base: str) -> dict:
    candidates = node.candidates.model_dump() if node.candidates else {}
    by = candidates.get("by", "")
    return candidates | {"by": resolve_path(by.split(":")[0], base) if names_function(by) else by}


def test_marft_becomes_short_and_says_what_became_of_the_rest():
    text = import_workflow(SIIRL / "marft.yaml")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0] == "# Made from marft.yaml by `verl-dag import`."
    assert sum("unknown key, which has no effect" in line for line in comments) == 2
    assert any('line 9: nodes[0].config["rollout.n"]: ' in line for line in comments)
    assert len(comments) == 3 + len(load_workflow(SIIRL / "marft.yaml").warnings)
    body = text.splitlines()[len(comments) :]
    assert "critic: {share: policy_0}" in text and "!Ref" not in text and len(body) < 60


def test_another_folder_gets_paths_of_its_own(tmp_path):
    (tmp_path / "deep").mkdir()
    output = tmp_path / "deep" / "new.yaml"
    output.write_text(import_workflow(SIIRL / "marft.yaml", output))
    old, new = load_workflow(SIIRL / "marft.yaml"), load_workflow(output)
    path = new.node("rollout_reasoner").hooks
    assert path.startswith("..") and (output.parent / path).resolve() == (SIIRL / "process.py").resolve()
    assert new.algorithm == old.algorithm


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@example(".5")
@given(VALUES)
def test_every_value_is_read_back_as_it_was(value):
    assert YAML(typ="safe", pure=True).load(f"a: {_flow(value)}\n") == {"a": value}


DECLARED = """\
dag_id: declared
description: "Text: with a colon, a # and a 'quote'."
agents: [{name: a, policy: main, sampling: {temperature: 0.5}, chat_template_kwargs: {enable_thinking: false}}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}, critic: {lr: 1.0e-5, config: {optim.weight_decay: 0.1}}}}
algorithm: {estimator: gae, lam: 0.9}
nodes:
  - {node_id: say, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: a, config: {rollout.dtype: bfloat16}}
  - {node_id: score, node_type: COMPUTE, node_role: REWARD, dependencies: [say], executable_ref: rewards.py:score}
  - {node_id: "1", node_type: MODEL_TRAIN, node_role: CRITIC, dependencies: [score], only_forward_compute: true}
  - {node_id: "yes", node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [score, "1"]}
  - {node_id: learn, node_type: MODEL_TRAIN, node_role: CRITIC, dependencies: ["1", "yes"], config: {strategy: fsdp2}}
  - {node_id: update, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: ["1", "yes"]}
"""


def test_a_declared_chain_stays_declared(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(episode): return {}\n")
    old = load_workflow(tmp_path / "old.yaml", DECLARED)
    new = load_workflow(tmp_path / "new.yaml", to_yaml(old))
    assert unplaced(new) == unplaced(old)
    assert [node.id for node in new.training_nodes] == ["1", "yes", "learn", "update"]
    assert new.policies["main"].critic.config == {"optim.weight_decay": 0.1, "strategy": "fsdp2"}
    assert new.policies["main"].config == {"rollout.dtype": "bfloat16"}
