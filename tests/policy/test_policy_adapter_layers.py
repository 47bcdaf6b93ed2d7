"""Layers with an adapter, computed together where their input is the same."""

from __future__ import annotations

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.adapter_layers import install
from recipe.dag.workflow.adapter_shape import AdapterShape


def test_a_layer_computes_with_its_own_input_in_any_order_of_calls(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    shapes = {"a": AdapterShape(3, 6.0, ("all-linear",)), "b": AdapterShape(2, 2.0, ("q_proj", "v_proj"))}
    active = install(model, tuple(TrainedAdapter(name, shape, {}) for name, shape in shapes.items()), seed=0)
    layers = dict(model.model.layers[0].self_attn.named_children())
    draw = torch.Generator().manual_seed(0)
    for layer in layers.values():
        for name, weight in layer.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(generator=draw)
    inputs = {name: torch.randn(2, 3, model.config.hidden_size, generator=draw, requires_grad=True) for name in "xy"}
    calls = [("a", "q", "x"), ("a", "k", "y"), ("a", "v", "x"), ("b", "v", "x"), ("b", "k", "x"), ("b", "q", "x")]
    calls += [("a", "k", "x"), ("a", "k", "x"), ("a", "q", "x"), ("a", "v", "y"), (None, "q", "y")]
    for adapter, name, given in calls:
        layer, hidden = layers[f"{name}_proj"], inputs[given]
        active.name, active.scale = adapter, shapes[adapter].scale if adapter else 1.0
        expected = linear(hidden, layer.weight, layer.bias)
        wanted, own = [hidden], layer._parameters
        if f"lora_A_{adapter}" in own:
            pair = own[f"lora_A_{adapter}"], own[f"lora_B_{adapter}"]
            expected = expected + active.scale * hidden @ pair[0].T @ pair[1].T
            wanted += pair
        direction = torch.randn(expected.shape, generator=draw)
        found = layer(hidden)
        torch.testing.assert_close(found, expected)
        results = (found, expected)
        gradients = [torch.autograd.grad((each * direction).sum(), wanted, retain_graph=True) for each in results]
        torch.testing.assert_close(*gradients)


def test_a_model_may_change_a_result_in_place_and_have_no_rows_for_a_layer(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    install(model, (TrainedAdapter("a", AdapterShape(3, 6.0, ("all-linear",)), {}),), seed=0).name = "a"
    layers = model.model.layers[0].self_attn
    for rows in (4, 0):
        hidden = torch.randn(rows, model.config.hidden_size, requires_grad=True)
        layers.q_proj(hidden).clamp_(-0.1, 0.1).sum().backward()  # OLMo's clip_qkv
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape


def test_gradients_add_up_over_micro_batches(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    active = install(model, (TrainedAdapter("a", AdapterShape(3, 6.0, ("all-linear",)), {}),), seed=0)
    active.name = "a"
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    batches = [torch.arange(2, 9)[None], torch.arange(40, 60)[None]]
    each = []
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        each.append({name: weight.grad.clone() for name, weight in weights.items()})
        model.zero_grad()
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.grad, each[0][name] + each[1][name])


def test_a_norm_may_give_fp32_to_layers_in_half_precision(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    install(model, (TrainedAdapter("a", AdapterShape(3, 6.0, ("all-linear",)), {}),), seed=0).name = "a"
    hidden = torch.randn(4, model.config.hidden_size, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = model.model.layers[0].self_attn.q_proj(hidden)
    result.sum().backward()
    assert hidden.grad is not None
    assert (result.dtype, hidden.grad.dtype) == (torch.bfloat16, torch.float32)
