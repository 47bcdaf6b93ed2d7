"""Adapters on one base, on one rank and two: each is bit-equal to one that is alone, and computes what PEFT does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipe.dag.core.errors import UserError
from recipe.dag.platform.adapter_weights import merge, read_adapter, target_layers
from tests.policy.ranks import run_ranks
from tests.policy.spmd_adapters import CRITIC, HISTORY, advantages, equal, rows

SCRIPT = Path(__file__).with_name("spmd_adapters.py")
FOLDED = ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",)


@pytest.fixture(scope="module", params=[(1, ()), (2, ()), (1, FOLDED)], ids=["one rank", "two ranks", "a bf16 base"])
def trained(request, tiny_model, tmp_path_factory, zygote) -> SimpleNamespace:
    (world, overrides), out = request.param, tmp_path_factory.mktemp("adapters")
    run_ranks(zygote.python, SCRIPT, world, out, str(tiny_model), str(out), *overrides)
    return SimpleNamespace(out=out, model=tiny_model, half=bool(overrides), **torch.load(out / "result.pt"))


def test_adapters_start_as_their_base(trained):
    for name in "ab":
        assert equal_rows(trained.at_start[name], trained.reference_at_start)
    assert not any(row.any() for row in trained.values_at_start.values())


def test_an_update_changes_one_adapter_and_nothing_else(trained):
    assert trained.others_same == [True] * len(HISTORY) and trained.base_same and trained.b_was_idle
    assert trained.steps == {"a": 3, CRITIC: 3, "b": 2}
    assert equal_rows(trained.reference, trained.reference_at_start)
    assert not equal_rows(trained.log_probs["a"], trained.log_probs["b"])


@pytest.mark.parametrize("other", ["alone", "resumed"])
def test_an_adapter_is_bit_equal_to_one_that_is_alone_or_was_resumed_in_the_middle(trained, other):
    for name, tensors in {"a": 28, CRITIC: 28 + 2, "b": 12}.items():
        assert sum(map(len, trained.together[name].values())) == tensors
        assert equal(trained.together[name], getattr(trained, other)[name])


def test_the_names_of_the_bases_weights_stay(trained):
    names = [name for name in trained.names if ".lora_" not in name and not name.startswith("value_")]
    assert names == sorted(AutoModelForCausalLM.from_pretrained(trained.model).state_dict())


def test_peft_and_a_merged_model_give_the_adapters_log_probs(trained):
    for name in "ab":
        assert not (trained.out / f"stale_{name}").exists(), "its memory is that of the one written now"
        base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
        if trained.half:
            base = base.bfloat16().float()
        merged = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
        if trained.half:
            merged = merged.bfloat16().float()
        merge(merged, trained.out / f"written_{name}")
        peft = PeftModel.from_pretrained(base, str(trained.out / f"written_{name}"))
        for model in (peft, merged):
            found = score(model, 9)
            for index, row in trained.log_probs[name].items():
                torch.testing.assert_close(row, found[index].detach(), atol=2e-5, rtol=1e-5)


def test_peft_loads_a_critic_and_its_head_gives_the_values(trained):
    folder = trained.out / "written_a_critic"
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    if trained.half:
        base = base.bfloat16().float()
    body = PeftModel.from_pretrained(base, str(folder)).base_model.model.model
    head = load_file(folder / "value_head.safetensors")
    for index, row in enumerate(rows(9)):
        if index in trained.values:
            hidden = body(torch.tensor([row.prompt_ids + row.response_ids])).last_hidden_state[0].detach()
            values = (hidden @ head["weight"].T + head["bias"])[len(row.prompt_ids) - 1 : -1, 0]
            assert values.abs().max() > 1e-3
            torch.testing.assert_close(trained.values[index], values, atol=2e-5, rtol=1e-4)


def test_gradients_are_those_of_peft_and_the_base_has_none(trained):
    own = {f"value_{part}_{CRITIC}" for part in ("weight", "bias")}
    assert own < trained.gradients[CRITIC].keys()
    for adapter, found in trained.gradients.items():
        assert all("lora_" in name and name.endswith(f"_{adapter}") for name in found.keys() - own)
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    if trained.half:
        base = base.bfloat16().float()
    reference = [row.detach() for row in score(base, 7)]
    model = PeftModel.from_pretrained(base, str(trained.out / "written_a"), is_trainable=True)
    new = torch.stack(score(model, 7))
    ratio = (new - new.detach()).exp()
    delta = torch.stack(reference) - new
    kl = (delta.exp() - delta - 1).clamp(-10, 10)  # verl's low-variance estimate
    loss = -(ratio * torch.stack(advantages(7))).mean() + 0.1 * kl.mean()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm().clamp(min=1.0)  # clipped, after our record
    assert len(expected) == len(trained.gradients["a"]) == 28 and float(norm) > 0
    for name, gradient in trained.gradients["a"].items():
        layer, _, part = name.rpartition(".")
        theirs = expected[f"base_model.model.{layer}.{part.removesuffix('_a')}.default.weight"]
        torch.testing.assert_close(gradient, theirs, atol=1e-5, rtol=1e-3)


def test_a_folder_of_another_model_or_with_other_options_is_refused(trained):
    folder = trained.out / "written_b"
    model = AutoModelForCausalLM.from_pretrained(trained.model)
    layers = target_layers(model, ("all-linear",))
    assert read_adapter(folder, layers)[0].alpha == 6
    with pytest.raises(UserError, match="no layer for .*up_proj.*another model"):
        read_adapter(folder, target_layers(model, ("q_proj", "v_proj")))
    with pytest.raises(UserError, match=r"no linear layer `qproj`; it has down_proj, gate_proj"):
        target_layers(model, ("qproj",))
    config = folder / "adapter_config.json"
    text = config.read_text()
    for old, new, message in (
        ('"bias": "none"', '"bias": "none", "use_rslora": true', "use_rslora=True is not supported"),
        ('"r": 2', '"r": 3', "do not fit the model at rank 3"),
        ('"peft_type": "LORA"', '"peft_type": "IA3"', "only LORA is read"),
        ('"lora_alpha": 6.0,', "", "does not describe a LoRA"),
    ):
        assert old in text
        config.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=message):
            read_adapter(folder, layers)
    config.write_text(text)


def equal_rows(one: dict, other: dict) -> bool:
    return all(torch.equal(row, other[index]) for index, row in one.items())


def score(model, seed: int) -> list[torch.Tensor]:
    """Return the log-probs of the rows' responses."""
    found = []
    for row in rows(seed):
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        log_probs = model(input_ids=ids).logits[0].float().log_softmax(-1)
        found.append(log_probs[len(row.prompt_ids) - 1 : -1].gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0])
    return found


def test_weights_that_fsdp_leaves_alone_are_not_loaded_again():
    from recipe.dag.policy.adapter_engine import _load

    module = torch.nn.Linear(2, 2)
    address = module.weight.data_ptr()
    _load(pytest.fail, module, module.state_dict(), None, None)
    assert module.weight.data_ptr() == address
