from __future__ import annotations

import copy

import pytest
import torch
import verl.workers.engine.base as base
from transformers import AutoConfig

from recipe.dag.policy import value_model


@pytest.mark.parametrize(("device", "vendor"), [("cpu", "cpu"), ("cuda", "nvidia"), ("cuda", "amd")])
def test_this_engine_is_chosen_before_verls_own_on_every_device(monkeypatch, device, vendor):
    monkeypatch.setattr(base.EngineRegistry, "_engines", copy.deepcopy(base.EngineRegistry._engines))
    base.EngineRegistry._engines["value_model"]["fsdp2"] = {
        key: engine
        for key, engine in base.EngineRegistry._engines["value_model"]["fsdp2"].items()
        if engine is not value_model.ValueEngine
    }
    for module in (base, value_model):
        monkeypatch.setattr(module, "get_device_name", lambda: device)
        monkeypatch.setattr(module, "get_vendor", lambda: vendor)
    value_model.register()
    value_model.register()  # a process may build several critics
    assert base.EngineRegistry.get_engine_cls("value_model", "fsdp2") is value_model.ValueEngine


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_configured_attention_is_used_and_the_head_is_zero(tiny_model, attention):
    config = AutoConfig.from_pretrained(tiny_model, attn_implementation=attention, num_labels=1)
    model = value_model.load_value_model(str(tiny_model), torch.float32, config, trust_remote_code=False)
    assert model.config._attn_implementation == attention
    assert model.score.out_features == 1 and not any(p.any() for p in model.score.parameters())
    assert any(p.any() for p in model.model.parameters())
