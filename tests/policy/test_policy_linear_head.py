"""The head without logits against logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from recipe.dag.policy import linear_head
from recipe.dag.policy.linear_head import Scored
from recipe.dag.workflow import trainer_memory

TOKENS, WIDTH, VOCABULARY = 37, 16, 300
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)


def expected(hidden, weight, tokens, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.t()) / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("logits", [False, True], ids=["hidden", "logits"])
@pytest.mark.parametrize("temperatures", [1.0, 0.7, "each"])
def test_log_probs_entropies_and_gradients_are_those_of_logits(monkeypatch, temperatures, logits):
    monkeypatch.setattr(trainer_memory, "CHUNK_BYTES", 0)  # the smallest chunk there is ...
    monkeypatch.setattr(trainer_memory, "MIN_CHUNK", 10)  # ... in four parts, the last one short
    hidden, weight, tokens = inputs()
    each = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)) + 0.5
    temperature = each if temperatures == "each" else temperatures
    scored = Scored(torch.arange(TOKENS), tokens, temperature)
    if logits:
        found = linear_head.score_logits(hidden @ weight.t(), scored)
    else:
        found = linear_head.score(hidden, weight, scored, "torch")
    wanted = expected(hidden, weight, tokens, temperature[:, None] if temperatures == "each" else temperature)
    factors = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(3))
    losses = [
        sum((value * factor).sum() for value, factor in zip(two, factors, strict=True)) for two in (found, wanted)
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]


@pytest.mark.parametrize(("config", "family"), FAMILIES, ids=lambda value: value.__name__)
@pytest.mark.parametrize("tied", [True, False])
def test_one_model_gets_the_head_and_its_family_keeps_its_own(config, family, tied):
    torch.manual_seed(0)
    model = family(config(**SHAPE, tie_word_embeddings=tied)).eval()
    ids = torch.randint(0, 50, (1, 12))
    logits = model(input_ids=ids).logits[0]
    assert linear_head.why_not(model) is None
    linear_head.install(model, "torch")
    scored = Scored(torch.tensor([2, 5, 11]), torch.tensor([7, 8, 9]), 1.0)
    found = model(input_ids=ids, scored=scored, use_cache=False)["log_probs"]
    torch.testing.assert_close(found, logits.log_softmax(-1)[scored.positions, scored.tokens], atol=1e-5, rtol=1e-5)
    assert family(config(**SHAPE))(input_ids=ids).logits.shape == (1, 12, 50)


def model_with(bias: bool = False, **config: object) -> SimpleNamespace:
    text = SimpleNamespace(**config)
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        get_output_embeddings=lambda: torch.nn.Linear(4, 5, bias=bias),
        base_model=object(),
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (model_with(bias=True), "bias"),
        (model_with(final_logit_softcapping=30.0), r"final_logit_softcapping=30.0"),
        (model_with(logit_scale=0.0625), "logit_scale"),
        (model_with(logits_scaling=8.0), "logits_scaling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_whose_log_probs_are_more_than_a_product_keep_their_logits(model, reason):
    assert reason in linear_head.why_not(model)


def test_models_with_neutral_options_are_given_it():
    assert linear_head.why_not(model_with(final_logit_softcapping=None, logit_scale=1.0)) is None


def test_temperatures_keep_their_precision_under_fsdp(engine):  # whose process group this uses
    class Temperatures(torch.nn.Linear):
        def forward(self, scored: Scored) -> torch.Tensor:
            return scored.temperature

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(Temperatures(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    temperatures = torch.tensor([0.7, 1.3])
    assert torch.equal(model(Scored(torch.arange(2), torch.arange(2), temperatures)), temperatures)


@needs_gpu
@pytest.mark.parametrize("temperature", ["1.0", "0.7", "each"])
def test_the_kernels_compute_what_the_chunks_do(temperature):
    """With Qwen's vocabulary, in bf16, as GPUs train: gradients, too."""
    # which the other tests set to cpu
    env = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, __file__, temperature], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 7 and max(errors) < 0.02


def kernel_errors(temperature: str) -> list[float]:
    """Relative errors with trained embeddings, then with frozen ones: of log-probs and entropies, of the hidden states'
    gradients from log-probs alone and from both, and of the trained embeddings' gradient."""
    tokens, width, vocabulary = 3000, 896, 151_936
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda")
    weight = torch.randn(vocabulary, width, device="cuda") * 0.05
    words = torch.randint(0, vocabulary, (tokens,), device="cuda")
    heat = torch.rand(tokens, device="cuda") + 0.5 if temperature == "each" else float(temperature)
    scored, factors = Scored(torch.arange(tokens), words, heat), torch.randn(2, tokens, device="cuda")

    def results(backend: str, dtype: torch.dtype, trained: bool) -> list[torch.Tensor]:
        copies = [each.to(dtype, copy=True) for each in (hidden, weight)]
        inputs = [copies[0].requires_grad_(), copies[1].requires_grad_(trained)]
        log_probs, entropies = linear_head.score(*inputs, scored, backend)
        both, alone = (log_probs * factors[0] + entropies * factors[1]).sum(), (log_probs * factors[0]).sum()
        of_states = torch.autograd.grad(alone, inputs[0], retain_graph=True)
        of_both = torch.autograd.grad(both, [each for each in inputs if each.requires_grad])
        return [torch.stack([log_probs, entropies]), *of_states, *of_both]

    wanted = results("torch", torch.float32, trained=True)
    found = [results("triton", torch.bfloat16, trained) for trained in (True, False)]
    return [
        float((half.float() - full).norm() / full.norm())
        for each in found
        for half, full in zip(each, wanted, strict=False)
    ]


if __name__ == "__main__":
    print(json.dumps(kernel_errors(sys.argv[1])))
