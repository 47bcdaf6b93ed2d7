from __future__ import annotations

import json

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train.models import find_models
from recipe.dag.workflow.schema import Workflow


def workflow(**policies: dict) -> Workflow:
    agents = [{"name": name, "policy": name} for name in policies]
    return Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[])


def test_each_policy_and_each_critic_of_its_own_has_a_model(tiny_model, monkeypatch):
    monkeypatch.setenv("TINY", str(tiny_model))
    model = {"path": "${oc.env:TINY}"}
    flow = workflow(
        a={"model": model, "critic": {}},
        b={"model": model, "critic": {"share": "a"}},
        c={"model": model},
        d={"model": model, "frozen": True, "critic": {}},
        e={"model": model, "critic": {"model": {"path": str(tiny_model)}}},
    )
    models = find_models(flow)
    assert models.policies == dict.fromkeys("abcde", str(tiny_model))
    assert models.critics == {"a": str(tiny_model), "e": str(tiny_model)}


def test_a_missing_model_is_named_by_its_key(tiny_model, tmp_path):
    for path, problem in (("", "(empty)"), ("./absent", "not a model directory"), (str(tmp_path), "config.json is")):
        with pytest.raises(UserError, match="policies.a.model.path") as caught:
            find_models(workflow(a={"model": {"path": path}}))
        assert problem in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="policies.a.critic.model.path: ./absent"):
        find_models(workflow(a={"model": {"path": str(tiny_model)}, "critic": {"model": {"path": "./absent"}}}))


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(UserError, match="policies.a.model.path.*cannot be loaded"):
        find_models(workflow(a={"model": {"path": str(tmp_path)}}))


def test_an_architecture_without_a_token_classifier_cannot_be_a_critic(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    model = {"path": str(tmp_path)}
    assert find_models(workflow(a={"model": model})).critics == {}
    with pytest.raises(UserError, match="policies.a.model.path: .*no token classifier for mamba"):
        find_models(workflow(a={"model": model, "critic": {}}))


def test_policies_of_different_vocabularies_cannot_share_a_critic(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        text = file.read_bytes().replace(b"w95", b"other") if file.suffix == ".json" else file.read_bytes()
        (tmp_path / file.name).write_bytes(text)
    policies = {
        "a": {"model": {"path": str(tiny_model)}, "critic": {}},
        "b": {"model": {"path": str(tmp_path)}, "critic": {"share": "a"}},
    }
    with pytest.raises(UserError, match="policies.b.critic.share: a and b have different voc.*write `critic: {}`"):
        find_models(workflow(**policies))
