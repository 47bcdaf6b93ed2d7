"""verl's fused log-probs for output embeddings that are frozen, as those of adapters are.

Invariant: results and gradients of the hidden states are verl's, bit for bit. Its own backward pass also computes the
gradient of the embeddings, a third of its FLOPs and as much memory as they have, which nothing reads then.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

from recipe.dag.workflow.trainer_memory import FUSED_COLUMNS


class FrozenCrossEntropy(LinearCrossEntropy):
    """Log-probs and entropies, [tokens] each."""

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        from verl.utils.kernel import kernels

        hidden, weight, tokens, maximum, accumulated, entropy_b = ctx.saved_tensors
        d_hidden = hidden.new_zeros(hidden.shape)
        d_logits = hidden.new_empty(len(hidden), FUSED_COLUMNS)

        kernel = cast(Any, kernels.efficient_entropy_backward_kernel_general_d_logits_split_N)

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (-(len(hidden) // -meta["BLOCK_SIZE_M"]) * -(FUSED_COLUMNS // -meta["BLOCK_SIZE_N"]),)

        for number, part in enumerate(weight.split(FUSED_COLUMNS)):
            kernel[grid](
                number,
                *hidden.shape,
                len(weight),
                FUSED_COLUMNS,
                0,  # the rank of a vocabulary that is split
                *_strided(hidden, weight, tokens, maximum, accumulated, d_entropy, d_log_probs),
                ctx.REDUCTION,
                *_strided(entropy_b, d_logits),
                1.0 / ctx.temperature,
                USE_TMA=kernels.SUPPORT_CUDA_TMA,
            )
            d_hidden += d_logits[:, : len(part)].contiguous() @ part
        return d_hidden, None, None, None, None, None


def _strided(*tensors: Tensor) -> list[Any]:
    """Return each tensor, followed by its strides, as kernels take them."""
    return [part for tensor in tensors for part in (tensor, *tensor.stride())]


frozen_cross_entropy = FrozenCrossEntropy.apply
