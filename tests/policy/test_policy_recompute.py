"""Recompute of MLPs only computes what no recompute computes, and keeps less."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from recipe.dag.policy import recompute
from recipe.dag.workflow.model_size import size_of
from recipe.dag.workflow.trainer_memory import saved_values

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {"qwen2": Qwen2Config(**SHAPE), "gemma2": Gemma2Config(**SHAPE, head_dim=8)}


def step(family: str, layers: int | None, nothing: int = 0) -> tuple[torch.Tensor, int, int]:
    """Return (loss and gradients, calls of the projections up and of attention, values kept) of one step; None: without
    any recompute."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="sdpa").train()
    if layers is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        recompute.install(model, layers, nothing)
    calls = {"up_proj": 0, "o_proj": 0}
    for name, module in model.named_modules():
        if (last := name.rpartition(".")[2]) in calls:
            module.register_forward_hook(lambda *_, last=last: calls.__setitem__(last, calls[last] + 1))
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    ids = torch.arange(40).reshape(1, -1) % 50
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return torch.cat([loss.detach().reshape(1), gradients]), calls["up_proj"], calls["o_proj"], kept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_is_the_one_without_recompute(family, layers):
    plain, found = step(family, None), step(family, layers)
    torch.testing.assert_close(found[0], plain[0], atol=1e-7, rtol=1e-6)
    assert found[1] == 2 * plain[1], "every layer computes its MLP twice"
    assert found[2] == plain[2] + 3 - layers, "and these layers their attention once"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mlp_only", "nothing"), [(1, 1), (3, 2), (0, 3), (3, 9)])
def test_layers_that_recompute_nothing_are_behind_those_that_recompute_their_mlp(family, mlp_only, nothing):
    plain, found = step(family, None), step(family, mlp_only, nothing)
    torch.testing.assert_close(found[0], plain[0], atol=1e-7, rtol=1e-6)
    recomputed = max(3 - nothing, 0)
    assert found[1] == plain[1] + recomputed and found[2] == plain[2] + max(recomputed - mlp_only, 0)


def test_mlps_are_most_of_what_a_layer_keeps():
    kept = [step("qwen2", layers)[3] for layers in (0, 3, None)]
    assert kept[0] < kept[1] < 0.7 * kept[2]


def test_values_without_gradients_are_computed_once():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen2"]).train()
    ids = torch.arange(40).reshape(1, -1) % 50
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        recompute.install(model, 3, 0)
        assert torch.equal(model(input_ids=ids).logits, plain)


HEADS = {**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        lambda **shape: Qwen2Config(**shape | {"num_key_value_heads": 8}),
        lambda **shape: Qwen3Config(**shape, head_dim=8),
        lambda **shape: Qwen3MoeConfig(**shape, head_dim=8, **EXPERTS),
    ],
    ids=["equal heads", "wide heads with norms", "experts"],
)
def test_the_estimate_of_what_a_layer_keeps_holds_for_every_kind_of_layer(config, tmp_path):
    def kept(layers: int) -> float:
        """Return the bf16 values per token that a model of so many layers keeps."""
        made = config(**HEADS | {"num_hidden_layers": layers})
        made.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=torch.bfloat16).train()
        own, found = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage  # kept, so that no later one gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=torch.arange(48).reshape(1, -1), use_cache=False)
        return sum(storage.nbytes() for address, storage in found.items() if address not in own) / 48 / 2

    measured = (kept(3) - kept(1)) / 2
    assert 0.7 < measured / sum(saved_values(size_of(str(tmp_path)), liger=False)) < 1
