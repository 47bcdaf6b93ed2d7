"""Log-probs and entropies of tokens from hidden states, without materializing all logits.

Invariant: only positions whose next token is trained or reported are projected onto the vocabulary, at most one chunk
at a time. Forward and backward equal logits / temperature, log_softmax and gather up to floating-point precision. The
kernels are verl's, or `frozen_head`'s if the embeddings are frozen; this module prepares their inputs.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe.dag.workflow.trainer_memory import FUSED_WIDTH, chunk_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRITON = "triton"
TORCH = "torch"


class Scored:
    """The tokens of a micro-batch to score. Neither a pytree nor a dataclass, in which FSDP would cast the temperatures
    to its parameters' type."""

    def __init__(self, positions: Tensor, tokens: Tensor, temperature: float | Tensor):
        """`positions` [scored]: indices into the packed tokens. `tokens` [scored]: those that follow them.
        `temperature`: one for all tokens, or [scored]."""
        self.positions, self.tokens, self.temperature = positions, tokens, temperature


def why_not(model: PreTrainedModel) -> str | None:
    """Return why `model` cannot use this head, which needs logits equal to hidden states times output embeddings; None
    if it can."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    if not isinstance(output, torch.nn.Linear):
        return f"its output layer is a {type(output).__name__}"
    if output.bias is not None:
        return "its output layer has a bias"
    if model.base_model is model:
        return "it has no base model"
    for name, neutral in {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            return f"it changes its logits ({name}={value})"
    return None


def install(model: PreTrainedModel, backend: str) -> None:
    """Make this model's forward take `scored` and return {"log_probs", "entropy"}, [scored] each. Only this instance
    and its output layer change, not their classes: other models of the family in this process keep their forward."""

    def forward(self, scored: Scored, **inputs: object) -> dict[str, Tensor]:
        hidden = self.base_model(**inputs).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])[scored.positions]
        log_probs, entropy = self.get_output_embeddings()(hidden, scored)
        return {"log_probs": log_probs, "entropy": entropy}

    # FSDP shards untied output embeddings apart from the model: their weight is whole only while their layer is called
    def forward_head(self, hidden: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
        return score(hidden, self.weight, scored, backend)

    head: Any = model.get_output_embeddings()
    model.forward, head.forward = types.MethodType(forward, model), types.MethodType(forward_head, head)


def score(hidden: Tensor, weight: Tensor, scored: Scored, backend: str) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [scored] in fp32, for hidden states [scored, width] and the weight
    [vocabulary, width]."""
    temperature = scored.temperature
    if isinstance(temperature, Tensor):
        # the kernels take one temperature; logits / t = (hidden / t) @ weight allows one per row
        hidden, temperature = (hidden.float() / temperature.unsqueeze(-1)).to(hidden.dtype), 1.0
    if hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    if backend == TRITON and _fits_triton(hidden):
        hidden, weight = hidden.contiguous(), weight.contiguous()
        if weight.requires_grad:
            from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

            log_probs, entropy = linear_cross_entropy(hidden, weight, scored.tokens, temperature, "none")
        else:
            from recipe.dag.policy.frozen_head import frozen_cross_entropy

            log_probs, entropy = frozen_cross_entropy(hidden, weight, scored.tokens, temperature)
    else:
        from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

        log_probs, entropy = FusedLinearForPPOFunction.apply(
            hidden, weight, scored.tokens, temperature, chunk_tokens(weight.shape[0])
        )
    return log_probs.float(), entropy.float()


def score_logits(logits: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
    """Return the same from logits [tokens, vocabulary], one fp32 chunk at a time, recomputed in the backward pass."""
    chunk, temperature = chunk_tokens(logits.shape[-1]), scored.temperature
    rows = logits[scored.positions].split(chunk)  # split shares one gradient buffer; slices would allocate one each
    tokens = scored.tokens.split(chunk)
    temperatures = temperature.split(chunk) if isinstance(temperature, Tensor) else [temperature] * len(rows)
    parts = [
        checkpoint(_score_chunk, *inputs, use_reentrant=False)
        for inputs in zip(rows, tokens, temperatures, strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _score_chunk(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    scale = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    scores = (logits.float() / scale).log_softmax(-1)
    return scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(scores.exp() * scores).sum(-1)


def _fits_triton(hidden: Tensor) -> bool:
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    # verl's kernel reads the hidden width in whole blocks
    return hidden.is_cuda and half and hidden.shape[-1] % FUSED_WIDTH == 0
