"""The kernels of an MLP's SwiGLU whose layers have an adapter, forward and backward.

Invariant: gate and up are the layers' own products [tokens, width]; the sums with their adapters' parts are fp32, and
are neither written nor read. Triton is installed with torch for CUDA: `adapter_mlp` imports this module on a GPU alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of tiles of 16 to 128 tokens and 32 to 256 columns, these are the fastest for ranks 16 and 64 together. On an H100,
# 12,335 tokens of width 11,008 take 341 us at rank 16 and 369 at 64 forward, of which memory needs 270, and 606 and 670
# backward, of which it needs 450.
ROWS, COLUMNS, DEPTH, WARPS = 64, 64, 64, 4


@triton.jit
def _tile(tokens, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Return this block's rows [rows, 1] and columns [columns], which of them exist, and the offsets and the mask
    [rows, columns] of its values in tensors [tokens, width]."""
    row, column = tl.program_id(1) * rows + tl.arange(0, rows), tl.program_id(0) * columns + tl.arange(0, columns)
    row_mask, column_mask, row = row < tokens, column < width, row.to(tl.int64)[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    return row, column, row_mask, column_mask, row * width + column[None, :], mask


@triton.jit
def _read(x, offsets, mask):
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _multiply(
    total,
    low,
    weight,
    row,
    column,
    row_mask,
    column_mask,
    rank: tl.constexpr,
    low_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    column_stride: tl.constexpr,
    depth: tl.constexpr,
):
    """Add the product of `low` [tokens, rank] and `weight`, whose strides are given, to a tile."""
    for done in tl.static_range(0, rank, depth):
        k = done + tl.arange(0, depth)
        k_mask = k < rank
        x = tl.load(low + row * low_stride + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        y = weight + k[:, None] * rank_stride + column[None, :] * column_stride
        total = tl.dot(x, tl.load(y, mask=k_mask[:, None] & column_mask[None, :], other=0.0), total)
    return total


@triton.jit
def _gate_and_up(
    gate,
    up,
    low,
    b_gate,
    b_up,
    row,
    column,
    row_mask,
    column_mask,
    offsets,
    mask,
    rank: tl.constexpr,
    depth: tl.constexpr,
):
    """Return a tile of g and u: the layers' own products plus those of the halves of `low` [tokens, 2 * rank] and B
    [width, rank]."""
    g = _read(gate, offsets, mask)
    g = _multiply(g, low, b_gate, row, column, row_mask, column_mask, rank, 2 * rank, 1, rank, depth)
    u = _read(up, offsets, mask)
    u = _multiply(u, low + rank, b_up, row, column, row_mask, column_mask, rank, 2 * rank, 1, rank, depth)
    return g, u


@triton.jit(do_not_specialize=["tokens"])
def _activate(
    gate,
    up,
    low,
    b_gate,
    b_up,
    out,
    tokens,
    width: tl.constexpr,
    rank: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    row, column, row_mask, column_mask, offsets, mask = _tile(tokens, width, rows, columns)
    g, u = _gate_and_up(gate, up, low, b_gate, b_up, row, column, row_mask, column_mask, offsets, mask, rank, depth)
    tl.store(out + offsets, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _differentiate(
    d_out,
    gate,
    up,
    low,
    b_gate,
    b_up,
    d_low,
    a_down,
    tokens,
    width: tl.constexpr,
    rank: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    row, column, row_mask, column_mask, offsets, mask = _tile(tokens, width, rows, columns)
    d = _read(d_out, offsets, mask)
    d = _multiply(d, d_low, a_down, row, column, row_mask, column_mask, rank, rank, width, 1, depth)
    g, u = _gate_and_up(gate, up, low, b_gate, b_up, row, column, row_mask, column_mask, offsets, mask, rank, depth)
    share = tl.sigmoid(g)
    tl.store(gate + offsets, (d * u * share * (1 + g * (1 - share))).to(gate.dtype.element_ty), mask=mask)
    tl.store(up + offsets, (d * g * share).to(up.dtype.element_ty), mask=mask)


def activate(gate: Tensor, up: Tensor, low: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    """Return silu(g) * u, where g and u are `gate` and `up` [tokens, width] plus the products of the halves of `low`
    [tokens, 2 * rank] and B [width, rank] of each. All are contiguous and in half precision."""
    assert all(each.is_contiguous() for each in (gate, up, low, b_gate, b_up))
    out, (grid, sizes) = torch.empty_like(gate), _sizes(gate, b_gate)
    _activate[grid](gate, up, low, b_gate, b_up, out, len(gate), **sizes)  # pyright: ignore[reportIndexIssue]  # what Triton's decorator makes of it
    return out


def differentiate(
    d_out: Tensor, gate: Tensor, up: Tensor, low: Tensor, b_gate: Tensor, b_up: Tensor, d_low: Tensor, a_down: Tensor
) -> None:
    """Overwrite `gate` and `up` with the gradients of g and u, for the gradient of what `activate` returned: `d_out`
    [tokens, width] plus the product of `d_low` [tokens, rank] and `a_down` [rank, width]. Contiguous, too."""
    assert all(each.is_contiguous() for each in (d_out, gate, up, low, b_gate, b_up, d_low, a_down))
    grid, sizes = _sizes(gate, b_gate)
    _differentiate[grid](d_out, gate, up, low, b_gate, b_up, d_low, a_down, len(gate), **sizes)  # pyright: ignore[reportIndexIssue]  # as above


def _sizes(gate: Tensor, b: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of a kernel's blocks and its constants."""
    (tokens, width), rank = gate.shape, b.shape[1]
    depth = max(16, min(DEPTH, triton.next_power_of_2(rank)))  # 16: the least that tensor cores take
    sizes = {"width": width, "rank": rank, "rows": ROWS, "columns": COLUMNS, "depth": depth, "num_warps": WARPS}
    return (triton.cdiv(width, COLUMNS), triton.cdiv(tokens, ROWS)), sizes
