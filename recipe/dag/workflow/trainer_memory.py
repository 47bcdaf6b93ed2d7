"""Estimate of the bytes for training a model on each GPU: states, activations, the head, and the peak of an update.

Invariant: pure arithmetic on a model's dimensions. The factors apply to verl's FSDP2 engine in bf16 over fp32 master
weights; tests compare the result with peaks measured on an H100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from recipe.dag.core.frozen import Frozen
from recipe.dag.workflow.model_size import ModelSize

MASTER, GRADIENT, ADAM = 4, 4, 8
"""Bytes per trained parameter: fp32 weights, fp32 gradients, two fp32 moments."""
ADAM_8BIT = 2 * (1 + 4 / 256)
"""The same of torchao's 8-bit Adam: two moments of one byte, with an fp32 scale for each block of 256."""
OPTIMIZER_SCRATCH = 4
"""Bytes per parameter while Adam steps: it takes the root of all second moments at once, in one more fp32 copy.
torchao's steps one tensor at a time."""
BF16 = 2
LAYER_GRADIENTS = (3, 4)
"""bf16 values per token of the gradients that exist during the backward pass of a layer, as multiples of (width of the
MLP, hidden size)."""
FUSED_COLUMNS = 9504
"""Columns of the vocabulary whose gradients verl's fused kernel holds at a time."""
FROZEN_CHUNK = 1024
"""Tokens whose logits exist at a time where the output embeddings are frozen: in fp32, and their gradients in bf16."""
FUSED_WIDTH = 128
"""The kernel supports multiples of this hidden size; for others torch computes a chunk of logits at a time."""
CHUNK_BYTES = 256 * 2**20
"""Maximum fp32 bytes of the logits of such a chunk."""
MIN_CHUNK = 128
"""Minimum number of tokens of a chunk."""
CHUNK_COPIES = 4
"""Copies of a chunk in fp32 that exist at the same time: logits, log-probs, probabilities, gradient."""
UNSHARDED_LAYERS = 2
"""Layers gathered at a time: FSDP2 fetches the next layer while one computes."""


class Head(StrEnum):
    """Methods of computing log-probs."""

    FUSED = "fused"
    """A kernel that does not store logits."""
    CHUNKED = "chunked"
    """torch, a chunk of tokens at a time, without storing all logits."""
    LOGITS = "logits"
    """From the model's logits of a packed micro-batch, a chunk at a time."""
    PACKED = "packed"
    """From the model's logits of a packed micro-batch, at once, by verl."""
    PADDED = "padded"
    """From the model's logits with padding, which verl removes in a copy."""


LOGIT_COPIES = {Head.LOGITS: 3, Head.PACKED: 2, Head.PADDED: 3}
"""Arrays of tokens x vocabulary in bf16 that exist at the same time."""


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """The training options of a policy on which memory depends."""

    tokens: int
    """Tokens of a micro-batch."""
    param_offload: bool = False
    """Weights are in host memory while other policies train."""
    optimizer_offload: bool = False
    offload_policy: bool = False
    """FSDP2's offloading: weights, gradients and optimizer are in host memory at all times."""
    head: Head = Head.FUSED
    checkpointing: bool = True
    """Layers recompute their activations in the backward pass."""
    mlp_only: int = 0
    """Layers that recompute those of their MLP only."""
    nothing: int = 0
    """Other layers, which recompute none."""
    liger: bool = False
    """Norms, rotary embeddings and MLPs are Liger's kernels."""
    adapters: int = 0
    """Parameters of the adapters, if they are trained and the model is not, whose weights are then bf16."""
    reshard: bool = True
    """A layer's gathered weights are freed after its forward pass, and gathered again for its backward pass."""
    reduce_once: bool = False
    """Gradients are whole on each GPU until the last micro-batch."""
    moments: float = ADAM
    """Bytes per trained parameter of the optimizer's moments."""


class Phase(Frozen):
    """Bytes on each GPU at the peak of a phase of a step."""

    name: str
    weights: int
    """Master weights and gathered bf16 copies."""
    gradients: int = 0
    optimizer: int
    activations: int = 0
    """Activations and the buffers of the head."""
    servers: int = 0
    """Static shares of the servers: weights and KV cache."""
    processes: int = 0
    """CUDA contexts, graphs, buffers."""

    @property
    def used(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.servers + self.processes


def moment_bytes(optimizer: str) -> float:
    """Return the bytes per parameter of an optimizer's moments by the name of its class; others than 8-bit ones count
    as Adam in fp32."""
    return ADAM_8BIT if optimizer.endswith("8bit") else ADAM


def head_bytes(size: ModelSize, tokens: int, head: Head, *, frozen: bool = False) -> int:
    """Return the peak bytes of the head. `frozen`: its embeddings are."""
    if head is Head.FUSED and size.hidden % FUSED_WIDTH == 0:
        if frozen:
            return min(tokens, FROZEN_CHUNK) * size.vocabulary * (4 + BF16) + 2 * tokens * BF16 * size.hidden
        return tokens * BF16 * (min(FUSED_COLUMNS, size.vocabulary) + size.hidden)
    chunk = 4 * CHUNK_COPIES * size.vocabulary * min(tokens, chunk_tokens(size.vocabulary))
    if head in (Head.FUSED, Head.CHUNKED):
        return chunk
    logits = tokens * size.vocabulary * BF16 * LOGIT_COPIES[head]
    return logits + chunk if head is Head.LOGITS else logits


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens in a chunk of logits."""
    return max(CHUNK_BYTES // (4 * vocabulary), MIN_CHUNK)


def activation_bytes(size: ModelSize, options: TrainerOptions, head: Head | None = None) -> int:
    """Return the peak bytes of activations and head together. The backward pass of the layers follows the head's."""
    tokens = options.tokens
    of_mlp, beside = saved_values(size, liger=options.liger)
    saved = BF16 * tokens * (of_mlp + beside)
    working = BF16 * tokens * (LAYER_GRADIENTS[0] * size.mlp_width + LAYER_GRADIENTS[1] * size.hidden)
    projected = head_bytes(size, tokens, options.head if head is None else head, frozen=bool(options.adapters))
    if not options.checkpointing:
        return size.layers * saved + max(working, projected)
    nothing = min(options.nothing, size.layers)
    recomputed = size.layers - nothing
    inputs = recomputed * size.hidden + min(options.mlp_only, recomputed) * (beside - size.hidden)
    return nothing * saved + BF16 * tokens * inputs + max(saved + working, projected)


def saved_values(size: ModelSize, *, liger: bool) -> tuple[int, int]:
    """Return the bf16 values per token that a layer keeps for its backward pass: those of its MLP, which includes the
    norm's result before it, and the others, of which the layer's input is one hidden size.

    With Liger's kernels, these others are the inputs and the result of the norms, queries, keys, values, the result of
    attention, and what norms of the heads read; the MLP's are gate, up and product, and for each expert the token and
    its result.
    """
    heads = size.query_width + size.key_value_width
    experts = size.routed * 2 * size.hidden + (size.mlp_width if size.routed else 0)
    if liger:
        return 3 * size.mlp_width + size.hidden + experts, 3 * size.hidden + (2 + size.head_norms) * heads
    return 4 * size.mlp_width + 5 * size.hidden + experts, 9 * size.hidden + (2 + 3 * size.head_norms) * heads


def resident_bytes(parameters: int, gpus: int, options: TrainerOptions) -> tuple[int, int]:
    """Return the bytes of the weights and of the optimizer that stay on a GPU between updates."""
    weights, trained = _states(parameters, options)
    weights = 0 if options.offload_policy or options.param_offload else weights
    optimizer = 0 if options.offload_policy or options.optimizer_offload else options.moments * trained
    return weights // gpus, int(optimizer / gpus)


def _states(parameters: int, options: TrainerOptions) -> tuple[int, int]:
    """Return the bytes of the trainer's weights and the number of trained parameters."""
    if options.adapters:
        return BF16 * parameters + MASTER * options.adapters, options.adapters
    return MASTER * parameters, parameters


def host_bytes(size: ModelSize, parameters: int, gpus: int, options: TrainerOptions) -> int:
    """Return the bytes in host memory of one model's `parameters`, over all GPUs. `size`: the shape of its layers."""
    pinned = pinned_growth(size, gpus)
    weights, trained = _states(parameters, options)
    if options.offload_policy:
        # FSDP2 steps the optimizer on the CPU
        return int((weights + GRADIENT * trained) * pinned) + int(options.moments * trained)
    moments = options.moments * trained
    return int((weights * options.param_offload + moments * options.optimizer_offload) * pinned)


def pinned_growth(size: ModelSize, gpus: int) -> float:
    """Return the factor by which a model grows in pinned host memory: torch's allocator rounds each tensor up to a
    power of two (c10's CachingHostAllocator), and FSDP2 cuts each tensor into as many parts as there are GPUs."""
    matrices = [(size.vocabulary * size.hidden, 1)]
    per_layer = [(size.mlp_width, 3), (size.hidden, 2), (size.key_value_width, 2)]
    matrices += [(width * size.hidden, count * size.layers) for width, count in per_layer]
    parts = [(max(MASTER * values // gpus, 1), count) for values, count in matrices]
    return sum(2 ** (part - 1).bit_length() * count for part, count in parts) / sum(
        part * count for part, count in parts
    )


def update_phases(size: ModelSize, gpus: int, options: TrainerOptions, *, critic: bool = False) -> tuple[Phase, ...]:
    """Return the peaks of an update: `backward` and, unless it runs on the CPU, `optimizer step`.

    `critic`: the model has a value head, so there are no logits.
    """
    parameters = size.value_parameters if critic else size.parameters
    weights, trained = (0 if options.offload_policy else part // gpus for part in _states(parameters, options))
    layer = size.layer_parameters
    root = parameters - size.layers * layer
    head = Head.FUSED if critic else options.head
    if critic:  # its engine recomputes whole layers
        options = replace(options, mlp_only=0, nothing=0)
    activations = activation_bytes(size, options, head)
    gathered = root + UNSHARDED_LAYERS * layer if options.reshard else parameters
    if options.adapters and gpus == 1 and not options.offload_policy:  # their engine gathers nothing, and casts A and B
        gathered = options.adapters
    reduced = _states(parameters, options)[1] if options.reduce_once else trained
    backward = Phase(
        name="backward",
        weights=weights + BF16 * gathered,
        gradients=GRADIENT * reduced + (0 if options.adapters else BF16 * (root + layer)),
        optimizer=int(options.moments * trained),
        # the embedding's gradient is reduced in fp32 at the end, after the activations are freed
        activations=max(activations, 0 if options.adapters else GRADIENT * root),
    )
    if options.offload_policy:
        return (backward,)
    scratch = OPTIMIZER_SCRATCH * (trained if options.moments == ADAM else root // gpus)
    step = Phase(
        name="optimizer step",
        weights=weights,
        gradients=GRADIENT * trained,
        optimizer=int(options.moments * trained) + scratch,
    )
    return backward, step
