"""The kernels with which a GPU multiplies by the adapters' B and adds the product to a layer's output.

Invariant: a token's output gets the product of its own adapter's columns alone, which is summed in fp32 and rounded
with the output.

Triton is installed with SGLang: `dense_adapters` imports this module on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from recipe.dag.policy.adapter_columns import TILE
from recipe.dag.workflow.adapter_shape import STEP

# The kernels wait for memory: each output is read and written for some 100 multiplications. h and B are in the cache,
# but to read all columns of them takes as long as the outputs do; hence tiles of tokens of one adapter. Wide tiles read
# less of h per output, and are taken where they give each multiprocessor two, as the inputs of an MLP and prompts do;
# else narrow ones leave none idle. Kernels are compiled at their first use, which precedes the capture of a graph.
WIDE, NARROW, DEPTH = 128, 64, 64
MULTIPROCESSORS = 132  # of an H100


@triton.jit
def _read(tiles, step: tl.constexpr, height: tl.constexpr):
    """Return the tokens of this block's tile, where their adapter's columns begin, and how many these are."""
    tiles += tl.program_id(1) * (height + 2)
    return tl.load(tiles + tl.arange(0, height)), tl.load(tiles + height) * step, tl.load(tiles + height + 1) * step


@triton.jit
def _multiply(
    h,
    b,
    row,
    real,
    outputs,
    within,
    count,
    h_stride,
    b_stride,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    """Return the product [height, width] in fp32. `h`, `b`: at the adapter's first column."""
    total = tl.zeros((height, width), tl.float32)
    for done in tl.static_range(0, columns, depth):
        if done < count:
            column = done + tl.arange(0, depth)
            exists = column < count
            x = tl.load(h + row * h_stride + column[None, :], mask=real[:, None] & exists[None, :], other=0.0)
            y = b + column[:, None] * b_stride + outputs[None, :]
            total = tl.dot(x, tl.load(y, mask=exists[:, None] & within[None, :], other=0.0), total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _add_product(
    h,
    b,
    source,
    target,
    tiles,
    tokens,
    first_end,
    second_end,
    out,
    h_stride,
    source_stride,
    target_stride,
    columns: tl.constexpr,
    least: tl.constexpr,
    step: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    token, begin, count = _read(tiles, step, height)
    if count < least:  # in place, the base's tokens are done, too
        return
    # each part has tiles of its own, the last of which may be narrower
    tile = tl.program_id(0)
    first_tiles = tl.cdiv(first_end, width)
    second_tiles = first_tiles + tl.cdiv(second_end - first_end, width)
    first, second = tile < first_tiles, tile < second_tiles
    part = tl.where(first, 0, tl.where(second, 1, 2))
    start = tl.where(first, 0, tl.where(second, first_end, second_end))
    end = tl.where(first, first_end, tl.where(second, second_end, out))
    tile -= tl.where(first, 0, tl.where(second, first_tiles, second_tiles))

    outputs = start + tile * width + tl.arange(0, width)
    real, within = (token >= 0) & (token < tokens), outputs < end
    row = token.to(tl.int64)[:, None]  # times a stride, it may exceed 32 bits
    inside = real[:, None] & within[None, :]
    base = tl.load(source + row * source_stride + outputs[None, :], mask=inside, other=0.0)
    h += part * columns + begin
    b += begin.to(tl.int64) * out
    total = _multiply(h, b, row, real, outputs, within, count, h_stride, out, columns, height, width, depth)
    tl.store(target + row * target_stride + outputs[None, :], base.to(tl.float32) + total, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    h,
    b,
    source,
    target,
    tiles,
    tokens,
    half,
    h_stride,
    source_stride,
    columns: tl.constexpr,
    step: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    token, begin, count = _read(tiles, step, height)
    if count < 0:
        return
    outputs = tl.program_id(0) * width + tl.arange(0, width)
    real, within = (token >= 0) & (token < tokens), outputs < half
    row = token.to(tl.int64)[:, None]
    inside = real[:, None] & within[None, :]
    source += row * source_stride + outputs[None, :]
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + half, mask=inside, other=0.0)
    h += begin
    b += begin.to(tl.int64) * 2 * half
    of_gate = _multiply(h, b, row, real, outputs, within, count, h_stride, 2 * half, columns, height, width, depth)
    h += columns
    b += half
    of_up = _multiply(h, b, row, real, outputs, within, count, h_stride, 2 * half, columns, height, width, depth)
    # rounded, as if they had been written
    of_gate = (gate.to(tl.float32) + of_gate).to(gate.dtype).to(tl.float32)
    of_up = (up.to(tl.float32) + of_up).to(up.dtype).to(tl.float32)
    tl.store(target + row * half + outputs[None, :], of_gate * tl.sigmoid(of_gate) * of_up, mask=inside)


def add_product(
    h: torch.Tensor, b: torch.Tensor, output: torch.Tensor, tiles: torch.Tensor, ends: Sequence[int]
) -> torch.Tensor:
    """Return `output` [tokens, out] plus the products of `h` [tokens, parts * columns] and `b` [columns, out], for the
    tokens and columns of `tiles`, as `adapter_columns.tiles_of` returns them.

    `h`, `b` and `output`: bf16 or fp16; rows of `h` and `output` may lie apart. The sum is contiguous: in place, if
    `output` is. `ends`: of the parts in `out`, three at most.
    """
    tokens, (columns, out) = len(output), b.shape
    assert len(h) == tokens
    assert h.stride(1) == output.stride(1) == 1
    total = output if output.is_contiguous() else output.new_empty(output.shape)
    first, second = (*ends[:-1], out, out)[:2]
    width = WIDE if triton.cdiv(tokens, TILE) * triton.cdiv(out, WIDE) >= 2 * MULTIPROCESSORS else NARROW
    wide = sum(triton.cdiv(size, width) for size in (first, second - first, out - second))
    _add_product[(wide, len(tiles))](  # pyright: ignore[reportIndexIssue]  # what Triton's decorator makes of it
        h,
        b,
        output,
        total,
        tiles,
        tokens,
        first,
        second,
        out,
        h.stride(0),
        output.stride(0),
        total.stride(0),
        columns=columns,
        least=1 if total is output else 0,
        step=STEP,
        height=TILE,
        width=width,
        depth=_depth(columns),
    )
    return total


def add_product_and_gate(h: torch.Tensor, b: torch.Tensor, output: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Return silu(g) * u [tokens, out / 2], where g and u are the halves of what `add_product` would return: an MLP's
    next step, with which the sum is neither written nor read again."""
    tokens, (columns, out) = len(output), b.shape
    assert len(h) == tokens
    assert h.stride(1) == output.stride(1) == 1
    result = output.new_empty(tokens, out // 2)
    _gate[(triton.cdiv(out // 2, NARROW), len(tiles))](  # pyright: ignore[reportIndexIssue]  # as above
        h,
        b,
        output,
        result,
        tiles,
        tokens,
        out // 2,
        h.stride(0),
        output.stride(0),
        columns=columns,
        step=STEP,
        height=TILE,
        width=NARROW,
        depth=_depth(columns),
    )
    return result


def _depth(columns: int) -> int:
    return min(DEPTH, triton.next_power_of_2(columns))
