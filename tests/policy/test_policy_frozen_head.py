"""The head with frozen embeddings against logits: with the kernels in torch, and interpreted where Triton is installed
without a GPU. `test_policy_linear_head` has them on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.dag.policy import frozen_head

TOKENS, WIDTH, VOCABULARY = 37, 16, 5000  # the kernels' last block is short


def score(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    scaled = logits / temperature
    log_probs = scaled.log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], entropies, scaled.logsumexp(-1)


def differentiate(logits, tokens, temperature, dtype, norms, entropies, d_log_probs=None, d_entropies=None) -> Tensor:
    if d_log_probs is None:
        d_log_probs, d_entropies = torch.ones_like(norms), torch.zeros_like(norms)
    log_probs = logits / temperature - norms[:, None]
    chosen = torch.nn.functional.one_hot(tokens, logits.shape[1])
    gradients = d_log_probs[:, None] * (chosen - log_probs.exp())
    gradients -= d_entropies[:, None] * log_probs.exp() * (log_probs + entropies[:, None])
    return (gradients / temperature).to(dtype)


def test_hidden_states_get_the_gradients_of_logits_and_embeddings_none(monkeypatch, replace_kernels):
    replace_kernels("recipe.dag.policy.head_kernel", score=score, differentiate=differentiate)
    check(monkeypatch.setattr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed on the GPU")
def test_the_kernels_compute_the_same(run_interpreted):
    run_interpreted(__file__)


def check(replace) -> None:
    replace(frozen_head, "FROZEN_CHUNK", 10)  # the last one is short
    replace(frozen_head, "logits_of", lambda hidden, weight: hidden @ weight.T)  # torch has the real one on GPUs alone
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    found = frozen_head.frozen_cross_entropy(hidden, weight, tokens, 0.7)
    wanted = score(hidden @ weight.T, tokens, 0.7)[:2]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    # of log-probs alone, with entropies that nothing reads, of both, and of entropies alone
    for factors in ((1.0, None), (1.0, -0.3), (None, 1.0)):
        incoming = [torch.randn(TOKENS, generator=draw) * factor for factor in factors if factor is not None]
        losses = [
            [value for value, factor in zip(pair, factors, strict=True) if factor is not None]
            for pair in (found, wanted)
        ]
        one, other = (torch.autograd.grad(loss, hidden, incoming, retain_graph=True)[0] for loss in losses)
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(frozen_head.frozen_cross_entropy(hidden, weight, tokens, 0.7)[0], found[0])


if __name__ == "__main__":
    check(setattr)
