"""An MLP whose layers have an adapter against these layers one by one, with the kernels in torch; and the kernels, on a
GPU, or interpreted where Triton is installed without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from recipe.dag.policy import adapter_mlp
from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.adapter_engine import AdapterEngine
from recipe.dag.workflow.adapter_shape import AdapterShape

SHAPES = {"a": AdapterShape(3, 6.0, ("all-linear",)), "b": AdapterShape(2, 2.0, ("gate_proj", "up_proj"))}


def activate(gate: Tensor, up: Tensor, low: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    assert all(each.is_contiguous() for each in (gate, up, low, b_gate, b_up))
    g, u = (each + part @ b.T for each, part, b in zip((gate, up), low.chunk(2, 1), (b_gate, b_up), strict=True))
    return silu(g) * u


def differentiate(d_out, gate, up, low, b_gate, b_up, d_low, a_down) -> None:
    assert all(each.is_contiguous() for each in (d_out, d_low, a_down))
    with torch.enable_grad():
        inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        out = activate(*inputs, low, b_gate, b_up)
    for each, gradient in zip((gate, up), torch.autograd.grad(out, inputs, d_out + d_low @ a_down), strict=True):
        each.data.copy_(gradient)  # which autograd does not notice, as with a kernel


@pytest.mark.parametrize(
    ("recomputed", "dtype", "error"), [(0, torch.float32, 1e-5), (1, torch.float32, 1e-5), (0, torch.bfloat16, 0.05)]
)
def test_an_mlp_computes_what_its_layers_do(monkeypatch, replace_kernels, tiny_model, recomputed, dtype, error):
    calls = []
    kernels = {"activate": lambda *inputs: calls.append(1) or activate(*inputs), "differentiate": differentiate}
    replace_kernels("recipe.dag.policy.swiglu_kernel", **kernels)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda self: model)
    adapters = tuple(TrainedAdapter(name, shape, {}) for name, shape in SHAPES.items())
    engine: Any = object.__new__(AdapterEngine.holding(adapters))
    layers = model.config.num_hidden_layers
    options = {"recompute_mlp_only": recomputed, "recompute_nothing": layers - recomputed}
    engine.model_config = SimpleNamespace(
        fused_kernel_options=options, enable_gradient_checkpointing=True, use_liger=True
    )
    engine.engine_config = SimpleNamespace(seed=0)
    engine._build_module().train()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_(std=0.2)
    ids = torch.randint(2, 96, (2, 9))

    def results(name: str | None) -> list[Tensor]:
        engine.active.name, engine.active.scale = name, SHAPES[name].scale if name else 1.0
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        if name is not None:
            loss.backward()
        return [loss.detach(), *[weight.grad.clone() for weight in model.parameters() if weight.grad is not None]]

    for name in (*SHAPES, None):
        expected = results(name)
        assert not calls
        with monkeypatch.context() as patch:
            patch.setattr(adapter_mlp, "_has_kernels", lambda weight: True)
            for found, wanted in zip(results(name), expected, strict=True):
                assert found.dtype == wanted.dtype
                assert float((found - wanted).norm()) <= error * float(wanted.norm())
        # only an adapter of all three layers has the kernels; recomputed, an MLP runs twice
        assert len(calls) == (layers + recomputed) * (name == "a")
        calls.clear()
    engine.active.name = "a"
    monkeypatch.setattr(adapter_mlp, "_has_kernels", lambda weight: True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_compute_the_same_on_a_gpu():
    check("cuda", torch.bfloat16, 0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed on the GPU")
def test_the_kernels_compute_the_same(run_interpreted):
    run_interpreted(__file__)


def check(device: str, dtype: torch.dtype, error: float) -> None:
    from recipe.dag.policy import swiglu_kernel

    torch.manual_seed(0)
    for tokens, width, rank in ((1, 64, 8), (70, 200, 16), (64, 136, 72), (0, 64, 8)):
        shapes = {"gate": (tokens, width), "up": (tokens, width), "low": (tokens, 2 * rank)}
        shapes |= {"b_gate": (width, rank), "b_up": (width, rank)}
        inputs = [torch.randn(shape, device=device).div(shape[1] ** 0.25).to(dtype) for shape in shapes.values()]
        incoming = [
            torch.randn(shape, device=device).to(dtype) for shape in ((tokens, width), (tokens, rank), (rank, width))
        ]
        exact = [each.double() for each in (incoming[0], *inputs, *incoming[1:])]
        expected = activate(*exact[1:6])
        differentiate(*exact)
        found = swiglu_kernel.activate(*inputs)
        swiglu_kernel.differentiate(incoming[0], *inputs, *incoming[1:])
        for one, other in ((found, expected), (inputs[0], exact[1]), (inputs[1], exact[2])):
            assert one.isfinite().all()
            assert float((one.double() - other).norm()) <= error * float(other.norm())


if __name__ == "__main__":
    check("cpu", torch.float32, 1e-5)
