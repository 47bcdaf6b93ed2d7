"""Log-probs and entropies of tokens by output embeddings that are frozen, as those of adapters are.

Invariant: logits of at most FROZEN_CHUNK tokens exist at a time. The gradient of a token's log-prob with respect to its
hidden state is the token's embedding minus the policy's mean embedding. It is computed while the logits exist, and the
backward pass scales it by the token's incoming gradient. Only an entropy's gradient needs the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipe.dag.workflow.trainer_memory import FROZEN_CHUNK


class FrozenCrossEntropy(torch.autograd.Function):
    """Log-probs and entropies, [tokens] each and fp32, of hidden states [tokens, width] and `weight`
    [vocabulary, width] in half precision."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        from recipe.dag.policy import head_kernel

        scores, slopes = [], []  # slopes: of log-probs with respect to hidden states
        for states, words in zip(hidden.split(FROZEN_CHUNK), tokens.split(FROZEN_CHUNK), strict=True):
            logits = logits_of(states, weight)
            scores.append(head_kernel.score(logits, words, temperature))
            if ctx.needs_input_grad[0]:
                _, entropies, norms = scores[-1]
                gradients = head_kernel.differentiate(logits, words, temperature, weight.dtype, norms, entropies)
                slopes.append(gradients @ weight)
        log_probs, entropies, norms = (torch.cat(parts) for parts in zip(*scores, strict=True))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes), hidden, weight, tokens, norms, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        slopes, hidden, weight, tokens, norms, entropies = ctx.saved_tensors
        if d_log_probs is None:
            d_log_probs = torch.zeros_like(norms)
        if d_entropies is None:
            return (slopes * d_log_probs.unsqueeze(-1)).to(hidden.dtype), None, None, None
        from recipe.dag.policy import head_kernel

        columns = (hidden, tokens, norms, entropies, d_log_probs.contiguous(), d_entropies.contiguous())
        d_hidden = []
        for states, words, *rest in zip(*(column.split(FROZEN_CHUNK) for column in columns), strict=True):
            logits = logits_of(states, weight)
            d_hidden.append(head_kernel.differentiate(logits, words, ctx.temperature, weight.dtype, *rest) @ weight)
        return torch.cat(d_hidden), None, None, None


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits in fp32, as they are summed: rounded to bf16, they would change probabilities by percents."""
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


frozen_cross_entropy = FrozenCrossEntropy.apply
